"""Head and cross-entropy over blocks of the vocabulary: provider "blocked" of head.losses.

At most [tokens, BLOCK] logits exist at a time; the backward forms them again. bfloat16 operands are exact in fp32, so
logits need one bfloat16 product with an fp32 result; a gradient of logits is split into two bfloat16 parts (16 bits).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_dsv41.ops.head.ref import WHOLE, VocabularyPart
from megatron_dsv41.ops.numerics import parts, wide, wide_product, write_total

BLOCK = 8192


def losses(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, part: VocabularyPart = WHOLE) -> Tensor:
    """Semantics, shapes and dtypes of `head.ref.losses`."""
    return _Losses.apply(x_TD, weight_VD, labels_T, part)


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, part: VocabularyPart) -> Tensor:
        local_T = labels_T - part.first
        top_T = x_TD.new_full((x_TD.shape[0],), -torch.inf, dtype=wide(x_TD[:0]).dtype)
        sum_T, own_T = torch.zeros_like(top_T), torch.zeros_like(top_T)
        for first, rows_VD in _blocks(weight_VD):
            logits_TV = wide_product(x_TD, rows_VD.T)
            new_T = torch.maximum(top_T, logits_TV.amax(-1))
            here_T = _inside(local_T, first, rows_VD)
            label_T = (local_T - first).where(here_T, 0)
            own_T += torch.where(here_T, logits_TV.gather(1, label_T[:, None])[:, 0], 0.0)
            sum_T = sum_T * (top_T - new_T).exp() + logits_TV.sub_(new_T[:, None]).exp_().sum(-1)
            top_T = new_T
        highest_T = part.maximum(top_T)
        log_sum_T = highest_T + part.total(sum_T * (top_T - highest_T).exp()).log()
        ctx.save_for_backward(x_TD, weight_VD, local_T, log_sum_T)
        return log_sum_T - part.total(own_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_TD, weight_VD, local_T, log_sum_T = ctx.saved_tensors
        (grad_T,) = grads
        grad_x_TD = torch.zeros_like(x_TD, dtype=log_sum_T.dtype)
        grad_weight_VD = torch.empty_like(weight_VD)
        for first, rows_VD in _blocks(weight_VD):
            slope_TV = wide_product(x_TD, rows_VD.T).sub_(log_sum_T[:, None]).exp_()
            here_T = _inside(local_T, first, rows_VD)
            label_T = (local_T - first).where(here_T, 0)
            slope_TV.scatter_add_(1, label_T[:, None], -here_T.to(slope_TV.dtype)[:, None])
            slope_TV.mul_(grad_T[:, None])
            of_rows = []
            for slope in parts(slope_TV, x_TD.dtype):
                grad_x_TD += wide_product(slope, rows_VD)
                of_rows.append(wide_product(slope.T, x_TD))
            write_total(of_rows, grad_weight_VD[first : first + rows_VD.shape[0]])
        return grad_x_TD.to(x_TD.dtype), grad_weight_VD, None, None


def _blocks(weight_VD: Tensor) -> list[tuple[int, Tensor]]:
    return [(first, weight_VD[first : first + BLOCK]) for first in range(0, weight_VD.shape[0], BLOCK)]


def _inside(local_T: Tensor, first: int, rows_VD: Tensor) -> Tensor:
    return (local_T >= first) & (local_T < first + rows_VD.shape[0])
