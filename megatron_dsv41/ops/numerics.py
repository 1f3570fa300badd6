"""Dtype rules shared by the reference ops."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """`x` in the arithmetic dtype of the definitions: float32, or float64 where the input already is (gradcheck)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
