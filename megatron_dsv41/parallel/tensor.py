"""Tensor parallelism as four moves at the edges of a site. `group` None means one process.

Between sites tokens are whole on every process, or cut along the first axis where `sequence` is set. Inside a site
every process sees all tokens and computes its share of the heads or of the inner width: a part of a sum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def _summed(x: Tensor, group: ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    whole = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


class _FanOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherTokens(torch.autograd.Function):
    """All-gather forward. Every process then has the whole gradient: backward keeps this process's tokens of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.group.size())[ctx.group.rank()].contiguous(), None


class _KeepPart(torch.autograd.Function):
    """The inverse of `_GatherTokens`, for values and for gradients that are whole on every process."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.chunk(group.size())[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.group), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        own = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
        dist.reduce_scatter_tensor(own, x.contiguous(), group=group)
        return own

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.group), None


def fan_out(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Identity forward; backward sums the gradient over the processes that used `x` for their share."""
    return x if group is None else _FanOut.apply(x, group)


def enter_site(x_SBD: Tensor, group: ProcessGroup | None, sequence: bool) -> Tensor:
    """Tokens as kept between sites -> all tokens [s, b, d]. What happens inside must give equal gradients everywhere:
    sharded work takes its input through `fan_out`."""
    return gather_copies(x_SBD, group) if sequence else x_SBD


def keep_part(x: Tensor, group: ProcessGroup) -> Tensor:
    """A replicated tensor with a replicated gradient -> this process's equal part of its first axis."""
    return _KeepPart.apply(x, group)


def gather_copies(part: Tensor, group: ProcessGroup | None) -> Tensor:
    """Inverse of `keep_part`: what follows must give equal gradients on every process."""
    return part if group is None else _GatherTokens.apply(part, group)


def leave_site(part_SBD: Tensor, group: ProcessGroup | None, sequence: bool) -> Tensor:
    """This process's part of a site's output, all tokens -> the sum, as tokens are kept between sites."""
    if group is None:
        return part_SBD
    return _ScatterSum.apply(part_SBD, group) if sequence else _Sum.apply(part_SBD, group)


def sum_parts(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum over the processes, without gradient."""
    return x if group is None else _summed(x.detach(), group)


def max_parts(x: Tensor, group: ProcessGroup) -> Tensor:
    """Elementwise maximum over the processes, without gradient."""
    largest = x.detach().clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest


def sum_replicated(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the processes, of which every process makes the same loss: the gradient comes back unchanged."""
    return _Sum.apply(x, group)
