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

PROGRAMS = 264  # backward programs that share the rows (at most): two on each of an H200's multiprocessors
ELEMENTS, PARTS = 6144, 8  # of the rows that eight backward warps hold at once, and tiles of a row (at most)
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
    size: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (programs). partial fp32 [programs, size]: this program's part of the weight's gradient.

    ROWS rows at a time, as BLOCKS tiles of BLOCK channels that stay in registers: every input is read once. STAGES - 1
    times as many are on their way to shared memory meanwhile.
    """
    row_lane, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    weights, of_weights = (), ()
    for b in tl.static_range(BLOCKS):
        cols = b * BLOCK + lane
        weights = weights + (tl.load(weight_ptr + cols, mask=cols < size, other=0.0).to(tl.float32),)
        of_weights = of_weights + (tl.zeros([ROWS, BLOCK], dtype=tl.float32),)
    begin = tl.program_id(0) * share
    for number in tl.range(begin, tl.minimum(begin + share, tl.cdiv(num_rows, ROWS)), num_stages=STAGES):
        row = number * ROWS + row_lane
        live = row < num_rows
        at = row.to(tl.int64) * size + lane
        rms = tl.load(rms_ptr + row, mask=live, other=0.0)
        grads, normeds, sums = (), (), ()
        products = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        for b in tl.static_range(BLOCKS):
            inside = live & (b * BLOCK + lane < size)
            grad = tl.load(grad_ptr + at + b * BLOCK, mask=inside, other=0.0).to(tl.float32)
            normed = tl.load(x_ptr + at + b * BLOCK, mask=inside, other=0.0).to(tl.float32) * rms
            sums = sums + (of_weights[b] + grad * normed,)
            grads = grads + (grad * weights[b],)
            normeds = normeds + (normed,)
            products += grads[b] * normed
        of_weights = sums
        mean = tl.sum(products, axis=1, keep_dims=True) / size
        for b in tl.static_range(BLOCKS):
            of_x = (grads[b] - normeds[b] * mean) * rms
            inside = live & (b * BLOCK + lane < size)
            tl.store(grad_x_ptr + at + b * BLOCK, of_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
    for b in tl.static_range(BLOCKS):
        cols = b * BLOCK + tl.arange(0, BLOCK)
        tl.store(partial_ptr + tl.program_id(0) * size + cols, tl.sum(of_weights[b], axis=0), mask=cols < size)


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
        if not rows:
            return torch.empty_like(x), torch.zeros_like(weight), None
        of_x, of_weight, shape = torch.empty_like(x), torch.empty_like(weight), tiles(size)
        groups = triton.cdiv(rows, shape["ROWS"])
        share = triton.cdiv(groups, PROGRAMS)
        programs = triton.cdiv(groups, share)
        partial = torch.empty(programs, size, dtype=torch.float32, device=x.device)
        _backward[(programs,)](x, weight, rms, grad.contiguous(), of_x, partial, rows, share, size=size, **shape)
        _sum_weight[(triton.cdiv(size, 32),)](partial, of_weight, programs, size=size, BLOCK=32, num_warps=4)
        return of_x, of_weight, None


def tiles(size: int) -> dict[str, int]:
    """Compile-time arguments of the backward kernel: tiles of 2^n channels, with none beyond `size` where that can be.

    5120, 1280, 512 and 128 channels: five tiles of 1 x 1024, five of 4 x 256, one of 8 x 512, one of 32 x 128.
    """
    block = min(size & -size, WIDEST // PARTS)
    if triton.cdiv(size, block) > PARTS:
        block = triton.next_power_of_2(triton.cdiv(size, PARTS))
    blocks = triton.cdiv(size, block)
    rows = 1
    while 2 * rows * blocks * block <= ELEMENTS:
        rows *= 2
    stages, warps = (3, 8) if blocks * block <= ELEMENTS else (2, 16)
    return dict(BLOCK=block, BLOCKS=blocks, ROWS=rows, STAGES=stages, num_warps=warps)


def _warps(block: int) -> int:
    return min(8, max(1, block // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Semantics, shapes and dtypes of `norm.ref.rms_norm`, up to 16,384 channels."""
    check_tensors("norm.rms_norm", x, weight)
    if x.shape[-1] > WIDEST:
        raise ValueError(f"norm.rms_norm: provider 'triton' takes at most {WIDEST} channels, got {x.shape[-1]}")
    return _RMSNorm.apply(x.reshape(-1, x.shape[-1]).contiguous(), weight.contiguous(), eps).reshape(x.shape)
