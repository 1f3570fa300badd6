"""Wide linear on tensor cores: provider "split" of linear.wide.

bfloat16 operands multiply exactly, with sums in fp32; an fp32 gradient enters as two bfloat16 parts (16 bits).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_dsv41.ops.numerics import parts, wide_product, write_total


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Semantics, shapes and dtypes of `linear.ref.wide_linear`; x and weight of one dtype."""
    if x.dtype != weight.dtype:
        raise ValueError(f"linear.wide: x is {x.dtype}, weight {weight.dtype}; provider 'split' takes one dtype")
    return _WideLinear.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        return wide_product(x_TI, weight_OI.T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TI, weight_OI = ctx.saved_tensors
        grad_parts = parts(grads[0], x_TI.dtype)
        grad_x_TI = grad_weight_OI = None
        if ctx.needs_input_grad[0]:
            grad_x_TI = write_total([wide_product(part, weight_OI) for part in grad_parts], torch.empty_like(x_TI))
        if ctx.needs_input_grad[1]:
            products = [wide_product(part.T, x_TI) for part in grad_parts]
            grad_weight_OI = write_total(products, torch.empty_like(weight_OI))
        return grad_x_TI, grad_weight_OI
