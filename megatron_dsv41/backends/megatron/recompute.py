"""Activations that are made again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def run_kept[T](kept: bool, function: Callable[..., T], *values: Any) -> T:
    """`function(*values)`, keeping for backward what it computes, or only `values`."""
    if kept or not torch.is_grad_enabled():
        return function(*values)
    # No dropout anywhere: there is no generator state to restore.
    return checkpoint(function, *values, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]
