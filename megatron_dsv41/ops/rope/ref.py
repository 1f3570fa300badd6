"""Rotary embedding: adjacent pairs of the last channels, plain or YaRN frequencies (SPEC 8.2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_dsv41.ops.numerics import wide


def plain_frequencies(dim: int, base: float) -> Tensor:
    """base^(-2k/dim), fp32 [dim/2]: radians per position of each channel pair."""
    return _exact_frequencies(dim, base).float()


def _exact_frequencies(dim: int, base: float) -> Tensor:
    # fp64 up to the last step: at a million positions an error of one fp32 ulp is a visible angle.
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def yarn_frequencies(
    dim: int, base: float, factor: float, beta_fast: float, beta_slow: float, original_length: int
) -> Tensor:
    """Frequencies divided by `factor` on the slow pairs, unchanged on the fast ones, a ramp between; fp32 [dim/2].

    No magnitude factor goes with it: neither the softmax scale nor cos and sin change.
    """

    def pair_of(turns: float) -> float:
        """The pair that makes `turns` turns over the original length."""
        return dim * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_of(beta_fast)), 0)
    high = min(math.ceil(pair_of(beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = _exact_frequencies(dim, base)
    return (frequencies / factor * ramp + frequencies * (1 - ramp)).float()


def cos_sin(position_T: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency, fp32 [T, dim/2]."""
    angle = position_T.to(torch.float32)[:, None] * frequencies.to(position_T.device)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last 2*cos.shape[-1] channels of x [T, D] or [T, heads, D] by pairs (0,1), (2,3), ...

    cos, sin: fp32 [T, pairs]. fp32 arithmetic, one cast back; the other channels pass unchanged.
    `inverse` rotates by the conjugate angle.
    """
    rotary = 2 * cos.shape[-1]
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    sin = -sin if inverse else sin
    still, turned = x.split([x.shape[-1] - rotary, rotary], dim=-1)
    even, odd = wide(turned).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return torch.cat([still, turned.to(x.dtype)], dim=-1)


def rotate_owned(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """`rotate` of a tensor that the caller made and nobody reads again: a provider may turn it where it lies.

    Only the result is to be used, whose memory may be that of x. No gradient: this is for the inside of autograd nodes,
    on what they have just made. What came from elsewhere, an incoming gradient too, may be somebody else's.
    """
    return rotate(x.detach(), cos, sin, inverse)
