"""Rotary embedding in Triton: provider "triton" of rope.rotate. The gradient is the inverse turn."""

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
def _rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr, num_rows, HEADS: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_P: tl.constexpr, ROWS: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Rows are (token, head). The first D / 2 - PAIRS channel pairs turn by the angle 0."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (rows < num_rows)[:, None]
    lane = tl.arange(0, 2 * BLOCK_P)
    at = rows[:, None] * D + lane[None, :]
    inside = live & (lane < D)[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, [ROWS, BLOCK_P, 2]))
    pair = tl.arange(0, BLOCK_P) - (D // 2 - PAIRS)
    turned = live & (pair >= 0)[None, :] & (pair < PAIRS)[None, :]
    angle = (rows // HEADS)[:, None] * PAIRS + pair[None, :]
    cos = tl.load(cos_ptr + angle, mask=turned, other=1.0)
    sin = SIGN * tl.load(sin_ptr + angle, mask=turned, other=0.0)
    out = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [ROWS, 2 * BLOCK_P])
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, sign):
        ctx.save_for_backward(cos, sin)
        ctx.sign = sign
        return _launch(x, cos, sin, sign)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return _launch(grad, *ctx.saved_tensors, -ctx.sign), None, None, None


def _launch(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    x = x.contiguous()
    out, dim = torch.empty_like(x), x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    num_rows, block = x.numel() // dim, triton.next_power_of_2(dim) // 2
    rows = max(1, 4096 // (2 * block))
    if num_rows:
        _rotate[(triton.cdiv(num_rows, rows),)](
            x, cos, sin, out, num_rows, HEADS=heads, D=dim, PAIRS=cos.shape[-1], BLOCK_P=block, ROWS=rows,
            SIGN=sign, num_warps=4,
        )  # fmt: skip
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Semantics, shapes and dtypes of `rope.ref.rotate`; cos and sin get no gradient."""
    check_tensors("rope.rotate", x)
    check_tensors("rope.rotate", cos, sin, dtypes=(torch.float32,))
    if x.dim() not in (2, 3) or x.shape[-1] % 2 or 2 * cos.shape[-1] > x.shape[-1] or cos.shape[0] != x.shape[0]:
        raise ValueError(
            f"rope.rotate: x {list(x.shape)} must be [T, D] or [T, heads, D] with even D, and cos {list(cos.shape)} "
            "[T, pairs] with at most D / 2 pairs"
        )
    return _Rotate.apply(x, cos.contiguous(), sin.contiguous(), -1.0 if inverse else 1.0)
