"""Rows of tokens sorted by the expert they go to, and back: gathers both ways, so that no sum depends on timing."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Permutation:
    """The T*K (token, expert) pairs of a routing, sorted by expert, within an expert by token.

    pair_P int64 [T*K]: t * K + k of every row, token_P its t. place_TK int64: rows of every token, by expert. counts_E
    int64: rows of every expert.
    """

    pair_P: Tensor
    token_P: Tensor
    place_TK: Tensor
    counts_E: Tensor

    @classmethod
    def of(cls, indices_TK: Tensor, num_experts: int) -> Permutation:
        """The permutation that sorts a routing's chosen experts int64 [T, k]."""
        experts_P = indices_TK.flatten()
        pair_P = torch.argsort(experts_P, stable=True)
        place_P = torch.empty_like(pair_P).scatter_(0, pair_P, torch.arange(pair_P.numel(), device=pair_P.device))
        counts_E = torch.zeros(num_experts, dtype=torch.int64, device=pair_P.device)
        counts_E.scatter_add_(0, experts_P, torch.ones_like(experts_P))
        return cls(pair_P, pair_P // indices_TK.shape[1], place_P.view_as(indices_TK).sort(1).values, counts_E)

    def dispatch(self, x_TD: Tensor) -> Tensor:
        """[T, d] -> [T*K, d]: a token's row for each of its experts."""
        return _Dispatch.apply(x_TD, self.token_P, self.place_TK)

    def combine(self, y_PD: Tensor, dtype: torch.dtype) -> Tensor:
        """[T*K, d] -> [T, d]: the sum of a token's rows in `dtype`, added in expert order."""
        return _Combine.apply(y_PD, self.token_P, self.place_TK, dtype)


def _sum_rows(rows_PD: Tensor, place_TK: Tensor, dtype: torch.dtype) -> Tensor:
    return rows_PD[place_TK.flatten()].unflatten(0, place_TK.shape).sum(1, dtype=dtype)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, token_P, place_TK):
        ctx.save_for_backward(place_TK)
        return x_TD[token_P]

    @staticmethod
    def backward(ctx, grad_PD):  # type: ignore[override]
        (place_TK,) = ctx.saved_tensors
        wide = torch.promote_types(grad_PD.dtype, torch.float32)
        return _sum_rows(grad_PD, place_TK, wide).to(grad_PD.dtype), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_PD, token_P, place_TK, dtype):
        ctx.save_for_backward(token_P)
        ctx.dtype = y_PD.dtype
        return _sum_rows(y_PD, place_TK, dtype)

    @staticmethod
    def backward(ctx, grad_TD):  # type: ignore[override]
        (token_P,) = ctx.saved_tensors
        return grad_TD.to(ctx.dtype)[token_P], None, None, None
