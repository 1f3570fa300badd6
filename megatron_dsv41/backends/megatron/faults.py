"""A loss or gradient that is not a finite number stops training before it reaches the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_dsv41.backends.megatron import checkpoints

_NONE = 1 << 62
_IN_GRADIENT = 1 << 48
_RANK = 1 << 24


class NonFiniteLoss(RuntimeError):
    """Training stopped; the message says where the number came from and what is kept."""


class FaultCheck:
    """Collects the micro-batch losses of a step and looks at them once, with one synchronisation per step."""

    def __init__(self, folder: str):
        self.folder = folder
        self.losses: list[tuple[int, Tensor]] = []

    def add(self, loss: Tensor, micro_batch: int) -> None:
        """Remember the loss of one micro-batch of this rank."""
        self.losses.append((micro_batch, loss.detach()))

    def check(self, step: int, chunks: list[Any], more: Sequence[Tensor] = ()) -> None:
        """Raise NonFiniteLoss on every rank when any saw one, in `more` gradients too. Collective over the world."""
        code = torch.full((), _NONE, dtype=torch.int64, device="cuda")
        rank = torch.distributed.get_rank()
        for micro_batch, loss in reversed(self.losses):
            code = torch.where(torch.isfinite(loss), code, rank * _RANK + micro_batch)
        # A sum shows any NaN or infinity in one pass over the buffer.
        sums = [b.grad_data.sum() for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        sums += [gradient.sum() for gradient in more]
        if sums:
            finite = torch.isfinite(torch.stack([s.float() for s in sums])).all()
            code = torch.minimum(code, torch.where(finite, _NONE, _IN_GRADIENT + rank * _RANK))
        self.losses.clear()
        torch.distributed.all_reduce(code, op=torch.distributed.ReduceOp.MIN)
        if (found := int(code)) != _NONE:
            raise NonFiniteLoss(self._message(step, found))

    def _message(self, step: int, code: int) -> str:
        in_gradient, place = divmod(code, _IN_GRADIENT)
        rank, micro_batch = divmod(place, _RANK)
        where = (
            f"a gradient of rank {rank} is not finite although every loss is"
            if in_gradient
            else f"the loss of rank {rank}, micro-batch {micro_batch} is not a finite number"
        )
        steps = checkpoints.complete_steps(self.folder)
        kept = (
            f"step {steps[-1]} in {self.folder} is the last good checkpoint" if steps else "no checkpoint was saved yet"
        )
        return f"step {step}: {where}; training stopped before the update, {kept}"
