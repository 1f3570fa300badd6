"""Rows of one Engram table as a layer meets them: fetched earlier, read locally, gradients kept for the owners."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron_dsv41.ops.engram.rows import RowFormat
from megatron_dsv41.ops.engram.runs import Runs
from megatron_dsv41.ops.registry import Ops


class RowSource(Protocol):
    """Where fetched rows arrive."""

    def wait(self) -> Tensor:
        """uint8 [places, width]: rows at the places that were agreed on. Blocks or makes the stream wait."""
        ...


class RowGradients:
    """The summed gradient of every row of one table that a step reads: fp32 [rows, dim], in order of the ids.

    Micro-batches are added as their backward passes come, which in every schedule is one fixed order.
    """

    def __init__(self, ids_U: Tensor, dim: int, ops: Ops):
        self.ids_U, self.dim, self.ops = ids_U, dim, ops
        self.sums_UD: Tensor | None = None  # made by the first backward: a forward pass needs none

    def add(self, runs: Runs, grads_ED: Tensor) -> None:
        """Add the gradients of one micro-batch; runs: entries -> places in `ids_U`."""
        self.ops["engram.merge"](grads_ED, runs, into=self.take())

    def take(self) -> Tensor:
        """The sums so far."""
        if self.sums_UD is None:
            self.sums_UD = torch.zeros(len(self.ids_U), self.dim, dtype=torch.float32, device=self.ids_U.device)
        return self.sums_UD

    def give(self) -> Tensor:
        """The sums, which are the caller's from now on."""
        sums_UD, self.sums_UD = self.take(), None
        return sums_UD


@dataclasses.dataclass(frozen=True)
class FetchedRows:
    """What a micro-batch reads of one table: `Batch.engram_rows[layer]` where tables are owned by a group.

    places_TC int64 [T, columns]: places of rows in `source`. gradients, and runs of entries among them, None: of an
    evaluation, or of a rank whose tokens another rank has too and returns.
    """

    source: RowSource
    places_TC: Tensor
    format: RowFormat
    dtype: torch.dtype
    ops: Ops
    gradients: RowGradients | None = None
    runs: Runs | None = None

    def read(self) -> Tensor:
        """[T, columns, dim], bitwise the owners' rows in `dtype`."""
        anchor = torch.zeros((), dtype=self.dtype, device=self.places_TC.device, requires_grad=torch.is_grad_enabled())
        return _Read.apply(anchor, self)


class _Read(torch.autograd.Function):
    """The anchor makes autograd come back: rows themselves are no leaves, their gradients go to `RowGradients`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, fetched: FetchedRows) -> Tensor:
        ctx.fetched = fetched
        rows_PW, places_TC = fetched.source.wait(), fetched.places_TC
        rows_ED = fetched.ops["engram.read_rows"](rows_PW, places_TC.flatten(), fetched.format, fetched.dtype)
        return rows_ED.view(*places_TC.shape, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        fetched: FetchedRows = ctx.fetched
        if fetched.gradients is not None:
            assert fetched.runs is not None
            fetched.gradients.add(fetched.runs, grads[0].flatten(0, 1))
        return None, None


class FetchedTable(nn.Module):
    """The Engram table of a layer whose rows have owners: no parameters, it reads what was fetched."""

    def forward(self, fetched: FetchedRows) -> Tensor:
        """-> [T, columns, dim]."""
        return fetched.read()
