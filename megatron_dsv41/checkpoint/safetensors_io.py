"""safetensors folders: reading by row slices, writing shards of known contents in any order.

The format is parsed here, not through the safetensors package, which knows no E8M0 and wants whole tensors: a file is
an 8-byte header length, a JSON header (name -> dtype, shape, byte range), then the tensors' bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from megatron_dsv41.checkpoint.open_files import OpenFiles
from megatron_dsv41.checkpoint.regions import ReadInto, read_region
from megatron_dsv41.checkpoint.storage import DTYPE_NAMES, TORCH_DTYPES, num_bytes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
COPY_BYTES = 16 * 2**20
MAX_HEADER = 256 * 2**20  # bytes; the largest released header is under 1 MB


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. offset: of its first byte in the file."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Stored size."""
        return num_bytes(self.dtype, self.shape)


@dataclasses.dataclass(frozen=True)
class Header:
    """One shard's header: tensors in file order and the free-form metadata (None where the file has none)."""

    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str] | None


def read_header(path: Path) -> Header:
    """Parse and check one file's header. ValueError naming the file for truncation and every inconsistency."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(size - 8, MAX_HEADER):
            raise ValueError(f"{path}: not a safetensors file or truncated (header of {length} bytes, file of {size})")
        raw = file.read(length)
    try:
        entries: dict[str, Any] = json.loads(raw, object_pairs_hook=_no_duplicates)
    except ValueError as error:  # JSON and UTF-8 errors are ValueErrors
        raise ValueError(f"{path}: corrupt header: {error}") from error
    metadata = entries.pop("__metadata__", None)
    tensors: list[TensorInfo] = []
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: _begin(path, *item)):
        info = _tensor_info(path, name, entry, 8 + length)
        begin, end = entry["data_offsets"]
        if begin != position or end - begin != info.num_bytes:
            raise ValueError(
                f"{path}: corrupt header: {name} ({info.dtype} {list(info.shape)}, {info.num_bytes} bytes) has "
                f"data_offsets [{begin}, {end}], expected [{position}, {position + info.num_bytes}]"
            )
        position = end
        tensors.append(info)
    if size != 8 + length + position:
        state = "truncated" if size < 8 + length + position else "longer than its header says"
        raise ValueError(f"{path}: {state}: {size} bytes, the header describes {8 + length + position}")
    return Header(tuple(tensors), metadata)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"duplicate name {twice[0]!r}")
    return result


def _begin(path: Path, name: str, entry: Any) -> tuple[int, int]:
    try:
        begin, end = entry["data_offsets"]
        return int(begin), int(end)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{path}: corrupt header: entry of {name!r} is {entry!r}") from error


def _tensor_info(path: Path, name: str, entry: Mapping[str, Any], data_start: int) -> TensorInfo:
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"{path}: tensor {name} has dtype {dtype!r}, known are {', '.join(TORCH_DTYPES)}")
    sizes = cast("list[Any]", shape if isinstance(shape, list) else [None])
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{path}: corrupt header: tensor {name} has shape {shape!r}")
    return TensorInfo(name, path.name, dtype, tuple(sizes), data_start + entry["data_offsets"][0])


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Stored size."""
        return num_bytes(self.dtype, self.shape)


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file to be written: tensors in file order."""

    file: str
    tensors: tuple[TensorSpec, ...]
    metadata: Mapping[str, str] | None = dataclasses.field(default_factory=lambda: {"format": "pt"})

    def header(self) -> bytes:
        """Length and JSON header, padded to 8 bytes, byte for byte as the safetensors package writes them."""
        entries: dict[str, Any] = {} if self.metadata is None else {"__metadata__": dict(self.metadata)}
        position = 0
        for spec in self.tensors:
            end = position + spec.num_bytes
            entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [position, end]}
            position = end
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


class SafetensorsFolder:
    """A checkpoint folder: one `model.safetensors`, or shards listed by the index, which is the authority.

    single: another name of the one file, which then has no index.

    With `partial`, shards that are not there or cannot be read are allowed (`missing_files`, `damaged_files` and
    `missing_names` say what lacks); otherwise they are a ValueError. Reads are thread-safe and load only the rows
    asked; files stay open between them. A copy in another process (pickled) reads without looking at headers again.
    """

    def __init__(self, path: str | Path, *, partial: bool = False, single: str = SINGLE):
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is not a checkpoint folder: no such directory")
        self.bytes_read = 0  # of tensors, so far; approximate where several threads read
        self._files = OpenFiles(self.path)
        self.index_text: str | None = None
        self.headers: dict[str, Header] = {}
        self.missing_files: tuple[str, ...] = ()
        self.damaged_files: dict[str, str] = {}  # of the index, and what is wrong: still being downloaded, perhaps
        self.missing_names: frozenset[str] = frozenset()
        if single == SINGLE and (self.path / INDEX).exists():
            self._read_index(partial)
        elif (self.path / single).exists():
            self.headers[single] = read_header(self.path / single)
        else:
            raise ValueError(f"{self.path} has neither {INDEX} nor {single}: {self._found_instead()}")
        self.tensors = {info.name: info for header in self.headers.values() for info in header.tensors}
        if self.missing_files and not partial:
            raise ValueError(
                f"{self.path}: {len(self.missing_files)} shards named by the index are missing: "
                f"{', '.join(self.missing_files[:10])} ({len(self.missing_names)} tensors)"
            )

    def _found_instead(self) -> str:
        pointer = self.path / "weights_from"
        if pointer.is_file():
            return f"its weights lie in {self.path.parent / pointer.read_text().strip()}, name that folder"
        shards = sorted(p.name for p in self.path.glob("*.safetensors"))
        return f"it has {', '.join(shards[:3])} but no index" if shards else "no safetensors files there"

    def _read_index(self, partial: bool) -> None:
        self.index_text = (self.path / INDEX).read_text()
        try:
            index: dict[str, Any] = json.loads(self.index_text, object_pairs_hook=_no_duplicates)
            weight_map: dict[str, str] = dict(index["weight_map"])
            outside = [file for file in weight_map.values() if Path(file).name != file]
            if outside:
                raise ValueError(f"weight_map names {outside[0]!r}, which is not a file name of this folder")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path / INDEX}: corrupt index: {error!r}") from error
        files = sorted(set(weight_map.values()))
        self.missing_files = tuple(file for file in files if not (self.path / file).is_file())
        absent = set(self.missing_files)
        found: dict[str, str] = {}
        for file in files:
            if file in absent:
                continue
            try:
                self.headers[file] = read_header(self.path / file)
            except ValueError as error:
                if not partial:
                    raise
                self.damaged_files[file] = str(error)
                absent.add(file)
                continue
            for info in self.headers[file].tensors:
                if info.name in found:
                    raise ValueError(f"{self.path}: {info.name} is in two shards, {found[info.name]} and {file}")
                found[info.name] = file
        self.missing_names = frozenset(name for name, file in weight_map.items() if file in absent)
        for name, file in found.items():
            if weight_map.get(name) != file:
                place = weight_map.get(name)
                said = f"the index says {place}" if place else "the index does not list it"
                raise ValueError(f"{self.path / file}: holds {name}, but {said}")
        lost = [name for name, file in weight_map.items() if file not in absent and name not in found]
        if lost:
            raise ValueError(
                f"{self.path}: {len(lost)} tensors of the index are not in their shards: "
                f"{', '.join(f'{name} ({weight_map[name]})' for name in lost[:10])}"
            )

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of a tensor; ValueError where it is absent."""
        if name not in self.tensors:
            missing = " (its shard is missing)" if name in self.missing_names else ""
            raise ValueError(f"{self.path} has no tensor {name}{missing}")
        return self.tensors[name]

    def has(self, name: str) -> bool:
        """Whether the folder lists a tensor, be its shard missing or not."""
        return name in self.tensors or name in self.missing_names

    def shards(self) -> tuple[Shard, ...]:
        """The files of the folder, as they would be written."""
        return tuple(
            Shard(file, tuple(TensorSpec(i.name, i.dtype, i.shape) for i in header.tensors), header.metadata)
            for file, header in self.headers.items()
        )

    def fingerprint(self) -> Any:
        """A JSON value that changes when the files of the folder do."""
        files = [(file, (self.path / file).stat()) for file in sorted(self.headers)]
        return [str(self.path.resolve()), [[file, stat.st_size, stat.st_mtime_ns] for file, stat in files]]

    def read(self, name: str, *region: range) -> Tensor:
        """A tensor, or consecutive parts of its first axes. The result owns its memory."""
        info = self.info(name)
        box = (*region, *(range(size) for size in info.shape[len(region) :]))
        return read_region(self._reader(info), info.shape, TORCH_DTYPES[info.dtype], box)

    def read_bytes(self, info: TensorInfo, start: int, count: int) -> Tensor:
        """`count` bytes of a tensor from its byte `start`, uint8 [count]."""
        return read_region(self._reader(info), (info.num_bytes,), torch.uint8, (range(start, start + count),))

    def _reader(self, info: TensorInfo) -> ReadInto:
        file, path = self._files.descriptor(info.file), self.path / info.file

        def read(buffer: memoryview, start: int) -> None:
            self.bytes_read += read_at(file, buffer, info.offset + start, f"{path}: truncated inside {info.name}")

        return read


def shards_by_size(specs: Iterable[TensorSpec], max_bytes: int) -> list[Shard]:
    """Fill shards of at most `max_bytes` in order; a larger tensor has a shard of its own."""
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if groups[-1] and size + spec.num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.num_bytes
    if len(groups) == 1:
        return [Shard(SINGLE, _aligned(groups[0]))]
    total = len(groups)
    return [Shard(f"model-{i:05d}-of-{total:05d}.safetensors", _aligned(g)) for i, g in enumerate(groups, 1)]


def shards_by_file(specs: Iterable[TensorSpec], files: Mapping[str, str]) -> list[Shard]:
    """Shards as `files` (tensor name -> file) says."""
    groups: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        groups.setdefault(files[spec.name], []).append(spec)
    return [Shard(file, _aligned(groups[file])) for file in sorted(groups)]


def _aligned(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Widest elements first, so that every tensor starts at a multiple of its element size."""
    return tuple(sorted(specs, key=lambda spec: (-TORCH_DTYPES[spec.dtype].itemsize, spec.name)))


def index_text(shards: Sequence[Shard]) -> str:
    """The index file of shards."""
    weight_map = {spec.name: shard.file for shard in shards for spec in shard.tensors}
    total = sum(spec.num_bytes for shard in shards for spec in shard.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2) + "\n"


class ShardWriter:
    """Writes the tensors of known shards into `folder`, piece by piece, in any order, from any thread.

    Files get their full length and header at once; `close` syncs them. Nothing tells a finished file from an
    unfinished one, so `folder` must be one that is renamed when everything is written.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard]):
        self.folder = folder
        self.shards = tuple(shards)
        self._lock = threading.Lock()
        self._files: dict[str, int] = {}
        self._dirty: set[str] = set()
        self._places: dict[str, tuple[str, int, TensorSpec]] = {}
        self._headers = {shard.file: shard.header() for shard in shards}
        self.sizes: dict[str, int] = {}
        for shard in shards:
            position = len(self._headers[shard.file])
            for spec in shard.tensors:
                self._places[spec.name] = (shard.file, position, spec)
                position += spec.num_bytes
            self.sizes[shard.file] = position

    def spec(self, name: str) -> TensorSpec:
        """The tensor as it was announced."""
        return self._places[name][2]

    def file_of(self, target: str) -> str:
        """File of a tensor; a name that is no announced tensor is a file of its own."""
        return self._places[target][0] if target in self._places else target

    def write_rows(self, name: str, first_row: int, rows: Tensor) -> None:
        """Write whole rows of the first axis (or, from row 0, a whole tensor of any rank)."""
        file, _, spec = self._places[name]
        if DTYPE_NAMES[rows.dtype] != spec.dtype or tuple(rows.shape[1:]) != spec.shape[1:]:
            raise ValueError(f"{file}: {name} is {spec.dtype} {list(spec.shape)}, got {rows.dtype} {list(rows.shape)}")
        self.write_bytes(name, first_row * num_bytes(spec.dtype, spec.shape[1:]), rows.contiguous().reshape(-1))

    def write_bytes(self, name: str, start: int, data: Tensor) -> None:
        """Write the bytes of a contiguous tensor from byte `start` of the tensor `name`."""
        file, offset, spec = self._places[name]
        view = memoryview(data.view(torch.uint8).numpy())
        if start + len(view) > spec.num_bytes:
            raise ValueError(f"{file}: {start + len(view)} bytes do not fit into {name} of {spec.num_bytes}")
        write_at(self._open(file), view, offset + start, self.folder / file)

    def _open(self, file: str) -> int:
        with self._lock:
            if file not in self._files:
                path = self.folder / file
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                self._files[file] = descriptor
                header = self._headers[file]
                write_at(descriptor, memoryview(header), 0, path)
                os.ftruncate(descriptor, self.sizes[file])
            self._dirty.add(file)
            return self._files[file]

    def sync(self) -> None:
        """Bring everything written so far to the disk."""
        with self._lock:
            dirty, self._dirty = self._dirty, set()
            descriptors = [self._files[file] for file in dirty]
        for descriptor in descriptors:
            os.fsync(descriptor)

    def close(self) -> None:
        """Sync and close. Shards of which nothing was written (all tensors empty) are made too."""
        for shard in self.shards:
            self._open(shard.file)
        self.sync()
        self.release()

    def release(self) -> None:
        """Close the files without syncing them."""
        with self._lock:
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()


def read_at(descriptor: int, buffer: memoryview, offset: int, truncated: str) -> int:
    """Fill the buffer from a file offset and return its size; ValueError `truncated` where the file ends before."""
    done = 0
    while done < len(buffer):
        got = os.preadv(descriptor, [buffer[done:]], offset + done)
        if got == 0:
            raise ValueError(truncated)
        done += got
    return done


def write_at(descriptor: int, data: memoryview, offset: int, path: Path) -> None:
    """Write all of `data` at a file offset; a full disk is an OSError that names the file and what to do."""
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(descriptor, data[done:], offset + done)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise OSError(
                    errno.ENOSPC,
                    f"no space left on the disk while writing {path}: make room and run the same command again, "
                    "it continues where it stopped",
                ) from error
            raise


def require_space(folder: Path, needed: int) -> None:
    """OSError when the disk of `folder` (an existing directory) has fewer than `needed` bytes left."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"{folder}: {needed / 1e9:.2f} GB are to be written and the disk has {free / 1e9:.2f} GB free",
        )


def write_file(path: Path, content: str | bytes) -> None:
    """Write a small file so that it is either whole or absent: beside, synced, renamed."""
    with _beside(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def copy_file(source: Path, path: Path) -> None:
    """Like `write_file`, for a file of any size: COPY_BYTES of it are in memory."""
    with source.open("rb") as content, _beside(path) as file:
        shutil.copyfileobj(content, file, COPY_BYTES)


@contextlib.contextmanager
def _beside(path: Path) -> Generator[BinaryIO]:
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
