"""Auxiliary losses join the backward pass of whatever stage they arise on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class AuxLoss(torch.autograd.Function):
    """Identity on `x`; its backward also starts the gradient of `loss`, times the scale of the main loss.

    Megatron sets the scale (1 / micro-batches, times its grad scale) through the TransformerConfig hook
    `experimental_attention_variant_loss_scale_func` right after each forward of a stage; it is one number per step.
    """

    scale = torch.ones(1)

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        """x of any shape; loss []."""
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """See class."""
        (loss,) = ctx.saved_tensors
        return grads[0], AuxLoss.scale.to(loss.device, loss.dtype).reshape(()).expand_as(loss)

    @staticmethod
    def set_scale(scale: Tensor) -> None:
        """The hook."""
        AuxLoss.scale = scale
