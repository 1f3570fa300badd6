"""Engram rows in Triton: providers "triton" of engram.read_rows and engram.encode_rows, bit-equal to `ref`."""

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

from megatron_dsv41.ops.engram.rows import SCALE_BLOCK, RowFormat
from megatron_dsv41.ops.quant.ref import E4M3_MAX
from megatron_dsv41.ops.triton_checks import check_tensors

ELEMENTS = 2048  # of a program, as tools/bench_engram.py found best on one H200
DTYPES = (torch.bfloat16, torch.float32)


@triton.jit
def _power_of_two(byte):
    """2^(byte - 127) of int32 bytes; 0 is the subnormal 2^-127."""
    bits = byte << 23
    return tl.where(bits == 0, 1 << 22, bits).to(tl.float32, bitcast=True)


@triton.jit
def read_float8(
    rows_ptr, places_ptr, out_ptr, num_entries,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of entries). A row is DIM elements of E4M3, then a scale per SCALED columns."""
    BLOCKS: tl.constexpr = BLOCK_D // SCALED
    entry = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = (entry < num_entries)[:, None]
    start = tl.load(places_ptr + entry, mask=entry < num_entries, other=0)[:, None] * (DIM + DIM // SCALED)
    col, block = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCKS)[None, :]
    data = tl.load(rows_ptr + start + col, mask=inside & (col < DIM), other=0)
    scale = tl.load(rows_ptr + start + DIM + block, mask=inside & (block * SCALED < DIM), other=0)
    value = tl.reshape(data.to(tl.float8e4nv, bitcast=True).to(tl.float32), [BLOCK_E, BLOCKS, SCALED])
    value = tl.reshape(value * _power_of_two(scale.to(tl.int32))[:, :, None], [BLOCK_E, BLOCK_D])
    at = entry[:, None].to(tl.int64) * DIM + col
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=inside & (col < DIM))


@triton.jit
def read_plain(
    rows_ptr, places_ptr, out_ptr, num_entries, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Grid (blocks of entries). Rows are values."""
    entry = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    col = tl.arange(0, BLOCK_D)[None, :]
    mask = (entry < num_entries)[:, None] & (col < DIM)
    place = tl.load(places_ptr + entry, mask=entry < num_entries, other=0)[:, None]
    value = tl.load(rows_ptr + place * DIM + col, mask=mask, other=0.0)
    tl.store(out_ptr + entry[:, None].to(tl.int64) * DIM + col, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def encode_float8(
    values_ptr, out_ptr, num_rows, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    SCALED: tl.constexpr, LARGEST: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows)."""
    BLOCKS: tl.constexpr = BLOCK_D // SCALED
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    col, block = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCKS)[None, :]
    inside, row = row < num_rows, row.to(tl.int64)
    value = tl.load(values_ptr + row * DIM + col, mask=inside & (col < DIM), other=0.0).to(tl.float32)
    value = tl.reshape(value, [BLOCK_R, BLOCKS, SCALED])
    amax = tl.max(tl.abs(value), axis=2)
    # scale = smallest power of two with amax / scale <= LARGEST, by the bits of amax / LARGEST
    bits = (amax * INVERSE).to(tl.int32, bitcast=True)
    scale = tl.where(amax == 0, 127, (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32))
    value = value * _power_of_two((254 - scale) & 0xFF)[:, :, None]
    value = tl.clamp(value, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    value = tl.reshape(value, [BLOCK_R, BLOCK_D])
    data = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    start = row * (DIM + DIM // SCALED)
    tl.store(out_ptr + start + col, data, mask=inside & (col < DIM))
    tl.store(out_ptr + start + DIM + block, scale.to(tl.uint8), mask=inside & (block * SCALED < DIM))


def read_rows(rows_NW: Tensor, places_E: Tensor, form: RowFormat, dtype: torch.dtype) -> Tensor:
    """Semantics of `engram.ref.read_rows`, in one pass: bytes are read once, values written once."""
    check_tensors("engram.read_rows", places_E, dtypes=(torch.int64,))
    check_tensors("engram.read_rows", rows_NW, dtypes=(torch.uint8,))
    entries, dim = places_E.shape[0], form.dim
    out = torch.empty(entries, dim, dtype=_known(dtype), device=places_E.device)
    block = triton.next_power_of_2(dim)
    launch = {"DIM": dim, "BLOCK_D": block, "BLOCK_E": max(1, ELEMENTS // block), "num_warps": 4}
    grid, rows = (triton.cdiv(entries, launch["BLOCK_E"]),), rows_NW.contiguous()
    if not entries:
        return out
    if form.plain is None:
        read_float8[grid](rows, places_E.contiguous(), out, entries, SCALED=SCALE_BLOCK, **launch)
    else:
        read_plain[grid](rows.view(form.plain), places_E.contiguous(), out, entries, **launch)
    return out


def encode_rows(values_RD: Tensor, form: RowFormat) -> Tensor:
    """Semantics of `engram.ref.encode_rows` for finite values [R, dim]."""
    check_tensors("engram.encode_rows", values_RD)
    if form.plain is not None:
        return form.encode(values_RD)
    rows, dim = values_RD.shape
    out, block = torch.empty(rows, form.width, dtype=torch.uint8, device=values_RD.device), triton.next_power_of_2(dim)
    block_rows = max(1, ELEMENTS // block)
    if rows:
        encode_float8[(triton.cdiv(rows, block_rows),)](
            values_RD.contiguous(), out, rows, DIM=dim, BLOCK_D=block, BLOCK_R=block_rows,
            SCALED=SCALE_BLOCK, LARGEST=E4M3_MAX, INVERSE=1 / E4M3_MAX, num_warps=4,
        )  # fmt: skip
    return out


def _known(dtype: torch.dtype) -> torch.dtype:
    if dtype not in DTYPES:
        raise ValueError(f"engram.read_rows: provider 'triton' gives bfloat16 or float32, not {dtype}; choose 'ref'")
    return dtype
