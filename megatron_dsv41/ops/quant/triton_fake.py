"""Fake quantization in Triton: providers "triton" of quant.fake_fp8, fake_mxfp4, fake_fp4. Bit-equal to `ref`."""

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


@triton.jit
def _on_grid(x, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """Nearest value with MANTISSA bits behind the leading one, steps not below 2^(LOWEST - MANTISSA); ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 0xFF, 127 + LOWEST)
    # Adding and removing 1.5 * 2^23 steps rounds to a multiple of the step, to nearest even.
    anchor = (((exponent + (23 - MANTISSA)) << 23) | 0x400000).to(tl.float32, bitcast=True)
    rounded = (x + anchor) - anchor
    return ((rounded.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | (bits & -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def _power_of_two(amax, INVERSE: tl.constexpr):
    bits = (amax * INVERSE).to(tl.int32, bitcast=True)
    return (((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _fake(x_ptr, out_ptr, num_blocks, FORMAT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """One row per quantization block. FORMAT: fp8, mxfp4 or fp4."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (rows < num_blocks)[:, None]
    at = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(x), axis=1)
    if FORMAT == "fp8":
        scale = _power_of_two(tl.maximum(amax, 1e-4), 1 / 448)[:, None]
        value = _on_grid(tl.clamp(tl.div_rn(x, scale), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL), 3, -6)
    else:
        if FORMAT == "mxfp4":
            scale = _power_of_two(tl.maximum(amax, 6 * 2.0**-126), 1 / 6)[:, None]
        else:
            step = tl.div_rn(tl.maximum(amax, 6 * 2.0**-9), tl.full([ROWS], 6.0, tl.float32))
            scale = _on_grid(tl.minimum(step, 448.0), 3, -6)[:, None]
        value = _on_grid(tl.clamp(tl.div_rn(x, scale), -6.0, 6.0, propagate_nan=tl.PropagateNan.ALL), 1, 0)
    tl.store(out_ptr + at, (value * scale).to(out_ptr.dtype.element_ty), mask=live)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kind, block):
        x = x.contiguous()
        out, num_blocks = torch.empty_like(x), x.numel() // block
        rows = 2048 // block
        if num_blocks:
            grid = (triton.cdiv(num_blocks, rows),)
            _fake[grid](x, out, num_blocks, FORMAT=kind, BLOCK=block, ROWS=rows, num_warps=4)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad, None, None


def _run(kind: str, x: Tensor, block: int) -> Tensor:
    check_tensors(f"quant.fake_{kind}", x)
    if block & (block - 1) or x.shape[-1] % block:
        raise ValueError(
            f"quant.fake_{kind}: provider 'triton' takes blocks of a power of two that divides the last dimension, "
            f"got {block} for {x.shape[-1]}"
        )
    return _StraightThrough.apply(x, kind, block)


def fake_fp8(x: Tensor, block: int = 32) -> Tensor:
    """Semantics and dtypes of `quant.ref.fake_fp8`."""
    return _run("fp8", x, block)


def fake_mxfp4(x: Tensor, block: int = 32) -> Tensor:
    """Semantics and dtypes of `quant.ref.fake_mxfp4`."""
    return _run("mxfp4", x, block)


def fake_fp4(x: Tensor, block: int = 16) -> Tensor:
    """Semantics and dtypes of `quant.ref.fake_fp4`."""
    return _run("fp4", x, block)
