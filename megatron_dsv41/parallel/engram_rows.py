"""Rows of one Engram table as a layer meets them: fetched earlier, read locally, gradients kept for the owners."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron_dsv41.ops.engram.rows import RowFormat
from megatron_dsv41.parallel.engram import Merge


class RowSource(Protocol):
    """Where fetched rows arrive."""

    def wait(self) -> Tensor:
        """uint8 [places, width]: rows at the places that were agreed on. Blocks or makes the stream wait."""
        ...


class RowGradients:
    """The summed gradient of every row of one table that a step reads: fp32 [rows, dim], in order of the ids.

    Micro-batches are added as their backward passes come, which in every schedule is one fixed order.
    """

    def __init__(self, ids_U: Tensor, dim: int):
        self.ids_U, self.dim = ids_U, dim
        self.sums_UD: Tensor | None = None  # made by the first backward: a forward pass needs none

    def add(self, merge: Merge, grads_ED: Tensor) -> None:
        """Add the gradients of one micro-batch; merge: entries -> places in `ids_U`."""
        merged = merge(grads_ED)
        self.take().index_add_(0, merge.rows_M, merged.to(torch.float32))  # distinct rows: no order to depend on

    def take(self) -> Tensor:
        """The sums so far."""
        if self.sums_UD is None:
            self.sums_UD = torch.zeros(len(self.ids_U), self.dim, dtype=torch.float32, device=self.ids_U.device)
        return self.sums_UD


@dataclasses.dataclass(frozen=True)
class FetchedRows:
    """What a micro-batch reads of one table: `Batch.engram_rows[layer]` where tables are owned by a group.

    slots_TC int64 [T, columns] into `places_U`, the places of rows in `source`. gradients None: of an evaluation, or of
    a rank whose tokens another rank has too and returns.
    """

    source: RowSource
    places_U: Tensor
    slots_TC: Tensor
    format: RowFormat
    dtype: torch.dtype
    gradients: RowGradients | None = None
    merge: Merge | None = None

    def read(self) -> Tensor:
        """[T, columns, dim], bitwise the owners' rows in `dtype`."""
        anchor = torch.zeros((), dtype=self.dtype, device=self.slots_TC.device, requires_grad=torch.is_grad_enabled())
        return _Read.apply(anchor, self)


class _Read(torch.autograd.Function):
    """The anchor makes autograd come back: rows themselves are no leaves, their gradients go to `RowGradients`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, fetched: FetchedRows) -> Tensor:
        ctx.fetched = fetched
        places_E = fetched.places_U[fetched.slots_TC.flatten()]
        rows_EW = fetched.source.wait().index_select(0, places_E)
        return fetched.format.decode(rows_EW, fetched.dtype).view(*fetched.slots_TC.shape, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        fetched: FetchedRows = ctx.fetched
        if fetched.gradients is not None:
            assert fetched.merge is not None
            fetched.gradients.add(fetched.merge, grads[0].flatten(0, 1))
        return None, None


class FetchedTable(nn.Module):
    """The Engram table of a layer whose rows have owners: no parameters, it reads what was fetched."""

    def forward(self, fetched: FetchedRows) -> Tensor:
        """-> [T, columns, dim]."""
        return fetched.read()
