"""Cutting conversions into units of work: rows of a tensor to convert, ranges of bytes to copy."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_dsv41.checkpoint.finite import require_finite
from megatron_dsv41.checkpoint.jobs import Unit
from megatron_dsv41.checkpoint.mapping import Binding
from megatron_dsv41.checkpoint.native_record import NATIVE
from megatron_dsv41.checkpoint.safetensors_io import (
    INDEX,
    SafetensorsFolder,
    Shard,
    ShardWriter,
    copy_file,
    index_text,
    write_file,
)
from megatron_dsv41.checkpoint.storage import TORCH_DTYPES
from megatron_dsv41.config import DSV41Config

GIB = 2**30
PIECE_BYTES = 32 * 2**20  # one copy
PIECE_ELEMENTS = 4 * 2**20  # one decode or encode, where rows can be cut this fine
ROW_ALIGNMENT = 32  # pieces of a matrix start at a row of scales
WORKING_BYTES = 24  # per element of a piece: stored, decoded, stacked or joined, compared (float32 at worst)
WEIGHTS = (".safetensors", ".distcp")
DISTRIBUTED = ("common.pt", "metadata.json")  # beside the parts of a distributed checkpoint
FIXED_BYTES = GIB  # interpreter, torch, names and places of 96,085 tensors


@dataclasses.dataclass(frozen=True)
class Effort:
    """What a conversion may use. max_memory: bytes; fewer threads run where the largest pieces would exceed it."""

    max_memory: int = 4 * GIB
    workers: int = 0  # 0: one per CPU, at most 8
    progress: bool = False

    def threads(self, largest_piece: int, processes: int = 1) -> int:
        """Threads of each of `processes` whose pieces (elements) fit into memory at the same time.

        ValueError when not even one does.
        """
        piece = max(largest_piece * WORKING_BYTES, PIECE_BYTES)
        fit = (self.max_memory // processes - FIXED_BYTES) // piece
        if fit < 1:
            need = processes * (FIXED_BYTES + piece)
            raise ValueError(
                f"max_memory is {self.max_memory / GIB:.2f} GiB, {processes} processes with the largest piece of this "
                f"checkpoint each need {need / GIB:.2f} GiB: raise --max-memory or start fewer processes on a machine"
            )
        return int(min(self.workers or max(1, min(8, os.cpu_count() or 1) // processes), fit))


def row_pieces(shape: tuple[int, ...], *, stacked: bool) -> Iterator[slice]:
    """Cut a tensor along its first axis. Rows of a stacked tensor are experts, never divided."""
    row = math.prod(shape[1:])
    count = max(1, PIECE_ELEMENTS // max(row, 1))
    if not stacked:
        count = max(ROW_ALIGNMENT, count // ROW_ALIGNMENT * ROW_ALIGNMENT)
    for start in range(0, shape[0], count):
        yield slice(start, min(start + count, shape[0]))


def binding_pieces(binding: Binding) -> Iterator[slice]:
    """Row pieces of a native tensor."""
    return row_pieces(binding.shape, stacked=bool(binding.via.lead))


def num_elements(shape: tuple[int, ...], rows: slice) -> int:
    """Elements of some rows."""
    return (rows.stop - rows.start) * math.prod(shape[1:])


def copy_units(
    folder: SafetensorsFolder, name: str, target: str, target_start: int = 0, *, finite: bool = True
) -> Iterator[Unit]:
    """Copy the bytes of a stored tensor to byte `target_start` of the tensor `target`."""
    return copy_range_units(folder, name, 0, folder.info(name).num_bytes, target, target_start, finite=finite)


def copy_range_units(
    folder: SafetensorsFolder,
    name: str,
    begin: int,
    end: int,
    target: str,
    target_start: int = 0,
    *,
    finite: bool = True,
) -> Iterator[Unit]:
    """Copy bytes [begin, end) of a stored tensor to byte `target_start` of the tensor `target`.

    finite: NaN and infinity are a ValueError naming file and tensor.
    """
    info = folder.info(name)

    def unit(start: int, count: int) -> Unit:
        def run(writer: ShardWriter) -> None:
            data = folder.read_bytes(info, start, count)
            if finite:
                require_finite(data.view(TORCH_DTYPES[info.dtype]), folder.path / info.file, name)
            writer.write_bytes(target, target_start + start - begin, data)

        return Unit(count, run, target)

    for start in range(begin, end, PIECE_BYTES):
        yield unit(start, min(PIECE_BYTES, end - start))


def side_files(source: Path) -> Iterator[Path]:
    """Tokenizer, code and whatever else lies beside the weights, but for weights and hidden files: relative paths."""
    own = {INDEX, NATIVE, "config.json", *DISTRIBUTED}
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if any(part.startswith(".") for part in relative.parts) or not path.is_file():
            continue
        if path.suffix not in WEIGHTS and str(relative) not in own:
            yield relative


def copy_side_files(source: Path, work: Path) -> None:
    """`side_files` travel along."""
    for relative in side_files(source):
        (work / relative).parent.mkdir(parents=True, exist_ok=True)
        copy_file(source / relative, work / relative)


def side_bytes(source: Path) -> int:
    """What `copy_side_files` writes."""
    return sum((source / relative).stat().st_size for relative in side_files(source))


def write_config(work: Path, config: DSV41Config, original: Path | None) -> None:
    """`config.json`: the original, byte for byte, where it says the same."""
    path = original / "config.json" if original else None
    if path and path.is_file() and DSV41Config.load(path) == config:
        write_file(work / "config.json", path.read_bytes())
    else:
        write_file(work / "config.json", json.dumps(config.to_hf(), indent=2, ensure_ascii=False) + "\n")


def write_index(work: Path, shards: list[Shard], text: str | None = None) -> None:
    """The index, where there is more than the one file that needs none. `text`: an original to repeat verbatim."""
    if text is not None or [shard.file for shard in shards] != ["model.safetensors"]:
        write_file(work / INDEX, text if text is not None else index_text(shards))
