"""Contiguous shards of a sequence: halos from the left neighbour, gathers of compressed entries.

`group` orders the shards by rank; None means that the sequence is whole. Values cross bit-exactly in their own dtype,
gradients are summed in theirs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def _exchange(send: Tensor | None, to: int, receive: Tensor | None, source: int, group: ProcessGroup) -> None:
    """One message each way with neighbours inside the group; None: no such neighbour."""
    operations = []
    if send is not None:
        operations.append(dist.P2POp(dist.isend, send, dist.get_global_rank(group, to), group))
    if receive is not None:
        operations.append(dist.P2POp(dist.irecv, receive, dist.get_global_rank(group, source), group))
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()


class _LeftHalo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, rows: int, group: ProcessGroup) -> Tensor:
        rank, size = group.rank(), group.size()
        ctx.rows, ctx.group = rows, group
        halo = x_TD.new_zeros(rows, *x_TD.shape[1:])
        last = rank == size - 1
        _exchange(None if last else x_TD[-rows:].contiguous(), rank + 1, halo if rank else None, rank - 1, group)
        return torch.cat([halo, x_TD])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad, rows, group = grads[0], ctx.rows, ctx.group
        rank, size = group.rank(), group.size()
        own, returned = grad[rows:].clone(), grad.new_zeros(rows, *grad.shape[1:])
        last = rank == size - 1
        _exchange(grad[:rows].contiguous() if rank else None, rank - 1, None if last else returned, rank + 1, group)
        own[-rows:] += returned
        return own, None, None


def left_halo(x_TD: Tensor, rows: int, group: ProcessGroup | None) -> Tensor:
    """[T, ...] -> [rows + T, ...]: the left neighbour's last rows in front; zeros on the first shard.

    Needs T >= rows on every shard, so that one neighbour holds the whole halo. The gradient of the halo returns to
    where it came from. With group None, or rows 0, the input unchanged.
    """
    if group is None or rows == 0:
        return x_TD
    if x_TD.shape[0] < rows:
        raise ValueError(f"a sequence shard of {x_TD.shape[0]} tokens cannot give a halo of {rows}: use fewer shards")
    return _LeftHalo.apply(x_TD, rows, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        group = ctx.group
        grad = grads[0].contiguous()
        own = grad.new_empty(grad.shape[0] // group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad, group=group)
        return own, None


def gather_shards(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """[c, ...] of every shard -> [shards * c, ...] in shard order; gradients are summed back to each shard."""
    return x if group is None else _Gather.apply(x, group)


def sum_shards(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum over the shards, without gradient."""
    if group is None:
        return x
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total
