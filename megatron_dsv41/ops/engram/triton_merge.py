"""Gradients summed by row in Triton: provider "triton" of engram.merge. One read of the entries, no atomics."""

# Triton's language is not Python's: its types are beyond pyright.
# pyright: reportArgumentType=none, reportAttributeAccessIssue=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAssignmentType=none, reportGeneralTypeIssues=none
# Kernel launches take options (num_warps, maxnreg) that pyright does not see in the kernel's signature.
# pyright: reportCallIssue=none

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_dsv41.ops.engram.runs import LONG, Runs
from megatron_dsv41.ops.triton_checks import check_tensors

BLOCK_M, BLOCK_L, COLUMNS = 8, 32, 128  # runs of a program; entries that it adds at once, and columns, in a long run


@triton.jit
def _store(sums, sums_ptr, rows_ptr, run, col, mask, scale, D: tl.constexpr, INTO: tl.constexpr):
    """Sum m as row m, or added to row rows[m]."""
    row = run.to(tl.int64)
    if INTO:
        row = tl.load(rows_ptr + run)
    at = sums_ptr + row[:, None] * D + col[None, :]
    sums = sums * scale
    if INTO:
        sums += tl.load(at, mask=mask, other=0.0)
    tl.store(at, sums, mask=mask)


@triton.jit
def merge_short(
    values_ptr, order_ptr, begins_ptr, sums_ptr, rows_ptr, num_runs, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, LONG: tl.constexpr, INTO: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of runs). Runs of more than LONG entries are left alone."""
    number, col = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    run = tl.minimum(number, num_runs - 1)
    begin = tl.load(begins_ptr + run)
    length = tl.load(begins_ptr + run + 1) - begin
    mine = (number < num_runs) & (length <= LONG)
    length = tl.where(mine, length, 0)
    sums = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for i in range(tl.max(length)):
        entry = tl.load(order_ptr + begin + i, mask=i < length, other=0)
        mask = (i < length)[:, None] & (col < D)[None, :]
        sums += tl.load(values_ptr + entry[:, None] * D + col[None, :], mask=mask, other=0.0).to(tl.float32)
    _store(sums, sums_ptr, rows_ptr, run, col, mine[:, None] & (col < D)[None, :], scale, D, INTO)


@triton.jit
def merge_long(
    values_ptr, order_ptr, begins_ptr, long_ptr, sums_ptr, rows_ptr, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr, INTO: tl.constexpr,
):  # fmt: skip
    """Grid (long runs, blocks of columns)."""
    run = tl.load(long_ptr + tl.program_id(0))
    col = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin, end = tl.load(begins_ptr + run), tl.load(begins_ptr + run + 1)
    sums = tl.zeros([BLOCK_L, BLOCK_D], dtype=tl.float32)
    for first in range(begin, end, BLOCK_L):
        place = first + tl.arange(0, BLOCK_L)
        entry = tl.load(order_ptr + place, mask=place < end, other=0)
        mask = (place < end)[:, None] & (col < D)[None, :]
        sums += tl.load(values_ptr + entry[:, None] * D + col[None, :], mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(sums, axis=0)[None, :]
    _store(total, sums_ptr, rows_ptr, run + tl.arange(0, 1), col, (col < D)[None, :], scale, D, INTO)


def merge(values_ED: Tensor, runs: Runs, scale: float = 1.0, into: Tensor | None = None) -> Tensor:
    """Semantics of `engram.ref.merge`, in one read of the entries and without atomics."""
    check_tensors("engram.merge", values_ED)
    check_tensors("engram.merge", into, dtypes=(torch.float32,))
    dim, num_runs, values = values_ED.shape[1], len(runs.rows_M), values_ED.contiguous()
    sums = torch.empty(num_runs, dim, dtype=torch.float32, device=values.device) if into is None else into
    if num_runs:
        launch = {"D": dim, "INTO": into is not None, "num_warps": 4}
        merge_short[(triton.cdiv(num_runs, BLOCK_M),)](
            values, runs.order_E, runs.begins, sums, runs.rows_M, num_runs, scale,
            BLOCK_D=triton.next_power_of_2(dim), BLOCK_M=BLOCK_M, LONG=LONG, **launch,
        )  # fmt: skip
    if len(runs.long):
        block = min(triton.next_power_of_2(dim), COLUMNS)
        merge_long[(len(runs.long), triton.cdiv(dim, block))](
            values, runs.order_E, runs.begins, runs.long, sums, runs.rows_M, scale,
            BLOCK_D=block, BLOCK_L=BLOCK_L, **launch,
        )  # fmt: skip
    return sums
