"""The Engram gate in Triton: provider "triton" of engram.gate. For SM80 and later."""

# Kernel launches take options (num_warps, maxnreg) that pyright does not see in the kernel's signature.
# pyright: reportCallIssue=none

from __future__ import annotations

import dataclasses

import torch
import triton
from torch import Tensor

from megatron_dsv41.ops.engram import triton_gate_kernels as kernels
from megatron_dsv41.ops.engram.ref import GATE_FLOOR
from megatron_dsv41.ops.triton_checks import check_tensors


@dataclasses.dataclass(frozen=True)
class Launch:
    """Channels of a block (at most), warps, and programs that share the tokens (at most)."""

    block: int
    warps: int
    programs: int


# Chosen by tools/bench_fused.py on one H200.
FORWARD = Launch(block=1024, warps=4, programs=528)
ROWS = Launch(block=1024, warps=4, programs=132 * 5)
STREAMS = Launch(block=1024, warps=2, programs=132 * 4)
BLOCK_T = 2  # tokens at a time


class _Gate(torch.autograd.Function):
    """Operands flat over tokens and contiguous. Saves them and three fp32 numbers per token and stream."""

    @staticmethod
    def forward(ctx, streams, key, value, q_weight, k_weight, open_gate, rms_eps):
        out = torch.empty_like(streams)
        tokens, n, d = streams.shape
        stats = torch.empty(3, tokens, n, dtype=torch.float32, device=streams.device)
        programs, share, blocks = _share(FORWARD, tokens, d)
        kernels.gate_forward[(n, programs)](
            streams, key, value, q_weight, k_weight, open_gate, out, stats, tokens, share,
            N=n, D=d, **blocks, RMS_EPS=rms_eps, FLOOR=GATE_FLOOR, SCALE=d**-0.5,
            num_warps=FORWARD.warps,
        )  # fmt: skip
        ctx.save_for_backward(streams, key, value, q_weight, k_weight, open_gate, stats)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        streams, key, value, q_weight, k_weight, open_gate, stats = ctx.saved_tensors
        tokens, n, d = streams.shape
        grad = grad.contiguous()
        of_x, of_key, of_value = torch.empty_like(streams), torch.empty_like(key), torch.empty_like(value)
        factors = torch.empty_like(stats)
        programs, share, blocks = _share(ROWS, tokens, d)
        kernels.gate_backward_rows[(programs,)](
            grad, value, open_gate, stats, of_value, factors, tokens, share,
            D=d, **blocks, FLOOR=GATE_FLOOR, SCALE=d**-0.5, num_warps=ROWS.warps,
        )  # fmt: skip
        slabs = 4 * d // min(STREAMS.block, d & -d)
        programs, share, blocks = _share(STREAMS, tokens, d, slabs)
        partial = torch.empty(programs, n * d, dtype=torch.float32, device=streams.device)
        kernels.gate_backward_streams[(slabs, programs)](
            grad, streams, key, q_weight, k_weight, factors, of_x, of_key, partial, tokens, share,
            D=d, BLOCK=blocks["BLOCK"], BLOCK_T=BLOCK_T, num_warps=STREAMS.warps,
        )  # fmt: skip
        of_q, of_k = torch.empty_like(q_weight), torch.empty_like(k_weight)
        kernels.sum_gain_gradients[(triton.cdiv(n * d, 128),)](
            partial, q_weight, k_weight, of_q, of_k, programs, SIZE=n * d, BLOCK=128, num_warps=4
        )
        return of_x, of_key, of_value, of_q, of_k, None, None


def _share(launch: Launch, tokens: int, d: int, slabs: int = 1) -> tuple[int, int, dict[str, int]]:
    """Programs, the tokens of each, and how the channels are cut: the largest power of two that divides d.

    slabs: parts of a token that have programs of their own.
    """
    block = min(launch.block, d & -d)
    share = triton.cdiv(tokens, max(1, launch.programs // slabs))
    return triton.cdiv(tokens, share), share, {"BLOCK": block, "BLOCKS": d // block}


def gate(
    streams: Tensor,
    key: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    open_gate: Tensor,
    rms_eps: float,
) -> Tensor:
    """Semantics, shapes and dtypes of `engram.ref.gate`, for four streams."""
    check_tensors("engram.gate", streams, key, value, q_weight, k_weight)
    n, d = streams.shape[-2:]
    if n != 4 or d // min(1024, d & -d) > 8 or streams.numel() == 0:
        raise ValueError(
            "engram.gate: provider 'triton' takes at least one token of 4 streams, their width at most 8 blocks of a "
            f"power of two up to 1024; got {list(streams.shape)}; choose 'ref'"
        )
    flat = (x.reshape(-1, *x.shape[streams.dim() - 2 :]).contiguous() for x in (streams, key, value))
    out = _Gate.apply(*flat, q_weight.contiguous(), k_weight.contiguous(), open_gate.reshape(-1).contiguous(), rms_eps)
    return out.reshape(streams.shape)
