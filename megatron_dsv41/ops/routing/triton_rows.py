"""Rows to their experts and back in Triton: providers "triton" of routing.spread_rows and routing.sum_rows."""

# Triton's language is not Python's: its types are beyond pyright.
# pyright: reportArgumentType=none, reportAttributeAccessIssue=none, reportOperatorIssue=none, reportIndexIssue=none
# Kernel launches take options (num_warps) that pyright does not see in the kernel's signature.
# pyright: reportCallIssue=none

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_dsv41.ops.triton_checks import check_tensors

BLOCK = 1024  # channels of a program


@triton.jit
def spread_forward(x_ptr, place_ptr, rows_ptr, dim, K: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (tokens, blocks of channels): a row is read once and written to its places."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < dim
    x = tl.load(x_ptr + token * dim + cols, mask=inside).to(rows_ptr.dtype.element_ty)
    for k in tl.static_range(K):
        place = tl.load(place_ptr + token * K + k)
        tl.store(rows_ptr + place * dim + cols, x, mask=inside & (place >= 0))


@triton.jit
def sum_forward(rows_ptr, place_ptr, out_ptr, dim, K: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (tokens, blocks of channels): up to K rows are read and added in order, in fp32."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < dim
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(K):
        place = tl.load(place_ptr + token * K + k)
        total += tl.load(rows_ptr + place * dim + cols, mask=inside & (place >= 0), other=0.0).to(tl.float32)
    tl.store(out_ptr + token * dim + cols, total.to(out_ptr.dtype.element_ty), mask=inside)


def spread_rows(x_TD: Tensor, place_TK: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Semantics, shapes and dtypes of `routing.ref.spread_rows`."""
    check_tensors("routing.spread_rows", x_TD)
    rows_PD = torch.empty(rows, x_TD.shape[1], dtype=dtype, device=x_TD.device)
    _launch(spread_forward, x_TD.contiguous(), place_TK, rows_PD)
    return rows_PD


def sum_rows(rows_PD: Tensor, place_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Semantics, shapes and dtypes of `routing.ref.sum_rows`."""
    check_tensors("routing.sum_rows", rows_PD)
    out_TD = torch.empty(place_TK.shape[0], rows_PD.shape[1], dtype=dtype, device=rows_PD.device)
    _launch(sum_forward, rows_PD.contiguous(), place_TK, out_TD)
    return out_TD


def _launch(kernel, source: Tensor, place_TK: Tensor, target: Tensor) -> None:
    tokens, dim = place_TK.shape[0], source.shape[1]
    if tokens * dim:  # without rows, sums are zero
        kernel[(tokens, triton.cdiv(dim, BLOCK))](
            source, place_TK.contiguous(), target, dim, K=place_TK.shape[1], BLOCK=BLOCK, num_warps=4
        )
