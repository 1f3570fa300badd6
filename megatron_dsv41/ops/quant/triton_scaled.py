"""E4M3 operands of scaled products in Triton: a scale per row, and matrices quantized so, transposed.

Tensor cores of Hopper contract along contiguous FP8, and a product has a scale per row of either operand. Where rows of
the quantized matrix are contracted, their scales go into the other operand before it is quantized itself.
"""

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

from megatron_dsv41.ops.triton_checks import check_tensors

LARGEST = tl.constexpr(448.0)  # of E4M3
TINY = tl.constexpr(1e-30)  # largest values below make zeros


@triton.jit
def _rows(
    x_ptr, factor_ptr, group_ptr, q_ptr, scale_ptr, columns, FACTORED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < columns
    x = tl.load(x_ptr + row * columns + cols, mask=inside, other=0.0).to(tl.float32)
    if FACTORED:
        x *= tl.load(factor_ptr + tl.load(group_ptr + row) * columns + cols, mask=inside, other=0.0)
    scale = tl.maximum(tl.max(tl.abs(x)), TINY) / LARGEST
    tl.store(q_ptr + row * columns + cols, (x / scale).to(tl.float8e4nv), mask=inside)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _transposes(x_ptr, scale_ptr, q_ptr, rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Grid (blocks of columns, blocks of rows, matrices)."""
    matrix = tl.program_id(2).to(tl.int64)
    col = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    begin = matrix * rows * columns
    inside = (row < rows)[:, None] & (col < columns)[None, :]
    x = tl.load(x_ptr + begin + row[:, None] * columns + col[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + matrix * rows + row, mask=row < rows, other=1.0)
    q = tl.trans((x / scale[:, None]).to(tl.float8e4nv))
    tl.store(q_ptr + begin + col[:, None] * rows + row[None, :], q, mask=tl.trans(inside))


def scaled_rows(x_RC: Tensor, factors_GC: Tensor | None = None, group_R: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[R, C] -> E4M3 [R, C] and fp32 scales [R]: x is about q * scale.

    factors fp32 [G, C]: x is first multiplied with those of the row's group, int64 [R].
    """
    check_tensors("quant.scaled_rows", x_RC)
    x_RC = x_RC.contiguous()
    rows, columns = x_RC.shape
    q = torch.empty_like(x_RC, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows, dtype=torch.float32, device=x_RC.device)
    if rows:
        block = triton.next_power_of_2(columns)
        _rows[(rows,)](
            x_RC, factors_GC, group_R, q, scale, columns,
            FACTORED=factors_GC is not None, BLOCK=block, num_warps=8 if block > 2048 else 4,
        )  # fmt: skip
    return q, scale


def scaled_transposes(x_GRC: Tensor, scale_GR: Tensor) -> Tensor:
    """[G, R, C] over the scales of its rows, transposed: E4M3 [G, C, R], the values that `scaled_rows` finds."""
    check_tensors("quant.scaled_transposes", x_GRC)
    groups, rows, columns = x_GRC.shape
    q = torch.empty(groups, columns, rows, dtype=torch.float8_e4m3fn, device=x_GRC.device)
    grid = (triton.cdiv(columns, 64), triton.cdiv(rows, 128), groups)
    _transposes[grid](x_GRC.contiguous(), scale_GR, q, rows, columns, BLOCK_R=128, BLOCK_C=64, num_warps=4)
    return q
