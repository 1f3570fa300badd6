"""Expert routing and the clamped SwiGLU: the definition (SPEC 11)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dsv41.ops.numerics import wide


def route(logits_TE: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Select experts by score + bias, weigh them by their scores.

    logits fp32 [T, E]; bias fp32 [E] or [T, E], used for selection only. Among equal values the smaller expert wins.
    Returns indices int64 [T, k], weights fp32 [T, k] that sum to `scale`, scores fp32 [T, E] = sqrt(softplus(logits)).
    """
    # The floor keeps the square root's derivative finite where softplus underflows.
    scores_TE = F.softplus(logits_TE).clamp_min(torch.finfo(logits_TE.dtype).tiny).sqrt()
    order_TE = torch.sort(scores_TE.detach() + bias, dim=-1, descending=True, stable=True).indices
    indices_TK = order_TE[:, :top_k]
    chosen_TK = scores_TE.gather(1, indices_TK)
    return indices_TK, chosen_TK / (chosen_TK.sum(-1, keepdim=True) + 1e-20) * scale, scores_TE


def swiglu(gate: Tensor, up: Tensor | None, limit: float, weight: Tensor | None = None) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) [* weight], fp32 arithmetic, cast once to gate's dtype.

    gate, up [..., F], or gate [..., 2F] with both halves and no up; weight [...] is the routing weight, applied here,
    before w2.
    """
    if up is None:
        gate, up = gate.chunk(2, -1)
    hidden = F.silu(_clamp(wide(gate), -math.inf, limit)) * _clamp(wide(up), -limit, limit)
    if weight is not None:
        hidden = hidden * weight[..., None]
    return hidden.to(gate.dtype)


def _clamp(x: Tensor, low: float, high: float) -> Tensor:
    """torch.clamp whose gradient passes at the limits: that of torch 2.11 does, too, that of 2.14 does not."""
    return torch.where(x > high, high, torch.where(x < low, low, x))


def spread_rows(x_TD: Tensor, place_TK: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """[T, d] -> [rows, d] in `dtype`: row t goes to its places int64 place[t], or nowhere where one is -1. No gradient.

    Each of the `rows` places is taken once.
    """
    rows_PD = x_TD.new_empty(rows + 1, x_TD.shape[1], dtype=dtype)
    rows_PD[place_TK] = x_TD.to(dtype)[:, None]  # -1 is the last row, which is cut off
    return rows_PD[:rows]


def sum_rows(rows_PD: Tensor, place_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """[P, d] -> [T, d] in `dtype`: the sums of rows place[t], added in fp32 (or fp64) in that order. No gradient.

    A place of -1 adds nothing.
    """
    filled_PD = F.pad(rows_PD, (0, 0, 0, 1))  # -1 is the last row, which is zero
    total_TD = wide(filled_PD[place_TK[:, 0]])
    for place_T in place_TK.T[1:]:
        total_TD = total_TD + filled_PD[place_T]
    return total_TD.to(dtype)


def experts(
    x_PD: Tensor,
    counts_E: Tensor,
    share_P: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float,
    swiglu: Callable[..., Tensor],
) -> Tensor:
    """Every expert on its own rows: [P, d] in the dtype of x.

    Rows are sorted by expert, counts int64 [E] of them each; share [P]: routing weights; w13 [E, 2, F, d] (gate, up),
    w2 [E, d, F]; swiglu: as above.
    """
    outputs, counts = [], counts_E.tolist()
    for (w1, w3), down, x, share in zip(w13, w2, x_PD.split(counts), share_P.split(counts), strict=True):
        outputs.append(F.linear(swiglu(F.linear(x, w1), F.linear(x, w3), limit, share), down))
    return torch.cat(outputs)
