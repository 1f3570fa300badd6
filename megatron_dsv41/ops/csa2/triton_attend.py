"""Joint sparse attention in Triton: provider "triton" of csa2.sparse_attend. For SM80 and later, tuned on SM90.

Forward: one program per token, online softmax. Backward: a query kernel (grad_q, and P and dS in bfloat16), then the
window's keys as a band without atomics, then the selected entries' keys by fp32 atomics or, deterministic, by
partial rows that each entry sums in order.
"""

# Kernel launches take options (num_warps, num_stages) that pyright does not see in the kernel's signature.
# pyright: reportCallIssue=none

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
from torch import Tensor

from megatron_dsv41.ops.csa2 import triton_attend_kernels as kernels
from megatron_dsv41.ops.csa2.checks import check_attend

TOKENS_AT_ONCE = 4096  # query tokens whose P and dS exist at once: 0.67 GB at 640 slots and 64 heads
PARTIALS_AT_ONCE = 1 << 20  # partial rows that exist at once in deterministic mode: 1.1 GB at 512 channels


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes that the kernels are compiled for, and those they are called with."""

    num_tokens: int
    num_heads: int
    dim: int
    window: int
    num_topk: int

    @property
    def block_heads(self) -> int:
        """Rows of a tile: the heads, padded to what the tensor cores take."""
        return max(16, triton.next_power_of_2(self.num_heads))

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time arguments that most kernels share."""
        topk = triton.next_power_of_2(max(self.num_topk, 1))
        return {"WINDOW": self.window, "MAX_TOPK": topk, "D": self.dim, "BLOCK_H": self.block_heads}


class SparseAttention(torch.autograd.Function):
    """Autograd node of both modes. Saves q, latents, slots, output and the fp32 softmax denominator [T, H]."""

    @staticmethod
    def forward(ctx, q, window_kv, compressed_kv, topk, sink, start, offset, scale, window, deterministic):
        """Output [T, H, D] bf16 and the denominator's log, fp32 [T, H]."""
        topk = q.new_empty(q.shape[0], 0, dtype=torch.int32) if topk is None else topk
        keys = window_kv[:0] if compressed_kv is None else compressed_kv.to(q.dtype)
        shape = Shape(*q.shape, window, topk.shape[1])
        out, lse = attend(q, window_kv, keys, topk, sink, start, offset, scale, shape)
        ctx.save_for_backward(q, window_kv, keys, topk, sink, start, out, lse)
        ctx.plan = (offset, scale, shape, deterministic, None if compressed_kv is None else compressed_kv.dtype)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, _grad_lse):  # type: ignore[override]
        """Gradients of q, both latents (accumulated in fp32) and the sink."""
        q, window_kv, keys, topk, sink, start, out, lse = ctx.saved_tensors
        offset, scale, shape, deterministic, keys_dtype = ctx.plan
        grad_out = grad_out.contiguous()
        grad_q, delta = torch.empty_like(q), torch.empty_like(lse)
        grad_window = torch.zeros_like(window_kv, dtype=torch.float32)
        grad_keys = torch.zeros_like(keys, dtype=torch.float32)
        saved = (q, window_kv, keys, topk, start, out, lse, grad_out)
        for begin in range(0, shape.num_tokens, TOKENS_AT_ONCE):
            tokens = range(begin, min(begin + TOKENS_AT_ONCE, shape.num_tokens))
            p, ds = backward_query(saved, grad_q, delta, tokens, offset, scale, shape)
            backward_window(q, grad_out, p, ds, grad_window, tokens, offset, shape)
            if shape.num_topk and keys_dtype is not None:
                backward = backward_entries_in_order if deterministic else backward_entries
                backward(q, grad_out, topk, p, ds, grad_keys, tokens, shape)
        # The sink has no value: its logit's gradient is -p_sink * delta.
        grad_sink = -((sink - lse).exp() * delta).sum(0)
        grad_keys = None if keys_dtype is None else grad_keys.to(keys_dtype)
        return grad_q, grad_window.to(window_kv.dtype), grad_keys, None, grad_sink, *[None] * 5


def attend(
    q: Tensor, window_kv: Tensor, keys: Tensor, topk: Tensor, sink: Tensor, start: Tensor, offset: int, scale: float,
    shape: Shape,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the forward kernel: output [T, H, D] and lse fp32 [T, H]."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    if shape.num_tokens:
        kernels.attend_forward[(shape.num_tokens,)](
            q, window_kv, keys, topk, sink, start, out, lse, shape.num_heads, shape.num_topk, offset,
            scale * 1.4426950408889634, **shape.constants, BLOCK_S=64, num_warps=8, num_stages=2,
        )  # fmt: skip
    return out, lse


def teacher_probabilities(q: Tensor, keys: Tensor, topk: Tensor, lse: Tensor, scale: float, window: int) -> Tensor:
    """Launch the teacher kernel: head-summed probabilities of the selected slots, fp32 [T, K]."""
    shape = Shape(*q.shape, window, topk.shape[1])
    teacher = torch.zeros(topk.shape, dtype=torch.float32, device=q.device)
    constants = {name: value for name, value in shape.constants.items() if name != "WINDOW"}
    if teacher.numel():
        kernels.attend_teacher[(shape.num_tokens,)](
            q, keys, topk, lse, teacher, shape.num_heads, shape.num_topk, scale * 1.4426950408889634, **constants,
            BLOCK_S=64, num_warps=4, num_stages=2,
        )  # fmt: skip
    return teacher


def backward_query(saved, grad_q: Tensor, delta: Tensor, tokens: range, offset: int, scale: float, shape: Shape):
    """Launch the query kernel over `tokens`. Fills their grad_q and delta; returns P and dS."""
    slots = shape.window + shape.num_topk
    p = grad_q.new_empty(len(tokens), slots, shape.block_heads)
    ds = torch.empty_like(p)
    kernels.attend_backward_query[(len(tokens),)](
        *saved, grad_q, delta, p, ds, tokens.start, shape.num_heads, shape.num_topk, offset, scale,
        **shape.constants, BLOCK_S=64, CHUNK_D=min(128, shape.dim), num_warps=8, num_stages=1,
    )  # fmt: skip
    return p, ds


def backward_window(
    q: Tensor, grad_out: Tensor, p: Tensor, ds: Tensor, grad_window: Tensor, tokens: range, offset: int, shape: Shape
) -> None:
    """Launch the band kernel: adds the window gradient of `tokens` to fp32 [J, D]."""
    first_row = max(tokens.start + offset - (shape.window - 1), 0)
    block, chunk = 64, min(128, shape.dim)
    grid = (triton.cdiv(tokens.stop + offset - first_row, block), shape.dim // chunk)
    kernels.attend_backward_window[grid](
        q, grad_out, p, ds, grad_window, tokens.start, tokens.stop, first_row, grad_window.shape[0], shape.num_heads,
        shape.num_topk, offset, WINDOW=shape.window, D=shape.dim, BLOCK_H=shape.block_heads, BLOCK_J=block,
        CHUNK_D=chunk, num_warps=4, num_stages=3,
    )  # fmt: skip


def launch_entries(q, grad_out, topk, p, ds, target: Tensor, tokens: range, shape: Shape, atomic: bool) -> None:
    """Launch the entries' kernel over `tokens`, into the fp32 sum or into partial rows."""
    chunk = min(128, shape.dim)
    kernels.attend_backward_entries[(len(tokens), shape.dim // chunk)](
        q, grad_out, topk, p, ds, target, tokens.start, shape.num_heads, shape.num_topk, **shape.constants,
        BLOCK_S=64, CHUNK_D=chunk, ATOMIC=atomic, num_warps=4, num_stages=2,
    )  # fmt: skip


def backward_entries(q, grad_out, topk, p, ds, grad_keys: Tensor, tokens: range, shape: Shape) -> None:
    """Adds the selected entries' gradient to fp32 [C, D] by vector atomics: the order of additions varies."""
    launch_entries(q, grad_out, topk, p, ds, grad_keys, tokens, shape, atomic=True)


def backward_entries_in_order(q, grad_out, topk, p, ds, grad_keys: Tensor, tokens: range, shape: Shape) -> None:
    """The same without atomics: partial rows in bf16, summed in fp32 per entry in token order; bitwise repeatable."""
    at_once = max(1, PARTIALS_AT_ONCE // shape.num_topk)
    entries = torch.arange(grad_keys.shape[0] + 1, dtype=torch.int32, device=q.device)
    for begin in range(tokens.start, tokens.stop, at_once):
        some = range(begin, min(begin + at_once, tokens.stop))
        local = slice(some.start - tokens.start, some.stop - tokens.start)
        partial = q.new_empty(len(some) * shape.num_topk, shape.dim)
        launch_entries(q, grad_out, topk, p[local], ds[local], partial, some, shape, atomic=False)
        chosen, order = topk[some.start : some.stop].reshape(-1).sort(stable=True)
        offsets = torch.searchsorted(chosen, entries)
        kernels.sum_partials[(grad_keys.shape[0],)](
            partial, order, offsets, grad_keys, D=shape.dim, ROWS=8, num_warps=4
        )


def sparse_attend(
    q_THD: Tensor,
    window_kv_JD: Tensor,
    compressed_kv_CD: Tensor | None,
    topk_TK: Tensor | None,
    sink_H: Tensor,
    window_start_T: Tensor,
    window_offset: int,
    scale: float,
    *,
    window: int,
    teacher: bool = False,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`ref.sparse_attend` on a CUDA device: bf16 q and latents, fp32 accumulation, up to 64 heads (SPEC 8.7).

    `deterministic` (default: torch.are_deterministic_algorithms_enabled()) makes every gradient bitwise repeatable, at
    the price of partial rows in memory. compressed_kv may be fp32; its gradient is then fp32 too. ValueError: dtypes,
    devices or sizes that the kernels do not take.
    """
    check_attend("triton", q_THD, window_kv_JD, compressed_kv_CD, topk_TK, sink_H, window_start_T)
    deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    out, lse = SparseAttention.apply(
        q_THD.contiguous(), window_kv_JD.contiguous(), compressed_kv_CD, topk_TK, sink_H, window_start_T,
        window_offset, scale, window, deterministic,
    )  # fmt: skip
    if not teacher:
        return out
    if compressed_kv_CD is None or topk_TK is None:
        return out, q_THD.new_zeros(q_THD.shape[0], 0, dtype=torch.float32)
    with torch.no_grad():
        keys = compressed_kv_CD.to(q_THD.dtype)
        return out, teacher_probabilities(q_THD.contiguous(), keys, topk_TK, lse, scale, window)
