"""Start from released or imported weights instead of random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_dsv41.backends.megatron.shadows import logical_state
from megatron_dsv41.backends.megatron.state_dict import local_cut
from megatron_dsv41.checkpoint.convert import open_source
from megatron_dsv41.checkpoint.pieces import row_pieces
from megatron_dsv41.checkpoint.sources import StateSource
from megatron_dsv41.config import DSV41Config


def open_weights(path: str | Path, config: DSV41Config) -> StateSource:
    """A folder in the released layout, or what `dsv41 convert import` wrote. ValueError listing what does not fit."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"train.init_from {path} is not a folder with a checkpoint")
    if (path / "run.yaml").is_file():
        raise ValueError(
            f"train.init_from {path} is a training run: write its weights with `dsv41 convert export {path} DST`, and "
            "start from DST"
        )
    return open_source(path, config)


@torch.no_grad()
def load_weights(stages: list[Any], source: StateSource) -> list[Any]:
    """Copy this rank's part of every tensor into the stages (DSV41Model) and return them; no more is read."""
    for stage in stages:
        for name, target in logical_state(stage).items():
            _fill(target, source, name, local_cut(source.shape(name), target, stage.layout))
        for table in stage.engram_tables:
            table.fill(lambda rows, name=table.name: source.read(name, rows))
    return stages


def _fill(target: torch.Tensor, source: StateSource, name: str, cut: tuple[slice, ...]) -> None:
    """Copy a part of a tensor, some rows at a time: an Engram table may be as large as the memory of a host."""
    first = cut[0].start
    for rows in row_pieces(target.shape, stacked=target.dim() > 2):
        part = source.read(name, slice(first + rows.start, first + rows.stop), *cut[1:])
        target[rows].copy_(part)
