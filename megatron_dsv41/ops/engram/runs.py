"""Entries that share a table row, so that their gradients add up in one fixed order."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

LONG = 32  # entries; a longer run is summed by more than one thread at a time on GPUs


@dataclasses.dataclass(frozen=True)
class Runs:
    """How entries add up by row number: made once from the numbers (synchronises), used without a synchronisation.

    order_E: int64, the entries run by run, each run in the entries' own order. rows_M: int64, the distinct row numbers,
    ascending. begins: int64 [M + 1], where runs lie in `order_E`. long: int64, the runs of more than LONG entries.
    """

    order_E: Tensor
    rows_M: Tensor
    begins: Tensor
    long: Tensor

    @classmethod
    def of(cls, rows_E: Tensor) -> Runs:
        """From the row number of every entry, int64 [E]."""
        sorted_E, order_E = torch.sort(rows_E, stable=True)
        rows_M, lengths_M = torch.unique_consecutive(sorted_E, return_counts=True)
        begins = torch.cat([lengths_M.new_zeros(1), lengths_M.cumsum(0)])
        return cls(order_E, rows_M, begins, (lengths_M > LONG).nonzero()[:, 0])

    def among(self, rows_E: Tensor) -> Runs:
        """The same runs where entry e lies in row rows_E[e] of the values."""
        return dataclasses.replace(self, order_E=rows_E[self.order_E])
