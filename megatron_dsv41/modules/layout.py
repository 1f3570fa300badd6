"""Modules carry `[s, b, ...]`; ops carry flat batch-major tokens `[b*s, ...]`. The two conversions."""

from __future__ import annotations

from torch import Tensor


def to_flat(x_SB: Tensor) -> Tensor:
    """[s, b, ...] -> [b*s, ...], a view when b is 1."""
    return x_SB.transpose(0, 1).flatten(0, 1)


def from_flat(x_T: Tensor, batch_size: int) -> Tensor:
    """[b*s, ...] -> [s, b, ...]."""
    return x_T.unflatten(0, (batch_size, -1)).transpose(0, 1)
