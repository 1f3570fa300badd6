"""Linears that are more than one call of torch: fp32 results of low-precision operands, and block diagonals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dsv41.ops.numerics import wide


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., d_in], weight [d_out, d_in] -> fp32 [..., d_out] (router, head, pooled compressor)."""
    return F.linear(wide(x), wide(weight))


class Turn(NamedTuple):
    """A rotary embedding that a linear undoes on its input: cos, sin fp32 [T, pairs], and rope.rotate(_owned)."""

    cos: Tensor
    sin: Tensor
    rotate: Callable[..., Tensor]
    rotate_owned: Callable[..., Tensor]


def block_diagonal(x: Tensor, weight_GOI: Tensor, turn: Turn | None = None) -> Tensor:
    """x [..., G * I], weight [G, O, I] -> [..., G * O]: group g of the input meets block g alone.

    Batched products read and write the groups where they lie: no copy of x, of the result or of a gradient. With
    `turn`, x is [T, heads, D] with heads * D = G * I, and turned back (inverse) first, into a copy. The gradient of
    that copy is made here and seen by nobody else, so it is turned where it lies: no pass over all channels.
    """
    if turn is not None:
        cos, sin, *turning = turn
        return _BlockDiagonal.apply(x, weight_GOI, cos, sin, turning)
    return _BlockDiagonal.apply(x.flatten(0, -2), weight_GOI, None, None, None).unflatten(0, x.shape[:-1])


def _groups(x_TI: Tensor, count: int) -> Tensor:
    """[T, G * I] -> its view [G, T, I]."""
    return x_TI.unflatten(1, (count, -1)).transpose(0, 1)


class _BlockDiagonal(torch.autograd.Function):
    """x [T, G * I], or [T, heads, D] where it is to be turned back first."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_GOI: Tensor, cos: Tensor | None, sin: Tensor | None, turning: list[Any] | None
    ) -> Tensor:
        ctx.shape, ctx.turning = x.shape, turning
        x_TI = (x if turning is None else turning[0](x, cos, sin, inverse=True)).flatten(1)
        ctx.save_for_backward(x_TI, weight_GOI, cos, sin)
        groups, d_out = weight_GOI.shape[:2]
        out_TO = x_TI.new_empty(x_TI.shape[0], groups * d_out)
        torch.bmm(_groups(x_TI, groups), weight_GOI.transpose(1, 2), out=_groups(out_TO, groups))
        return out_TO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_GOI, cos, sin = ctx.saved_tensors
        groups = weight_GOI.shape[0]
        grad_GTO = _groups(grads[0], groups)
        grad_x = grad_weight_GOI = None
        if ctx.needs_input_grad[0]:
            grad_x_TI = torch.empty_like(x_TI)
            torch.bmm(grad_GTO, weight_GOI, out=_groups(grad_x_TI, groups))
            grad_x = grad_x_TI.view(ctx.shape)
            if ctx.turning is not None:
                grad_x = ctx.turning[1](grad_x, cos, sin)
        if ctx.needs_input_grad[1]:
            grad_weight_GOI = torch.bmm(grad_GTO.transpose(1, 2), _groups(x_TI, groups))
        return grad_x, grad_weight_GOI, None, None, None
