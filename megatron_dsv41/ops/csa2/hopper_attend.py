"""Joint sparse attention in CUDA for Hopper: provider "hopper" of csa2.sparse_attend.

512 channels; up to 64 heads, always padded to 64. The kernels are compiled at the first call, in a few seconds each.
They keep one CTA on every multiprocessor, which takes one token after the other.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megatron_dsv41.ops.csa2 import triton_attend
from megatron_dsv41.ops.csa2.attend import Problem, Provider
from megatron_dsv41.ops.cuda_kernels import launch

TABLES, FORWARD, BACKWARD = (
    Path(__file__).with_name(f"hopper_{part}.cu") for part in ("tables", "forward", "backward")
)
THREADS, FORWARD_THREADS = 256, 384
TILE_BYTES, BLOCK_BYTES = 64 * 512 * 2, 64 * 64 * 2
# As the kernels lay it out: keys (x3), P (x2), a part of q, slot rows (x3), rescaling, numbers, barriers; and
# q, grad_out, keys, P (x2), dS, slot rows (x4), row statistics, two numbers.
FORWARD_BYTES = 3 * TILE_BYTES + 3 * BLOCK_BYTES + (3 + 2 + 2) * 64 * 4 + (8 + 4 + 2) * 4 + 7 * 8
BACKWARD_BYTES = 3 * TILE_BYTES + 3 * BLOCK_BYTES + (4 + 3) * 64 * 4 + 2 * 4
TOKENS_AT_ONCE = 4096  # query tokens whose partial rows exist at once in deterministic mode: 2.7 GB at 640 slots


def prepare(
    problem: Problem, window_kv: Tensor, keys: Tensor, topk: Tensor, start: Tensor, sums: Tensor | None = None,
    launches: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Rows of both latents in the kernels' channel order, bf16 [J + C, 512], and every token's slot blocks, int32 [T].

    Also zeros int32 [launches], from which CTAs draw tokens. `sums`, fp32 of the table's shape, is zeroed.
    """
    rows = len(window_kv) + len(keys)
    table = window_kv.new_empty(rows, window_kv.shape[1])
    numbers = topk.new_empty(problem.num_tokens + launches)
    pack = -(-rows * window_kv.shape[1] // (16 * THREADS))
    count = problem.num_tokens // (THREADS // 32) + 1
    target, clear = (table, 0) if sums is None else (sums, 1)
    launch(
        TABLES, "prepare", pack + count, THREADS, window_kv, keys, table, target, topk, start, numbers,
        pack, len(window_kv), rows, clear, problem.num_tokens, launches, problem.window, problem.num_topk,
        problem.window_offset,
    )  # fmt: skip
    return table, numbers[: problem.num_tokens], numbers[problem.num_tokens :]


def grid(num_tokens: int, device: torch.device) -> int:
    """One CTA per multiprocessor, no more than there are tokens."""
    return min(num_tokens, torch.cuda.get_device_properties(device).multi_processor_count)


def forward(
    problem: Problem, q: Tensor, window_kv: Tensor, keys: Tensor, topk: Tensor, sink: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and the log of the denominator, fp32 [T, H]."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    if problem.num_tokens:
        table, blocks, tickets = prepare(problem, window_kv, keys, topk, start)
        launch(
            FORWARD, "attend_forward", grid(problem.num_tokens, q.device), FORWARD_THREADS, q, table, topk,
            sink, start, blocks, tickets, out, lse, problem.num_tokens, problem.num_heads, problem.window,
            problem.num_topk, problem.window_offset, len(window_kv), problem.scale, shared_bytes=FORWARD_BYTES,
        )  # fmt: skip
    return out, lse


def backward(
    problem: Problem, q: Tensor, window_kv: Tensor, keys: Tensor, topk: Tensor, start: Tensor, out: Tensor,
    lse: Tensor, grad_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """grad_q, the latents' gradients in fp32, and delta."""
    grad_q, delta = torch.empty_like(q), torch.empty_like(lse)
    sums = q.new_empty(len(window_kv) + len(keys), problem.dim, dtype=torch.float32)
    if not problem.num_tokens:
        return grad_q, sums[: len(window_kv)].zero_(), sums[len(window_kv) :].zero_(), delta
    slots = problem.window + problem.num_topk
    step = TOKENS_AT_ONCE if problem.deterministic else problem.num_tokens
    starts = range(0, problem.num_tokens, step)
    table, blocks, tickets = prepare(problem, window_kv, keys, topk, start, sums, len(starts))
    partial = sums  # never touched unless deterministic
    if problem.deterministic:
        partial = q.new_empty(min(step, problem.num_tokens) * slots, problem.dim)
    name = f"attend_backward<{str(problem.deterministic).lower()}, {-(-problem.num_heads // 16)}>"
    for begin, ticket in zip(starts, tickets.split(1), strict=True):
        some = slice(begin, min(begin + step, problem.num_tokens))
        tokens, offset = some.stop - begin, problem.window_offset + begin
        launch(
            BACKWARD, name, grid(tokens, q.device), THREADS, q[some], out[some], grad_out[some], table,
            topk[some], lse[some], start[some], blocks[some], ticket, grad_q[some], sums, partial, delta[some], tokens,
            problem.num_heads, problem.window, problem.num_topk, offset, len(window_kv), problem.scale,
            shared_bytes=BACKWARD_BYTES,
        )  # fmt: skip
        if problem.deterministic:
            order, ends = entry_order(topk[some], len(keys))
            launch(
                TABLES, "sum_rows", len(sums), THREADS, partial, order, ends, start[some], sums,
                len(window_kv), tokens, problem.window, problem.num_topk, offset,
            )  # fmt: skip
    return grad_q, sums[: len(window_kv)], sums[len(window_kv) :], delta


def entry_order(topk: Tensor, num_entries: int) -> tuple[Tensor, Tensor]:
    """Flat positions in topk by entry, then by token, int64; and where each entry's begin, int64 [C + 1]."""
    small = torch.int16 if num_entries <= torch.iinfo(torch.int16).max else torch.int32  # half the sort's passes
    chosen, order = topk.reshape(-1).to(small).sort(stable=True)
    return order, torch.searchsorted(chosen, torch.arange(num_entries + 1, dtype=small, device=topk.device))


sparse_attend = Provider("hopper", forward, backward, triton_attend.teacher_probabilities, dims=(512,), hopper=True)
