"""Dtype rules and exact products shared by the ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """`x` in the arithmetic dtype of the definitions: float32, or float64 where the input already is (gradcheck)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a b with sums and result in fp32 at least. Products of bfloat16 are exact in fp32: they stay on tensor cores."""
    if a.is_cuda and a.dtype == b.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return wide(a) @ wide(b)


def parts(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Tensors of `dtype` that add up to x: two where it is bfloat16 (16 bits of x), x itself otherwise."""
    if dtype != torch.bfloat16:
        return [x]
    high = x.to(dtype)
    return [high, torch.sub(x, high, out=torch.empty_like(high))]  # rounded as it is written: no fp32 difference


def write_total(terms: Sequence[Tensor], out: Tensor) -> Tensor:
    """out = the one term or the sum of the two, rounded to out's dtype as it is written. No gradient."""
    return torch.add(*terms, out=out) if len(terms) == 2 else out.copy_(terms[0])
