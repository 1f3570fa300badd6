"""Rows of tokens sorted by the expert they go to, and back: no sum depends on timing."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megatron_dsv41.ops.host_copy import HostCopy
from megatron_dsv41.ops.registry import Ops


@dataclasses.dataclass(frozen=True)
class Permutation:
    """(token, expert) pairs of a routing, sorted by expert, within an expert by token: all, or those of some experts.

    pair_P int64 [P]: t * K + k of every row. place_TK int64: rows of every token, by expert; first, -1 for each pair
    that has none. counts_E int64: rows of every expert. ops: who moves the rows.
    """

    pair_P: Tensor
    place_TK: Tensor
    counts_E: Tensor
    ops: Ops

    @classmethod
    def of(cls, indices_TK: Tensor, num_experts: int, ops: Ops) -> Permutation:
        """The permutation that sorts all of a routing's chosen experts int64 [T, k]."""
        experts_P = indices_TK.flatten()
        pair_P, place_P = _sorted(experts_P)
        return cls(pair_P, place_P.view_as(indices_TK).sort(1).values, _counted(experts_P, num_experts), ops)

    def dispatch(self, x_TD: Tensor) -> Tensor:
        """[T, d] -> [P, d]: a token's row for each of its experts."""
        return _Dispatch.apply(x_TD, self.place_TK, len(self.pair_P), self.ops)

    def combine(self, y_PD: Tensor, dtype: torch.dtype) -> Tensor:
        """[P, d] -> [T, d]: the sum of a token's rows in `dtype`, added in expert order; zeros where it has none."""
        return _Combine.apply(y_PD, self.place_TK, dtype, self.ops)


class PartOfPermutation:
    """The permutation of the pairs whose expert is one of a range, before the host knows how many there are.

    Making it waits for no device; `wait` does, for the number alone, which was asked for first.
    """

    def __init__(self, indices_TK: Tensor, experts: range, ops: Ops):
        pairs, size = indices_TK.flatten() - experts.start, len(experts)
        here = (pairs >= 0) & (pairs < size)
        experts_P = torch.where(here, pairs, size)  # the others come last
        self._counts_E, self._ops = _counted(experts_P, size + 1)[:size], ops
        self._rows = HostCopy(self._counts_E.sum())
        self._pairs, places = _sorted(experts_P)
        self._place_TK = torch.where(here, places, -1).view_as(indices_TK).sort(1).values

    def wait(self) -> Permutation:
        """It, with as many rows as there are such pairs."""
        return Permutation(self._pairs[: int(self._rows.wait())], self._place_TK, self._counts_E, self._ops)


def _sorted(experts_P: Tensor) -> tuple[Tensor, Tensor]:
    """The pair of every row, and the row of every pair."""
    pair_P = torch.argsort(experts_P, stable=True)
    place_P = torch.empty_like(pair_P).scatter_(0, pair_P, torch.arange(pair_P.numel(), device=pair_P.device))
    return pair_P, place_P


def _counted(experts_P: Tensor, num_experts: int) -> Tensor:
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=experts_P.device)
    return counts_E.scatter_add_(0, experts_P, torch.ones_like(experts_P))


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, place_TK, rows, ops):
        ctx.save_for_backward(place_TK)
        ctx.ops = ops
        return ops["routing.spread_rows"](x_TD, place_TK, rows, x_TD.dtype)

    @staticmethod
    def backward(ctx, grad_PD):  # type: ignore[override]
        (place_TK,) = ctx.saved_tensors
        return ctx.ops["routing.sum_rows"](grad_PD, place_TK, grad_PD.dtype), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_PD, place_TK, dtype, ops):
        ctx.save_for_backward(place_TK)
        ctx.ops, ctx.rows, ctx.dtype = ops, len(y_PD), y_PD.dtype
        return ops["routing.sum_rows"](y_PD, place_TK, dtype)

    @staticmethod
    def backward(ctx, grad_TD):  # type: ignore[override]
        (place_TK,) = ctx.saved_tensors
        return ctx.ops["routing.spread_rows"](grad_TD, place_TK, ctx.rows, ctx.dtype), None, None, None
