"""Experts as two grouped products over all of them: provider "grouped" of routing.experts (`torch.nn.functional`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def experts(
    x_PD: Tensor,
    counts_E: Tensor,
    share_P: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float,
    swiglu: Callable[..., Tensor],
) -> Tensor:
    """Semantics and shapes of `routing.ref.experts`; no value of `counts_E` is read on the host.

    On GPUs for bfloat16 (SM80 and later); raises ValueError for other dtypes there.
    """
    if x_PD.is_cuda and x_PD.dtype != torch.bfloat16:
        raise ValueError(f"routing.experts: provider 'grouped' takes bfloat16 on GPUs, got {x_PD.dtype}; choose 'ref'")
    if not x_PD.shape[0]:  # one expert's plain products: no rows, and gradients of zero for all weights
        return F.linear(swiglu(F.linear(x_PD, w13[0].flatten(0, 1)), None, limit, share_P), w2[0])
    ends_E = counts_E.to(x_PD.device).cumsum(0).to(torch.int32)
    hidden = F.grouped_mm(x_PD, w13.flatten(1, 2).transpose(1, 2), offs=ends_E)
    return F.grouped_mm(swiglu(hidden, None, limit, share_P).contiguous(), w2.transpose(1, 2), offs=ends_E)
