"""Linears that are more than one call of torch: fp32 results of low-precision operands, and block diagonals."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dsv41.ops.numerics import wide


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., d_in], weight [d_out, d_in] -> fp32 [..., d_out] (router, head, pooled compressor)."""
    return F.linear(wide(x), wide(weight))


def block_diagonal(x: Tensor, weight_GOI: Tensor) -> Tensor:
    """x [..., G * I], weight [G, O, I] -> [..., G * O]: group g of the input meets block g alone.

    Batched products read and write the groups where they lie: no copy of x, of the result or of a gradient.
    """
    return _BlockDiagonal.apply(x.flatten(0, -2), weight_GOI).unflatten(0, x.shape[:-1])


def _groups(x_TI: Tensor, count: int) -> Tensor:
    """[T, G * I] -> its view [G, T, I]."""
    return x_TI.unflatten(1, (count, -1)).transpose(0, 1)


class _BlockDiagonal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_GOI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, weight_GOI)
        groups, d_out = weight_GOI.shape[:2]
        out_TO = x_TI.new_empty(x_TI.shape[0], groups * d_out)
        torch.bmm(_groups(x_TI, groups), weight_GOI.transpose(1, 2), out=_groups(out_TO, groups))
        return out_TO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TI, weight_GOI = ctx.saved_tensors
        groups = weight_GOI.shape[0]
        grad_GTO = _groups(grads[0], groups)
        grad_x_TI = grad_weight_GOI = None
        if ctx.needs_input_grad[0]:
            grad_x_TI = torch.empty_like(x_TI)
            torch.bmm(grad_GTO, weight_GOI, out=_groups(grad_x_TI, groups))
        if ctx.needs_input_grad[1]:
            grad_weight_GOI = torch.bmm(grad_GTO.transpose(1, 2), _groups(x_TI, groups))
        return grad_x_TI, grad_weight_GOI
