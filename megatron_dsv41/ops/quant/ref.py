"""Fake quantization of KV and index tensors: quantize, dequantize, straight-through gradient (SPEC 10).

Every function takes x [..., D] with D a multiple of the block and returns the same shape and dtype. Rounding is to
nearest even onto the grid after a saturating clamp. The gradient is the identity everywhere, saturated values included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantize: Callable[[Tensor], Tensor]) -> Tensor:
        return quantize(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def power_of_two_scale(amax: Tensor, inverse_max: float) -> Tensor:
    """2^ceil(log2(amax * inverse_max)) from the fp32 bit pattern; amax fp32, positive and normal after the product."""
    bits = (amax * torch.tensor(inverse_max, dtype=torch.float32, device=amax.device)).view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def round_e4m3(x: Tensor) -> Tensor:
    """fp32 -> nearest E4M3 value as fp32, saturating at 448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)


def round_e2m1(x: Tensor) -> Tensor:
    """fp32 -> nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with sign, ties to the even code, saturating at 6."""
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    size = x.abs()
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    return (x / step).round() * step


def _blocks(x: Tensor, block: int) -> Tensor:
    if x.shape[-1] % block:
        raise ValueError(f"last dimension {x.shape[-1]} is not a multiple of the quantization block {block}")
    return x.to(torch.float32).unflatten(-1, (-1, block))


def _fp8(x: Tensor, block: int) -> Tensor:
    values = _blocks(x, block)
    scale = power_of_two_scale(values.abs().amax(-1, keepdim=True).clamp_min(1e-4), 1 / E4M3_MAX)
    return (round_e4m3(values / scale) * scale).flatten(-2).to(x.dtype)


def _mxfp4(x: Tensor, block: int) -> Tensor:
    values = _blocks(x, block)
    amax = values.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-126)
    scale = power_of_two_scale(amax, 1 / E2M1_MAX)
    return (round_e2m1(values / scale) * scale).flatten(-2).to(x.dtype)


def _fp4(x: Tensor, block: int) -> Tensor:
    values = _blocks(x, block)
    amax = values.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-9)
    scale = round_e4m3(amax / E2M1_MAX)
    return (round_e2m1(values / scale) * scale).flatten(-2).to(x.dtype)


def fake_fp8(x: Tensor, block: int = 32) -> Tensor:
    """Window KV: E4M3 values, one power-of-two scale per `block` channels (SPEC 10.1)."""
    return _StraightThrough.apply(x, lambda t: _fp8(t, block))


def fake_mxfp4(x: Tensor, block: int = 32) -> Tensor:
    """Index queries and keys: E2M1 values, one power-of-two scale per `block` channels (SPEC 10.2)."""
    return _StraightThrough.apply(x, lambda t: _mxfp4(t, block))


def fake_fp4(x: Tensor, block: int = 16) -> Tensor:
    """Main compressed KV: E2M1 values, one E4M3 scale per `block` channels (SPEC 10.3).

    The scale may round down, so the clamp at 6 is reachable.
    """
    return _StraightThrough.apply(x, lambda t: _fp4(t, block))
