"""The indexer's loss in Triton: provider "triton" of csa2.index_divergence, without [T, K, D] buffers."""

# Kernel launches take options (num_warps, num_stages) that pyright does not see in the kernel's signature.
# pyright: reportCallIssue=none

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from megatron_dsv41.ops.csa2 import triton_divergence_kernels as kernels
from megatron_dsv41.ops.csa2.checks import on_gpu

DTYPES = (torch.bfloat16, torch.float32)


class Divergence(torch.autograd.Function):
    """Saves the inputs and the softmax denominator [T]; the backward kernel computes the scores again."""

    @staticmethod
    def forward(ctx, q, weights, keys, slots, teacher):
        """KL per query, fp32 [T]."""
        divergence, lse = (torch.zeros(q.shape[0], dtype=torch.float32, device=q.device) for _ in range(2))
        if q.shape[0] and slots.shape[1]:
            kernels.divergence_forward[(q.shape[0],)](
                q, weights, keys, slots, teacher, divergence, lse, q.shape[1], slots.shape[1], **constants(q, slots)
            )
        ctx.save_for_backward(q, weights, keys, slots, teacher, lse)
        return divergence

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        """Gradients of q, weights and keys; keys are accumulated in fp32."""
        q, weights, keys, slots, teacher, lse = ctx.saved_tensors
        grad_q, grad_weights = torch.zeros_like(q), torch.zeros_like(weights)
        grad_keys = torch.zeros_like(keys, dtype=torch.float32)
        if q.shape[0] and slots.shape[1]:
            kernels.divergence_backward[(q.shape[0],)](
                q, weights, keys, slots, teacher, lse, grad.contiguous(), grad_q, grad_weights, grad_keys,
                q.shape[1], slots.shape[1], **constants(q, slots),
            )  # fmt: skip
        return grad_q, grad_weights, grad_keys.to(keys.dtype), None, None


def constants(q: Tensor, slots: Tensor) -> dict[str, Any]:
    """Compile-time arguments and launch options of both kernels. Tiles of fp32 operands are smaller."""
    return {
        "SCAN": min(512, triton.next_power_of_2(slots.shape[1])),
        "D": q.shape[2],
        "BLOCK_H": max(16, triton.next_power_of_2(q.shape[1])),
        "BLOCK_S": 64 if q.dtype == torch.bfloat16 else 32,
        "num_warps": 4,
        "num_stages": 2,
    }


def index_divergence(
    q_TID: Tensor, weights_TI: Tensor, keys_CD: Tensor, slots_TK: Tensor, teacher_TK: Tensor
) -> Tensor:
    """`ref.index_divergence` on a CUDA device, fp32 [T]; q and keys both in bf16 or both in fp32 (SPEC 9).

    The keys' gradient is added by fp32 atomics, so its last bits vary. ValueError: dtypes, devices or sizes that the
    kernels do not take, and deterministic algorithms asked of torch.
    """
    want = "csa2.index_divergence: provider 'triton' takes"
    if q_TID.dtype not in DTYPES or keys_CD.dtype != q_TID.dtype:
        raise ValueError(f"{want} q and keys both in bfloat16 or both in float32, got {q_TID.dtype}, {keys_CD.dtype}")
    if not on_gpu(q_TID):
        raise ValueError(f"{want} CUDA tensors, got q on {q_TID.device}; provider 'ref' runs anywhere")
    if q_TID.shape[2] not in (16, 32, 64, 128):
        raise ValueError(f"{want} 16, 32, 64 or 128 channels, got {q_TID.shape[2]}")
    if torch.are_deterministic_algorithms_enabled():
        raise ValueError(
            "csa2.index_divergence: provider 'triton' adds by atomics; choose 'ref' for deterministic runs"
        )
    return Divergence.apply(
        q_TID.contiguous(), weights_TI.contiguous(), keys_CD.contiguous(), slots_TK.to(torch.int32).contiguous(),
        teacher_TK.detach().float().contiguous(),
    )  # fmt: skip
