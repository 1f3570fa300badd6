"""RMSNorm in Triton: provider "triton" of norm.rms_norm. fp32 inside, one read and one write each way."""

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

PROGRAMS = 528  # backward programs that share the rows (at most): four on each of an H200's multiprocessors
WIDEST = 16384


@triton.jit
def _forward(x_ptr, weight_ptr, out_ptr, rms_ptr, size: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < size
    x = tl.load(x_ptr + row * size + cols, mask=inside, other=0.0).to(tl.float32)
    rms = 1.0 / tl.sqrt(tl.sum(x * x) / size + EPS)
    tl.store(rms_ptr + row, rms)
    out = x * rms * tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + cols, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    x_ptr, weight_ptr, rms_ptr, grad_ptr, grad_x_ptr, partial_ptr, num_rows, share,
    size: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (programs). partial fp32 [programs, size]: this program's part of the weight's gradient."""
    cols = tl.arange(0, BLOCK)
    inside = cols < size
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros([BLOCK], dtype=tl.float32)
    begin = tl.program_id(0) * share
    for number in range(begin, tl.minimum(begin + share, num_rows)):
        row = tl.cast(number, tl.int64) * size
        grad = tl.load(grad_ptr + row + cols, mask=inside, other=0.0).to(tl.float32)
        rms = tl.load(rms_ptr + number)
        normed = tl.load(x_ptr + row + cols, mask=inside, other=0.0).to(tl.float32) * rms
        of_weight += grad * normed
        grad *= weight
        of_x = (grad - normed * (tl.sum(grad * normed) / size)) * rms
        tl.store(grad_x_ptr + row + cols, of_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
    tl.store(partial_ptr + tl.program_id(0) * size + cols, of_weight, mask=inside)


@triton.jit
def _sum_weight(partial_ptr, out_ptr, programs, size: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, programs, 64):
        program = begin + tl.arange(0, 64)
        mask = (program < programs)[:, None] & (cols < size)[None, :]
        total += tl.sum(tl.load(partial_ptr + program[:, None] * size + cols[None, :], mask=mask, other=0.0), axis=0)
    tl.store(out_ptr + cols, total.to(out_ptr.dtype.element_ty), mask=cols < size)


class _RMSNorm(torch.autograd.Function):
    """x [T, D] contiguous. Saves x, weight and one fp32 factor per row."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        rows, size = x.shape
        out, rms = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(size)
        if rows:
            _forward[(rows,)](x, weight, out, rms, size=size, EPS=eps, BLOCK=block, num_warps=_warps(block))
        ctx.save_for_backward(x, weight, rms)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        x, weight, rms = ctx.saved_tensors
        rows, size = x.shape
        block, share = triton.next_power_of_2(size), max(1, triton.cdiv(rows, PROGRAMS))
        programs = triton.cdiv(rows, share)
        of_x, of_weight = torch.empty_like(x), torch.zeros_like(weight)
        if rows:
            partial = torch.empty(programs, size, dtype=torch.float32, device=x.device)
            _backward[(programs,)](
                x, weight, rms, grad.contiguous(), of_x, partial, rows, share,
                size=size, BLOCK=block, num_warps=_warps(block),
            )  # fmt: skip
            _sum_weight[(triton.cdiv(size, 32),)](partial, of_weight, programs, size=size, BLOCK=32, num_warps=4)
        return of_x, of_weight, None


def _warps(block: int) -> int:
    return min(8, max(1, block // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Semantics, shapes and dtypes of `norm.ref.rms_norm`, up to 16,384 channels."""
    check_tensors("norm.rms_norm", x, weight)
    if x.shape[-1] > WIDEST:
        raise ValueError(f"norm.rms_norm: provider 'triton' takes at most {WIDEST} channels, got {x.shape[-1]}")
    return _RMSNorm.apply(x.reshape(-1, x.shape[-1]).contiguous(), weight.contiguous(), eps).reshape(x.shape)
