import errno
import hashlib
import os

import pytest

from megatron_dsv41.data.files import disk_full_explained, sha256_of, staging_folder, write_whole


def test_write_whole_replaces(tmp_path):
    path = tmp_path / "new" / "file"
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two" and [p.name for p in path.parent.iterdir()] == ["file"]
    assert sha256_of(path) == hashlib.sha256(b"two").hexdigest()


def test_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.mkdir()  # a folder in the way: the rename fails
    with pytest.raises(OSError):
        write_whole(path, b"x")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_staging_folder_goes_with_its_block(tmp_path):
    with pytest.raises(RuntimeError), staging_folder(tmp_path / "deep" / "data") as folder:
        (folder / "x").write_text("half")
        assert folder.parent == tmp_path / "deep"
        raise RuntimeError
    assert not list((tmp_path / "deep").iterdir())


def test_full_disk_is_explained(tmp_path):
    with (
        pytest.raises(OSError, match="while writing to .* free there.*free some space") as caught,
        disk_full_explained(tmp_path),
        open("/dev/full", "wb") as stream,
    ):
        stream.write(b"x" * 100_000)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(FileNotFoundError), disk_full_explained(tmp_path):
        os.stat(tmp_path / "missing")
