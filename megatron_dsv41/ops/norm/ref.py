"""RMSNorm, the definition (SPEC 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dsv41.ops.numerics import wide


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis: fp32 arithmetic, one cast back to x's dtype."""
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * wide(weight)).to(x.dtype)
