"""Clamped SwiGLU with the routing weight in Triton: provider "triton" of routing.swiglu."""

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
def _forward(
    gate_ptr, up_ptr, weight_ptr, out_ptr, gate_stride, up_stride, size, limit,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < size
    gate = tl.load(gate_ptr + row * gate_stride + cols, mask=inside, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.load(up_ptr + row * up_stride + cols, mask=inside, other=0.0).to(tl.float32)
    hidden = gate * tl.sigmoid(gate) * tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    if WEIGHTED:
        hidden *= tl.load(weight_ptr + row)
    tl.store(out_ptr + row * size + cols, hidden.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    gate_ptr, up_ptr, weight_ptr, grad_ptr, grad_gate_ptr, grad_up_ptr, grad_weight_ptr,
    gate_stride, up_stride, grad_stride, size, limit, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows): a row's program sums the gradient of its weight."""
    row = tl.program_id(0).to(tl.int64)
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weight_ptr + row)
    of_weight = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, size, BLOCK):
        cols = begin + tl.arange(0, BLOCK)
        inside = cols < size
        raw_gate = tl.load(gate_ptr + row * gate_stride + cols, mask=inside, other=0.0).to(tl.float32)
        raw_up = tl.load(up_ptr + row * up_stride + cols, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * size + cols, mask=inside, other=0.0).to(tl.float32)
        gate = tl.minimum(raw_gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(raw_up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        slope = tl.sigmoid(gate)
        silu = gate * slope
        of_weight += grad * silu * up
        grad *= weight
        of_gate = tl.where(raw_gate > limit, 0.0, grad * up * (slope + silu * (1.0 - slope)))
        of_up = tl.where(tl.abs(raw_up) > limit, 0.0, grad * silu)
        tl.store(grad_gate_ptr + row * grad_stride + cols, of_gate.to(grad_gate_ptr.dtype.element_ty), mask=inside)
        tl.store(grad_up_ptr + row * grad_stride + cols, of_up.to(grad_up_ptr.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(grad_weight_ptr + row, tl.sum(of_weight))


class _SwiGLU(torch.autograd.Function):
    """gate, up [T, F], rows contiguous, or gate [T, 2F] with both halves and no up; weight fp32 [T] or None."""

    @staticmethod
    def forward(ctx, gate, up, weight, limit):
        ctx.save_for_backward(gate, up, weight)
        ctx.limit = limit
        gate, up = _halves(gate, up)
        rows, size = gate.shape
        out = torch.empty(rows, size, dtype=gate.dtype, device=gate.device)
        if gate.numel():
            _forward[(rows, triton.cdiv(size, 1024))](
                gate, up, weight, out, gate.stride(0), up.stride(0), size, limit,
                WEIGHTED=weight is not None, BLOCK=1024, num_warps=4,
            )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        saved_gate, saved_up, weight = ctx.saved_tensors
        grads = [
            None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (saved_gate, saved_up)
        ]
        (gate, up), (of_gate, of_up) = _halves(saved_gate, saved_up), _halves(*grads)
        rows, size = gate.shape
        of_weight = None if weight is None else torch.empty_like(weight)
        if gate.numel():
            _backward[(rows,)](
                gate, up, weight, grad.contiguous(), of_gate, of_up, of_weight,
                gate.stride(0), up.stride(0), of_gate.stride(0), size, ctx.limit,
                WEIGHTED=weight is not None, BLOCK=min(1024, triton.next_power_of_2(size)), num_warps=4,
            )  # fmt: skip
        return *grads, of_weight, None


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    return (gate, up) if up is not None else gate.chunk(2, -1)


def swiglu(gate: Tensor, up: Tensor | None, limit: float, weight: Tensor | None = None) -> Tensor:
    """Semantics, shapes and dtypes of `routing.ref.swiglu`. Both halves in one tensor get one gradient, not a copy."""
    check_tensors("routing.swiglu", gate, up)
    check_tensors("routing.swiglu", weight, dtypes=(torch.float32,))
    if up is not None and (gate.shape != up.shape or gate.dtype != up.dtype):
        raise ValueError(
            f"routing.swiglu: gate {list(gate.shape)} {gate.dtype} and up {list(up.shape)} {up.dtype} differ"
        )
    flat_weight = None if weight is None else weight.reshape(-1).contiguous()
    out = _SwiGLU.apply(_rows(gate), None if up is None else _rows(up), flat_weight, limit)
    return out.reshape(*gate.shape[:-1], -1)


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()
