"""Writing a distributed checkpoint (torch_dist) for a layout: one file per unit of work, the metadata last."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron_dsv41.checkpoint.jobs import Unit
from megatron_dsv41.checkpoint.mapping import Binding
from megatron_dsv41.checkpoint.pieces import row_pieces
from megatron_dsv41.checkpoint.regions import Region, shape_of, slices_of
from megatron_dsv41.checkpoint.safetensors_io import ShardWriter, write_file
from megatron_dsv41.checkpoint.shares import Layout
from megatron_dsv41.checkpoint.sources import StateSource
from megatron_dsv41.checkpoint.storage import TORCH_DTYPES, num_bytes

FILE_BYTES = 2**28
# What makes Megatron accept the folder as one of its distributed checkpoints.
MEGATRON = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
Chunk = tuple[Binding, Region]


class DistributedWriter:
    """A checkpoint of `source` divided as `layout` says. `read` is asked for what one rank owns, piece by piece."""

    def __init__(self, source: StateSource, bindings: Sequence[Binding], layout: Layout):
        self.source = source
        owned = [list(_pieces(layout.owned(rank, bindings))) for rank in range(layout.num_ranks)]
        self.files = [file for chunks in owned for file in self._filled(chunks)]
        self.bindings = bindings

    def units(self) -> Iterator[Unit]:
        """One file each."""
        for number, chunks in enumerate(self.files):
            yield self._unit(number, chunks)

    def largest(self) -> int:
        """Elements of the largest piece."""
        return max((math.prod(shape_of(region)) for file in self.files for _, region in file), default=1)

    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(self._size(chunk) for file in self.files for chunk in file)

    def finish(self, work: Path) -> None:
        """The metadata, from what the units noted."""
        chunks: dict[str, list[ChunkStorageMetadata]] = {binding.native: [] for binding in self.bindings}
        results: list[list[WriteResult]] = []
        for number, file in enumerate(self.files):
            for binding, region in file:
                chunks[binding.native].append(_chunk(region))
            results.append(pickle.loads((work / _notes(number)).read_bytes()))
        metadata = Metadata(
            {
                binding.native: TensorStorageMetadata(
                    TensorProperties(self._dtype(binding)), torch.Size(binding.shape), chunks[binding.native]
                )
                for binding in self.bindings
            }
        )
        torch.save({}, work / "common.pt")
        write_file(work / "metadata.json", json.dumps(MEGATRON))
        FileSystemWriter(work).finish(metadata, results)
        for number in range(len(self.files)):
            (work / _notes(number)).unlink()

    def _filled(self, chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
        file: list[Chunk] = []
        size = 0
        for chunk in chunks:
            if file and size + self._size(chunk) > FILE_BYTES:
                yield file
                file, size = [], 0
            file.append(chunk)
            size += self._size(chunk)
        if file:
            yield file

    def _size(self, chunk: Chunk) -> int:
        return num_bytes(self.source.dtype(chunk[0].native), shape_of(chunk[1]))

    def _dtype(self, binding: Binding) -> torch.dtype:
        return TORCH_DTYPES[self.source.dtype(binding.native)]

    def _unit(self, number: int, chunks: Sequence[Chunk]) -> Unit:
        def run(writer: ShardWriter) -> None:
            files = FileSystemWriter(writer.folder)
            files.set_up_storage_writer(False, rank=number, use_collectives=False)
            plan = files.prepare_local_plan(SavePlan([self._item(*chunk) for chunk in chunks]))
            results = files.write_data(plan, _Reading(self.source)).wait()
            write_file(writer.folder / _notes(number), pickle.dumps(results))

        return Unit(sum(self._size(chunk) for chunk in chunks), run, f"__{number}_0.distcp")

    def _item(self, binding: Binding, region: Region) -> WriteItem:
        chunk = _chunk(region)
        data = TensorWriteData(chunk, TensorProperties(self._dtype(binding)), torch.Size(binding.shape))
        return WriteItem(MetadataIndex(binding.native, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


class _Reading(DefaultSavePlanner):
    """Reads a chunk at the moment when it is written."""

    def __init__(self, source: StateSource):
        super().__init__()
        self.source = source

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.tensor_data
        chunk = write_item.tensor_data.chunk
        region = tuple(range(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        values = self.source.read(write_item.index.fqn, *slices_of(region))
        return values.to(write_item.tensor_data.properties.dtype).contiguous()


def _pieces(owned: Iterator[Chunk]) -> Iterator[Chunk]:
    """Owned regions cut into pieces along their first axis."""
    for binding, region in owned:
        for rows in row_pieces(shape_of(region), stacked=bool(binding.via.lead)):
            first = region[0].start
            yield binding, (range(first + rows.start, first + rows.stop), *region[1:])


def _chunk(region: Region) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([axis.start for axis in region]), torch.Size(shape_of(region)))


def _notes(number: int) -> str:
    return f"notes-{number}"
