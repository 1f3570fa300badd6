"""Distributed checkpoints in torch's format (Megatron's torch_dist), read and written without Megatron.

Of a stored chunk only the asked region is read, however large the chunk: memory does not grow with a rank's share.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron_dsv41.checkpoint.inventory import check_native, refuse
from megatron_dsv41.checkpoint.mapping import Binding, bind
from megatron_dsv41.checkpoint.native_record import NativeRecord
from megatron_dsv41.checkpoint.open_files import OpenFiles
from megatron_dsv41.checkpoint.regions import Region, intersection, read_region, region_of, shape_of, shifted, slices_of
from megatron_dsv41.checkpoint.safetensors_io import SafetensorsFolder, read_at
from megatron_dsv41.checkpoint.storage import DTYPE_NAMES
from megatron_dsv41.config import DSV41Config

METADATA = ".metadata"


def is_distributed(path: Path | str) -> bool:
    """Whether a folder holds a distributed checkpoint."""
    return (Path(path) / METADATA).is_file()


class DistributedTensors:
    """The tensors of one distributed checkpoint; a `StateSource` of those named. Files stay open between reads.

    A copy in another process (pickled) reads without looking at the metadata again.

    ValueError where one of them is missing, or a file that the checkpoint lists is missing or too short.
    """

    def __init__(self, path: Path | str, names: Sequence[str]):
        self.path = Path(path)
        self.bytes_read = 0  # of tensors, so far; approximate where several threads read
        metadata, lost = _look_at(self.path)
        if lost or metadata is None:
            raise ValueError(f"{self.path} is damaged: {lost[0]}" + (f" and {len(lost) - 1} more" if lost[1:] else ""))
        stored = metadata.state_dict_metadata
        missing = [name for name in names if not isinstance(stored.get(name), TensorStorageMetadata)]
        if missing:
            raise ValueError(f"{self.path} lacks {len(missing)} tensors of the model, such as {missing[0]}")
        self._names = list(names)
        self._stored: dict[str, Any] = {name: stored[name] for name in names}
        self._places = {index: place for index, place in metadata.storage_data.items() if index.fqn in self._stored}
        self._files = OpenFiles(self.path)

    def names(self) -> Sequence[str]:
        """The names asked for."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape."""
        return tuple(self._stored[name].size)

    def dtype(self, name: str) -> str:
        """Dtype that `read` returns, by its safetensors name."""
        return DTYPE_NAMES[self._stored[name].properties.dtype]

    def identity(self) -> Any:
        """Place, sizes and times of the files."""
        files = [(p.name, p.stat()) for p in sorted(self.path.glob("*.distcp"))]
        return [str(self.path.resolve()), [[name, stat.st_size, stat.st_mtime_ns] for name, stat in files]]

    def read(self, name: str, *cut: slice) -> Tensor:
        """A tensor, or a region of it, from whatever chunks hold it."""
        stored, region = self._stored[name], region_of(self.shape(name), cut)
        result = torch.empty(shape_of(region), dtype=stored.properties.dtype)
        missing = result.numel()
        for i, chunk in enumerate(stored.chunks):
            box = tuple(range(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            common = intersection(region, box) if missing else None
            if common is None:
                continue
            part = self._read_chunk(MetadataIndex(name, chunk.offsets, i), name, shifted(common, chunk.offsets))
            if part.shape == result.shape:
                return part
            result[slices_of(shifted(common, [axis.start for axis in region]))] = part
            missing -= part.numel()
        if missing:
            raise ValueError(f"{self.path}: {name} lacks {missing} of the elements asked for")
        return result

    def _read_chunk(self, index: MetadataIndex, name: str, region: Region) -> Tensor:
        place = self._places[index]
        file = self._files.descriptor(place.relative_path)
        with FakeTensorMode(), _View(file, place.offset, place.length) as view:
            header = torch.load(cast(IO[bytes], view), weights_only=True)  # shape, strides and place; no data
        if not header.is_contiguous():
            with _View(file, place.offset, place.length) as view:
                self.bytes_read += place.length
                return torch.load(cast(IO[bytes], view), weights_only=True)[slices_of(region)].contiguous()
        start = place.offset + header.untyped_storage()._checkpoint_offset + header.storage_offset() * header.itemsize

        def read(buffer: memoryview, offset: int) -> None:
            message = f"{self.path / place.relative_path}: truncated inside {name}"
            self.bytes_read += read_at(file, buffer, start + offset, message)

        return read_region(read, header.shape, header.dtype, region)


class DistributedSource(DistributedTensors):
    """A native folder whose tensors lie in a distributed checkpoint (`import_checkpoint` with a layout)."""

    def __init__(self, path: Path | str):
        self.config = DSV41Config.load(path)
        self.record = NativeRecord.load(Path(path))
        self.folder = SafetensorsFolder(path)  # kept scales and carried-through tensors
        bindings = bind(self.config)
        self.bindings = {binding.native: binding for binding in bindings}
        super().__init__(path, list(self.bindings))
        refuse(self.path, check_native({name: self.shape(name) for name in self.bindings}, bindings))

    def stored_names(self, binding: Binding) -> list[str]:
        """No safetensors hold native tensors here."""
        return []


def lost_files(path: Path | str) -> list[str]:
    """Files that a distributed checkpoint needs and that are missing or too short, with what is wrong."""
    return _look_at(Path(path))[1]


def too_short(path: Path, sizes: Mapping[str, int]) -> list[str]:
    """Files of a folder (name -> least bytes) that are missing or too short, with what is wrong.

    Nothing is raised where somebody removes them meanwhile.
    """
    problems: list[str] = []
    for file, size in sizes.items():
        try:
            found = (path / file).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            problems.append(f"{file} is missing")
            continue
        if found < size:
            problems.append(f"{file} has {found} bytes of {size}")
    return problems


def _look_at(path: Path) -> tuple[Metadata | None, list[str]]:
    """What a checkpoint says of itself, and what is wrong with its files; None where it says nothing."""
    try:
        metadata = FileSystemReader(path).read_metadata()
    except Exception as error:  # whatever unpickling meets
        return None, [f"{METADATA} cannot be read ({str(error) or type(error).__name__})"]
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    return metadata, too_short(path, dict(sorted(ends.items())))


class _View(io.RawIOBase):
    """Bytes [offset, offset + length) of an open file as a file of its own, with a position of its own."""

    def __init__(self, descriptor: int, offset: int, length: int):
        super().__init__()
        self._descriptor, self._offset, self._length, self._position = descriptor, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._position))
        got = os.preadv(self._descriptor, [memoryview(buffer)[:count]], self._offset + self._position)
        self._position += got
        return got
