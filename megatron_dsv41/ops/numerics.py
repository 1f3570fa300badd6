"""Dtype rules and exact products shared by the ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def rounded_sum(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """(a + b).to(dtype) of tensors of one shape, added in the wider of their dtypes and rounded as it is written.

    The gradient reaches both unrounded: the sum in the wider dtype exists neither forward nor backward.
    """
    return _RoundedSum.apply(a, b, dtype)


class _RoundedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtypes = a.dtype, b.dtype
        return write_total([a, b], torch.empty_like(a, dtype=dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        of_a, of_b = (grads[0].to(dtype) for dtype in ctx.dtypes)
        return of_a, of_b, None
