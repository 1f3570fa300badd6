"""Tokens of a group of ranks to all of them, and what each rank has for those tokens back to their owners.

Every rank has equally many tokens. Rows cross in their own dtype and are added in fp32, in the order of the ranks: no
sum depends on timing. The two moves are each other's gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dsv41.ops.registry import Ops


class GatheredTokens:
    """Rows [T, ...] of every rank on their way to all: [ranks * T, ...] in rank order.

    Making it starts the exchange; work that is queued until `wait` runs beside it. A gradient of these rows, of which
    every rank has a part, is added up at the rows' owners.
    """

    def __init__(self, x_TD: Tensor, group: ProcessGroup, ops: Ops):
        self._x_TD, self._group, self._ops = x_TD, group, ops
        self._all, self._work = _gathered(x_TD.detach(), group)

    def wait(self) -> Tensor:
        """The rows. Once: they are the caller's from then on."""
        gathered, self._work = _finished(self._all, self._work), None
        del self._all
        return _Gather.apply(self._x_TD, gathered, self._group, self._ops)


def gather_numbers(x: Tensor, group: ProcessGroup) -> Tensor:
    """[T, ...] of every rank -> [ranks * T, ...] in rank order, without gradient."""
    return _finished(*_gathered(x, group))


def add_at_owners(parts_TD: Tensor, group: ProcessGroup, dtype: torch.dtype, ops: Ops) -> Tensor:
    """This rank's part for the tokens of all, [ranks * T, d] -> the sum of all parts for its own tokens, [T, d].

    The sum is in `dtype`; its gradient crosses in the dtype of the parts.
    """
    return _AddAtOwners.apply(parts_TD, group, dtype, ops)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, gathered: Tensor, group: ProcessGroup, ops: Ops) -> Tensor:
        ctx.group, ctx.ops = group, ops
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _added(grads[0], ctx.group, grads[0].dtype, ctx.ops), None, None, None


class _AddAtOwners(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts_TD: Tensor, group: ProcessGroup, dtype: torch.dtype, ops: Ops) -> Tensor:
        ctx.group, ctx.dtype = group, parts_TD.dtype
        return _added(parts_TD, group, dtype, ops)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return gather_numbers(grads[0].to(ctx.dtype), ctx.group), None, None, None


def _gathered(x: Tensor, group: ProcessGroup) -> tuple[Tensor, Any]:
    whole = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    return whole, dist.all_gather_into_tensor(whole, x.contiguous(), group=group, async_op=True)


def _finished(whole: Tensor, work: Any) -> Tensor:
    work.wait()
    return whole


def _added(parts_TD: Tensor, group: ProcessGroup, dtype: torch.dtype, ops: Ops) -> Tensor:
    received = torch.empty_like(parts_TD, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts_TD.contiguous(), group=group)
    ranks = group.size()
    place_TR = torch.arange(len(received), device=received.device).view(ranks, len(received) // ranks).T
    return ops["routing.sum_rows"](received, place_TR, dtype)
