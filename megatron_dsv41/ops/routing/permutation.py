"""Rows of tokens sorted by the expert they go to, and back: no sum depends on timing."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megatron_dsv41.ops.registry import Ops


@dataclasses.dataclass(frozen=True)
class Permutation:
    """The T*K (token, expert) pairs of a routing, sorted by expert, within an expert by token.

    pair_P int64 [T*K]: t * K + k of every row. place_TK int64: rows of every token, by expert. counts_E int64: rows of
    every expert. ops: who moves the rows.
    """

    pair_P: Tensor
    place_TK: Tensor
    counts_E: Tensor
    ops: Ops

    @classmethod
    def of(cls, indices_TK: Tensor, num_experts: int, ops: Ops) -> Permutation:
        """The permutation that sorts a routing's chosen experts int64 [T, k]."""
        experts_P = indices_TK.flatten()
        pair_P = torch.argsort(experts_P, stable=True)
        place_P = torch.empty_like(pair_P).scatter_(0, pair_P, torch.arange(pair_P.numel(), device=pair_P.device))
        counts_E = torch.zeros(num_experts, dtype=torch.int64, device=pair_P.device)
        counts_E.scatter_add_(0, experts_P, torch.ones_like(experts_P))
        return cls(pair_P, place_P.view_as(indices_TK).sort(1).values, counts_E, ops)

    def dispatch(self, x_TD: Tensor) -> Tensor:
        """[T, d] -> [T*K, d]: a token's row for each of its experts."""
        return _Dispatch.apply(x_TD, self.place_TK, self.ops)

    def combine(self, y_PD: Tensor, dtype: torch.dtype) -> Tensor:
        """[T*K, d] -> [T, d]: the sum of a token's rows in `dtype`, added in expert order."""
        return _Combine.apply(y_PD, self.place_TK, dtype, self.ops)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, place_TK, ops):
        ctx.save_for_backward(place_TK)
        ctx.ops = ops
        return ops["routing.spread_rows"](x_TD, place_TK, x_TD.dtype)

    @staticmethod
    def backward(ctx, grad_PD):  # type: ignore[override]
        (place_TK,) = ctx.saved_tensors
        return ctx.ops["routing.sum_rows"](grad_PD, place_TK, grad_PD.dtype), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_PD, place_TK, dtype, ops):
        ctx.save_for_backward(place_TK)
        ctx.ops, ctx.dtype = ops, y_PD.dtype
        return ops["routing.sum_rows"](y_PD, place_TK, dtype)

    @staticmethod
    def backward(ctx, grad_TD):  # type: ignore[override]
        (place_TK,) = ctx.saved_tensors
        return ctx.ops["routing.spread_rows"](grad_TD, place_TK, ctx.dtype), None, None, None
