"""NaN and infinity in stored tensors, found on the stored bits: one pass at memory speed where there are none."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

BLOCK = 2**19  # elements looked at at a time, so that they stay in a processor's cache
_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_EXPONENTS = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}


def num_non_finite(stored: Tensor, *, is_scale: bool = False) -> int:
    """How many elements are NaN or infinite. Packed FP4 and integers have none; uint8 has where it holds scales."""
    flat = stored.reshape(-1)
    if flat.dtype == torch.float8_e8m0fnu or (flat.dtype == torch.uint8 and is_scale):
        return _count(flat.view(torch.uint8), 0xFF, 0xFF)
    if flat.dtype == torch.float8_e4m3fn:
        return _count(flat.view(torch.uint8), 0x7F, 0x7F)
    if flat.dtype in _INTEGERS:
        mask = _EXPONENTS[flat.dtype]
        return _count(flat.view(_INTEGERS[flat.dtype]), mask, mask)
    return int((~flat.isfinite()).sum()) if flat.dtype.is_floating_point else 0


def require_finite(stored: Tensor, file: Path, name: str) -> None:
    """ValueError naming file and tensor where a stored tensor, or a part of it, is not finite."""
    number = num_non_finite(stored, is_scale=name.endswith(".scale"))
    if number:
        what = "block scales are NaN" if name.endswith(".scale") else "values are NaN or infinite"
        raise ValueError(
            f"{file}: {name}: {number} of {stored.numel()} {what}: the file is damaged or the model diverged "
            "(--allow-non-finite converts it all the same)"
        )


def _count(bits: Tensor, mask: int, found: int) -> int:
    """Elements whose masked bits equal `found`, the largest value that the mask lets through."""
    blocks = [block for block in torch.split(bits, BLOCK) if block.numel() and int((block & mask).max()) == found]
    return sum(int((block & mask == found).sum()) for block in blocks)
