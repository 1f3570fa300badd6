"""Linears that add their weight's gradient to Megatron's buffer themselves: gradient accumulation fusion.

Otherwise autograd makes a gradient in the weight's dtype, which Megatron's hook then adds. Here the product goes
straight to the buffer: in bf16 runs, unrounded to the fp32 one. Linears of Transformer Engine are not among them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dsv41.modules.primitives import Linear


class FusedLinear(Linear):
    """`Linear` whose weight is wrapped by Megatron's DistributedDataParallel (it has a `main_grad`) when it trains."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d_in] -> [..., d_out]."""
        return _FusedProduct.apply(x, self.weight)


class _FusedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # itself: recomputation would give back another tensor, without its buffer
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x,), weight, (grad,) = ctx.saved_tensors, ctx.weight, grads
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None
        accumulate(weight.main_grad, grad.flatten(0, -2), x.flatten(0, -2))
        weight.grad_added_to_main_grad = True  # Megatron's hook then leaves the buffer alone
        # The hook asks for some gradient, whose values nobody reads.
        return grad_x, torch.empty_like(weight)


def accumulate(buffer_OI: Tensor, grad_TO: Tensor, x_TI: Tensor) -> None:
    """buffer += grad^T x, summed in the buffer's dtype."""
    if buffer_OI.dtype == x_TI.dtype:
        buffer_OI.addmm_(grad_TO.T, x_TI)
    elif x_TI.is_cuda:
        torch.addmm(buffer_OI, grad_TO.T, x_TI, out_dtype=buffer_OI.dtype, out=buffer_OI)
    else:
        buffer_OI.addmm_(grad_TO.T.to(buffer_OI.dtype), x_TI.to(buffer_OI.dtype))
