"""Start from released or imported weights instead of random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_dsv41.backends.megatron.state_dict import local_part
from megatron_dsv41.checkpoint.sources import NativeSource, ReleasedSource, StateSource, is_native
from megatron_dsv41.config import DSV41Config


def open_weights(path: str | Path, config: DSV41Config) -> StateSource:
    """A folder in the released layout, or what `dsv41 convert import` wrote. ValueError listing what does not fit."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"train.init_from {path} is not a folder with a checkpoint")
    return NativeSource(path) if is_native(path) else ReleasedSource(path, config)


@torch.no_grad()
def load_weights(stages: list[Any], source: StateSource) -> list[Any]:
    """Copy this rank's part of every tensor into the stages (DSV41Model) and return them; one tensor at a time."""
    for stage in stages:
        for name, target in stage.state_dict(keep_vars=True).items():
            target.copy_(local_part(source.read(name), target, stage.layout))
    return stages
