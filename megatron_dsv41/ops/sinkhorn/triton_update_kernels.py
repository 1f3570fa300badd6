"""Triton kernels of the balanced update (SPEC 17): passes over the rows of a table that write scale vectors alone.

Every kernel is a grid of programs that walk over blocks of BLOCK_R rows, all columns of a row in one block. The update
of a row, beta (beta M + (1 - beta) G) + (1 - beta) G, is formed anew from what is stored whenever it is needed.
"""

# Triton's language is not Python's: its types are beyond pyright.
# pyright: reportArgumentType=none, reportAttributeAccessIssue=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAssignmentType=none, reportGeneralTypeIssues=none

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _slot(slots_ptr, row, inside, SPARSE: tl.constexpr):
    """Which row of the gradient belongs to a row of the table; -1: none."""
    if SPARSE:
        return tl.load(slots_ptr + row, mask=inside, other=-1)
    else:
        return tl.where(inside, row, -1)


@triton.jit
def _moved(momentum_ptr, grad_ptr, row, slot, live, beta, rest, COLS: tl.constexpr, BLOCK_C: tl.constexpr):
    """The new momentum and the update of a block of rows, fp32 [BLOCK_R, BLOCK_C]. Rows that are not live are not read.

    rest: 1 - beta.
    """
    col = tl.arange(0, BLOCK_C)[None, :]
    mask = live[:, None] & (col < COLS)
    old = tl.load(momentum_ptr + row[:, None].to(tl.int64) * COLS + col, mask=mask, other=0.0).to(tl.float32)
    mask = mask & (slot >= 0)[:, None]
    pulled = tl.load(grad_ptr + slot[:, None].to(tl.int64) * COLS + col, mask=mask, other=0.0).to(tl.float32) * rest
    new = old * beta + pulled
    return new, new * beta + pulled


@triton.jit
def _inverse(norm, eps):
    """1 / (norm + eps), and 0 for an empty row."""
    return tl.where(norm > 0, 1.0 / (norm + eps), 0.0)


@triton.jit
def _unit(norm, limit, eps, STEPS: tl.constexpr):
    """What step 1 multiplies a row by; 0 for a row that is left alone."""
    return tl.where(norm > limit, _inverse(norm, eps) if STEPS else 1.0, 0.0)


@triton.jit
def row_norms(
    momentum_ptr, grad_ptr, slots_ptr, norms_ptr, num_rows, num_blocks, beta, rest,
    COLS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """L2 norms of rows that may be too small to be squared."""
    programs = tl.num_programs(0)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    slot = _slot(slots_ptr, row, row < num_rows, SPARSE)
    for _ in range(tl.program_id(0), num_blocks, programs):
        next_row = row + programs * BLOCK_R
        next_slot = _slot(slots_ptr, next_row, next_row < num_rows, SPARSE)
        inside = row < num_rows
        _, update = _moved(momentum_ptr, grad_ptr, row, slot, inside, beta, rest, COLS, BLOCK_C)
        largest = tl.max(tl.abs(update), axis=1)
        update = update / tl.where(largest > 0, largest, 1.0)[:, None]
        tl.store(norms_ptr + row, largest * tl.sqrt(tl.sum(update * update, axis=1)), mask=inside)
        row, slot = next_row, next_slot


@triton.jit
def column_squares(
    momentum_ptr, grad_ptr, slots_ptr, norms_ptr, limit_ptr, scales_ptr, columns_ptr, partial_ptr,
    num_rows, num_blocks, beta, rest, eps,
    COLS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, SPARSE: tl.constexpr, BALANCE: tl.constexpr,
):  # fmt: skip
    """BALANCE: the row step before. Then this program's part of the columns' squared norms, fp32 [programs, COLS].

    What is summed leaves out the columns' own scales, which are one factor each.
    """
    programs = tl.num_programs(0)
    col = tl.arange(0, BLOCK_C)
    scale_C = tl.load(columns_ptr + col, mask=col < COLS, other=0.0)
    weight_C = scale_C * scale_C
    limit = tl.load(limit_ptr)
    squares = tl.zeros([BLOCK_R, BLOCK_C], dtype=tl.float32)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    slot = _slot(slots_ptr, row, row < num_rows, SPARSE)
    norm = tl.load(norms_ptr + row, mask=row < num_rows, other=0.0)
    for _ in range(tl.program_id(0), num_blocks, programs):
        next_row = row + programs * BLOCK_R
        next_slot = _slot(slots_ptr, next_row, next_row < num_rows, SPARSE)
        next_norm = tl.load(norms_ptr + next_row, mask=next_row < num_rows, other=0.0)
        inside = row < num_rows
        unit = _unit(norm, limit, eps, True)
        _, update = _moved(momentum_ptr, grad_ptr, row, slot, inside & (unit > 0), beta, rest, COLS, BLOCK_C)
        update = update * unit[:, None]
        update = update * update
        if BALANCE:
            scale = tl.load(scales_ptr + row, mask=inside, other=0.0)
            scale = scale * _inverse(scale * tl.sqrt(tl.sum(update * weight_C[None, :], axis=1)), eps)
            tl.store(scales_ptr + row, scale, mask=inside)
            update = update * (scale * scale)[:, None]
        squares += update
        row, slot, norm = next_row, next_slot, next_norm
    tl.store(partial_ptr + tl.program_id(0) * COLS + col, tl.sum(squares, axis=0), mask=col < COLS)


@triton.jit
def apply_update(
    weight_ptr, momentum_ptr, grad_ptr, slots_ptr, norms_ptr, limit_ptr, scales_ptr, columns_ptr,
    num_rows, num_blocks, beta, rest, eps, lr,
    COLS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, SPARSE: tl.constexpr,
    STEPS: tl.constexpr, BALANCE: tl.constexpr,
):  # fmt: skip
    """BALANCE: the last row step. Then the new weight and momentum. lr: of the balanced matrix, sqrt(COLS) with it."""
    programs = tl.num_programs(0)
    col = tl.arange(0, BLOCK_C)
    scale_C = tl.load(columns_ptr + col, mask=col < COLS, other=0.0)
    limit = tl.load(limit_ptr)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    slot = _slot(slots_ptr, row, row < num_rows, SPARSE)
    norm = tl.load(norms_ptr + row, mask=row < num_rows, other=0.0)
    for _ in range(tl.program_id(0), num_blocks, programs):
        next_row = row + programs * BLOCK_R
        next_slot = _slot(slots_ptr, next_row, next_row < num_rows, SPARSE)
        next_norm = tl.load(norms_ptr + next_row, mask=next_row < num_rows, other=0.0)
        inside = row < num_rows
        # A row without norm has neither momentum nor gradient, unless they cancel.
        live = inside & ((norm > 0) | (slot >= 0))
        new, update = _moved(momentum_ptr, grad_ptr, row, slot, live, beta, rest, COLS, BLOCK_C)
        at = row[:, None].to(tl.int64) * COLS + col[None, :]
        mask = live[:, None] & (col < COLS)[None, :]
        tl.store(momentum_ptr + at, new.to(momentum_ptr.dtype.element_ty), mask=mask)
        unit = _unit(norm, limit, eps, STEPS)
        update = update * unit[:, None]
        scale = tl.load(scales_ptr + row, mask=inside, other=0.0)
        if BALANCE:
            squares = update * update * (scale_C * scale_C)[None, :]
            scale = scale * _inverse(scale * tl.sqrt(tl.sum(squares, axis=1)), eps)
        mask = (inside & (unit > 0))[:, None] & (col < COLS)[None, :]
        step = update * (scale[:, None] * scale_C[None, :]) * lr
        weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32) - step
        tl.store(weight_ptr + at, weight.to(weight_ptr.dtype.element_ty), mask=mask)
        row, slot, norm = next_row, next_slot, next_norm
