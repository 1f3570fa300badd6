"""Files that appear whole or not at all: written beside their place, synced, renamed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

CHUNK_BYTES = 1 << 22


def sha256_of(path: str | Path) -> str:
    """Hex SHA-256 of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while piece := stream.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def write_whole(path: str | Path, content: bytes) -> None:
    """Replace `path` by `content`; a reader or a crash sees the old file or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def sync_file(path: str | Path) -> None:
    """Force a written file to disk."""
    with open(path, "rb+") as stream:
        os.fsync(stream.fileno())


def sync_folder(path: str | Path) -> None:
    """Force a folder's renames to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def staging_folder(prefix: Path) -> Iterator[Path]:
    """A temporary folder on the file system of `prefix`, gone when the block ends, however it ends."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=staging_prefix(prefix), dir=prefix.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def staging_prefix(prefix: Path) -> str:
    """How the staging folders of `prefix` begin: what a killed run can leave behind."""
    return f".{prefix.name}.staging-"


@contextlib.contextmanager
def disk_full_explained(place: Path) -> Iterator[None]:
    """Turn "no space", "quota exceeded" and "file too large" into an OSError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = shutil.disk_usage(place).free
        message = (
            f"{os.strerror(error.errno)} while writing to {place} ({free / 1e9:.2f} GB free there): nothing "
            "was kept; free some space, raise the quota, or choose another output"
        )
        raise OSError(error.errno, message) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
