"""Experts as grouped products of E4M3 operands: provider "grouped_fp8" of routing.experts, for Hopper.

Forward and input gradients multiply FP8 with a scale per row of either operand; weight gradients multiply bf16. What is
kept for backward, gradients and weights stay bf16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dsv41.ops.hopper_checks import check_hopper
from megatron_dsv41.ops.quant.triton_scaled import scaled_rows, scaled_transposes
from megatron_dsv41.ops.routing import grouped

MULTIPLE = 16  # bytes that the tensor cores' operands are aligned to


def experts(
    x_PD: Tensor,
    counts_E: Tensor,
    share_P: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float,
    swiglu: Callable[..., Tensor],
) -> Tensor:
    """Semantics and shapes of `routing.ref.experts` with every product's operands rounded to E4M3, relative error about
    4% per product; no value of `counts_E` is read on the host. bf16; ValueError elsewhere than on compute capability
    9.0, and for sizes that are no multiples of 16.
    """
    if x_PD.dtype != torch.bfloat16:
        raise ValueError(f"routing.experts: provider 'grouped_fp8' takes bfloat16, got {x_PD.dtype}; choose 'grouped'")
    if x_PD.is_cuda:  # torch's row-scaled grouped product is built for Hopper alone
        check_hopper("routing.experts", "grouped_fp8", x_PD.device, "grouped")
    if w2.shape[1] % MULTIPLE or w2.shape[2] % MULTIPLE:
        raise ValueError(
            f"routing.experts: provider 'grouped_fp8' takes weights of multiples of {MULTIPLE}, got {list(w2.shape)}; "
            "choose 'grouped'"
        )
    if not x_PD.shape[0]:
        return grouped.experts(x_PD, counts_E, share_P, w13, w2, limit, swiglu)
    ends_E = counts_E.to(x_PD.device).cumsum(0).to(torch.int32)
    hidden = _Product.apply(x_PD, w13.flatten(1, 2), ends_E)
    return _Product.apply(swiglu(hidden, None, limit, share_P), w2, ends_E)


class _Product(torch.autograd.Function):
    """x [P, K] times the transpose of its group's weight [E, N, K]: [P, N]."""

    @staticmethod
    def forward(ctx, x_PK, weight_ENK, ends_E):
        x_PK = x_PK.contiguous()
        weight, scale = scaled_rows(weight_ENK.flatten(0, 1))
        scale_EN = scale.view(weight_ENK.shape[:2])
        ctx.save_for_backward(x_PK, weight_ENK, scale_EN, ends_E)
        return _multiply(*scaled_rows(x_PK), weight.view_as(weight_ENK), scale_EN, ends_E)

    @staticmethod
    def backward(ctx, grad_PN):  # type: ignore[override]
        x_PK, weight_ENK, scale_EN, ends_E = ctx.saved_tensors
        grad_PN, grad_x, grad_weight = grad_PN.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            rows = torch.arange(grad_PN.shape[0], dtype=ends_E.dtype, device=ends_E.device)
            grad, scale_P = scaled_rows(grad_PN, scale_EN, torch.searchsorted(ends_E, rows, right=True))
            weight_EKN = scaled_transposes(weight_ENK, scale_EN)
            grad_x = _multiply(grad, scale_P, weight_EKN, scale_EN.new_ones(weight_EKN.shape[:2]), ends_E)
        if ctx.needs_input_grad[1]:
            grad_weight = F.grouped_mm(grad_PN.transpose(0, 1), x_PK, offs=ends_E)
        return grad_x, grad_weight, None


def _multiply(a_PK: Tensor, scale_P: Tensor, b_ENK: Tensor, scale_EN: Tensor, ends_E: Tensor) -> Tensor:
    """Rows times their group's matrix, both E4M3 along a contiguous K, summed in fp32: bf16 [P, N]."""
    return torch._scaled_grouped_mm(  # pyright: ignore[reportPrivateImportUsage]
        a_PK, b_ENK.transpose(1, 2), scale_P, scale_EN, offs=ends_E, out_dtype=torch.bfloat16, use_fast_accum=True
    )
