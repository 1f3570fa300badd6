"""Rotary embedding in Triton: providers "triton" of rope.rotate and rope.rotate_owned.

A new tensor needs a pass over every channel; a tensor of ours is turned where it lies, and its other channels, seven
eighths of a head of 512, are neither read nor written. Both are one kernel, so that they round alike.
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


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr, num_rows, HEADS: tl.constexpr, D: tl.constexpr, FIRST: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, ROWS: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Rows are (token, head). Channels from FIRST on are written; of these all but the last PAIRS pairs as they are."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (rows < num_rows)[:, None]
    lane = FIRST + tl.arange(0, 2 * BLOCK_P)
    at = rows[:, None] * D + lane[None, :]
    inside = live & (lane < D)[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, [ROWS, BLOCK_P, 2]))
    pair = FIRST // 2 + tl.arange(0, BLOCK_P) - (D // 2 - PAIRS)
    turned = live & (pair >= 0)[None, :] & (pair < PAIRS)[None, :]
    angle = (rows // HEADS)[:, None] * PAIRS + pair[None, :]
    cos = tl.load(cos_ptr + angle, mask=turned, other=1.0)
    sin = SIGN * tl.load(sin_ptr + angle, mask=turned, other=0.0)
    new_even = tl.where(turned, even * cos - odd * sin, even)
    new_odd = tl.where(turned, even * sin + odd * cos, odd)
    out = tl.reshape(tl.join(new_even, new_odd), [ROWS, 2 * BLOCK_P])
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, inverse):
        ctx.save_for_backward(cos, sin)
        ctx.inverse = inverse
        return _copy(x, cos, sin, inverse)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        # A copy again: the gradient may be the caller's, or that of another consumer too.
        return _copy(grad, *ctx.saved_tensors, not ctx.inverse), None, None, None


def _copy(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, out, cos, sin, inverse, first=0)
    return out


def _launch(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, inverse: bool, first: int) -> None:
    dim, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    block = triton.next_power_of_2(dim - first) // 2
    rows = max(1, 4096 // (2 * block))
    if x.numel() and dim > first:
        num_rows = x.numel() // dim
        _rotate[(triton.cdiv(num_rows, rows),)](
            x, cos, sin, out, num_rows, HEADS=heads, D=dim, FIRST=first, PAIRS=cos.shape[-1], BLOCK_P=block, ROWS=rows,
            SIGN=-1.0 if inverse else 1.0, num_warps=4,
        )  # fmt: skip


def _check(op: str, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_tensors(op, x)
    check_tensors(op, cos, sin, dtypes=(torch.float32,))
    if x.dim() not in (2, 3) or x.shape[-1] % 2 or 2 * cos.shape[-1] > x.shape[-1] or cos.shape[0] != x.shape[0]:
        raise ValueError(
            f"{op}: x {list(x.shape)} must be [T, D] or [T, heads, D] with even D, and cos {list(cos.shape)} "
            "[T, pairs] with at most D / 2 pairs"
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Semantics, shapes and dtypes of `rope.ref.rotate`; cos and sin get no gradient."""
    _check("rope.rotate", x, cos, sin)
    return _Rotate.apply(x, cos.contiguous(), sin.contiguous(), inverse)


def rotate_owned(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """`rope.ref.rotate_owned`: x itself, turned where it lies, or a turned copy where x is not contiguous.

    Autograd is told: a backward that had saved x raises. ValueError: x is a leaf that requires a gradient.
    """
    _check("rope.rotate_owned", x, cos, sin)
    check_owned("rope.rotate_owned", x)
    x = x.detach().contiguous()
    _launch(x, x, cos.contiguous(), sin.contiguous(), inverse, first=x.shape[-1] - 2 * cos.shape[-1])
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)
    return x


def check_owned(op: str, x: Tensor) -> None:
    """ValueError where x is a parameter or another leaf of the graph, or a view of one: its maker reads it again."""
    for tensor in (x, x._base):
        if tensor is not None and tensor.is_leaf and tensor.requires_grad:
            raise ValueError(f"{op}: x is a leaf that requires a gradient, nobody's to overwrite; give x.clone()")
