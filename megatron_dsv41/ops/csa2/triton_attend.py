"""Joint sparse attention in Triton: provider "triton" of csa2.sparse_attend. For SM80 and later, tuned on SM90.

Forward: one program per token, online softmax. Backward: a query kernel (grad_q, and P and dS in bfloat16), then the
window's keys as a band without atomics, then the selected entries' keys by fp32 atomics or, deterministic, by
partial rows that each entry sums in order.
"""

# Kernel launches take options (num_warps, num_stages) that pyright does not see in the kernel's signature.
# pyright: reportCallIssue=none

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from megatron_dsv41.ops.csa2 import triton_attend_kernels as kernels
from megatron_dsv41.ops.csa2.attend import Problem, Provider

LOG2E = 1.4426950408889634
COMPILED_TOPK = 1024  # up to here, the number of slots does not compile the kernels anew
TOKENS_AT_ONCE = 4096  # query tokens whose P and dS exist at once: 0.67 GB at 640 slots and 64 heads
PARTIALS_AT_ONCE = 1 << 20  # partial rows that exist at once in deterministic mode: 1.1 GB at 512 channels


def block_heads(problem: Problem) -> int:
    """Rows of a tile: the heads, padded to what the tensor cores take."""
    return max(16, triton.next_power_of_2(problem.num_heads))


def constants(problem: Problem) -> dict[str, Any]:
    """Compile-time arguments that most kernels share."""
    max_topk = max(triton.next_power_of_2(problem.num_topk), COMPILED_TOPK)
    return {"WINDOW": problem.window, "MAX_TOPK": max_topk, "D": problem.dim, "BLOCK_H": block_heads(problem)}


def forward(
    problem: Problem, q: Tensor, window_kv: Tensor, keys: Tensor, topk: Tensor, sink: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and the log of the denominator, fp32 [T, H]."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    if problem.num_tokens:
        kernels.attend_forward[(problem.num_tokens,)](
            q, window_kv, keys, topk, sink, start, out, lse, problem.num_heads, problem.num_topk,
            problem.window_offset, problem.scale * LOG2E, **constants(problem), BLOCK_S=64, num_warps=8, num_stages=2,
        )  # fmt: skip
    return out, lse


def teacher_probabilities(problem: Problem, q: Tensor, keys: Tensor, topk: Tensor, lse: Tensor) -> Tensor:
    """Head-summed probabilities of the selected slots, fp32 [T, K]."""
    teacher = torch.zeros(topk.shape, dtype=torch.float32, device=q.device)
    shared = {name: value for name, value in constants(problem).items() if name != "WINDOW"}
    if teacher.numel():
        kernels.attend_teacher[(problem.num_tokens,)](
            q, keys, topk, lse, teacher, problem.num_heads, problem.num_topk, problem.scale * LOG2E, **shared,
            BLOCK_S=64, num_warps=4, num_stages=2,
        )  # fmt: skip
    return teacher


def output_dots(out: Tensor, grad_out: Tensor) -> Tensor:
    """delta = sum(out * grad_out) over the channels, fp32 [T, H], for a backward kernel that keeps it to itself."""
    delta = out.new_empty(out.shape[:2], dtype=torch.float32)
    if delta.numel():
        rows = 16
        kernels.output_dots[(triton.cdiv(delta.numel(), rows),)](
            out, grad_out, delta, delta.numel(), D=out.shape[2], ROWS=rows, num_warps=4
        )
    return delta


def backward(
    problem: Problem, q: Tensor, window_kv: Tensor, keys: Tensor, topk: Tensor, start: Tensor, out: Tensor,
    lse: Tensor, grad_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """grad_q, the latents' gradients in fp32, and delta."""
    grad_q, delta = torch.empty_like(q), torch.empty_like(lse)
    grad_window = torch.zeros_like(window_kv, dtype=torch.float32)
    grad_keys = torch.zeros_like(keys, dtype=torch.float32)
    saved = (q, window_kv, keys, topk, start, out, lse, grad_out)
    for begin in range(0, problem.num_tokens, TOKENS_AT_ONCE):
        tokens = range(begin, min(begin + TOKENS_AT_ONCE, problem.num_tokens))
        p, ds = backward_query(problem, saved, grad_q, delta, tokens)
        backward_window(problem, q, grad_out, p, ds, grad_window, tokens)
        if problem.num_topk and len(keys):
            by = backward_entries_in_order if problem.deterministic else backward_entries
            by(problem, q, grad_out, topk, p, ds, grad_keys, tokens)
    return grad_q, grad_window, grad_keys, delta


def backward_query(problem: Problem, saved, grad_q: Tensor, delta: Tensor, tokens: range) -> tuple[Tensor, Tensor]:
    """Fills grad_q and delta of `tokens`; returns P and dS, bf16 [tokens, window + K, block_heads]."""
    p = grad_q.new_empty(len(tokens), problem.window + problem.num_topk, block_heads(problem))
    ds = torch.empty_like(p)
    kernels.attend_backward_query[(len(tokens),)](
        *saved, grad_q, delta, p, ds, tokens.start, problem.num_heads, problem.num_topk, problem.window_offset,
        problem.scale, **constants(problem), BLOCK_S=64, CHUNK_D=min(128, problem.dim), num_warps=8, num_stages=1,
    )  # fmt: skip
    return p, ds


def backward_window(
    problem: Problem, q: Tensor, grad_out: Tensor, p: Tensor, ds: Tensor, grad_window: Tensor, tokens: range
) -> None:
    """Adds the window keys' gradient of `tokens` to fp32 [J, D]."""
    offset = problem.window_offset
    first_row = max(tokens.start + offset - (problem.window - 1), 0)
    block, chunk = 128, min(128, problem.dim)
    grid = (triton.cdiv(tokens.stop + offset - first_row, block), problem.dim // chunk)
    kernels.attend_backward_window[grid](
        q, grad_out, p, ds, grad_window, tokens.start, tokens.stop, first_row, grad_window.shape[0],
        problem.num_heads, problem.num_topk, offset, WINDOW=problem.window, D=problem.dim,
        BLOCK_H=block_heads(problem), BLOCK_J=block, CHUNK_D=chunk, num_warps=8, num_stages=3,
    )  # fmt: skip


def launch_entries(problem: Problem, q, grad_out, topk, p, ds, target: Tensor, tokens: range, atomic: bool) -> None:
    """Launch the entries' kernel over `tokens`, into the fp32 sum or into partial rows."""
    chunk = min(128, problem.dim)
    kernels.attend_backward_entries[(len(tokens), problem.dim // chunk)](
        q, grad_out, topk, p, ds, target, tokens.start, problem.num_heads, problem.num_topk, **constants(problem),
        BLOCK_S=64, CHUNK_D=chunk, ATOMIC=atomic, num_warps=4, num_stages=3,
    )  # fmt: skip


def backward_entries(problem: Problem, q, grad_out, topk, p, ds, grad_keys: Tensor, tokens: range) -> None:
    """Adds the selected entries' gradient to fp32 [C, D] by vector atomics: the order of additions varies."""
    launch_entries(problem, q, grad_out, topk, p, ds, grad_keys, tokens, atomic=True)


def backward_entries_in_order(problem: Problem, q, grad_out, topk, p, ds, grad_keys: Tensor, tokens: range) -> None:
    """The same without atomics: partial rows in bf16, summed in fp32 per entry in token order; bitwise repeatable."""
    at_once = max(1, PARTIALS_AT_ONCE // problem.num_topk)
    entries = torch.arange(grad_keys.shape[0] + 1, dtype=torch.int32, device=q.device)
    for begin in range(tokens.start, tokens.stop, at_once):
        some = range(begin, min(begin + at_once, tokens.stop))
        local = slice(some.start - tokens.start, some.stop - tokens.start)
        partial = q.new_empty(len(some) * problem.num_topk, problem.dim)
        launch_entries(problem, q, grad_out, topk, p[local], ds[local], partial, some, atomic=False)
        chosen, order = topk[some.start : some.stop].reshape(-1).sort(stable=True)
        offsets = torch.searchsorted(chosen, entries)
        kernels.sum_partials[(grad_keys.shape[0],)](
            partial, order, offsets, grad_keys, D=problem.dim, ROWS=8, num_warps=4
        )


sparse_attend = Provider("triton", forward, backward, teacher_probabilities)
