"""Work on large tables a few rows at a time, so that no second buffer of a table's size exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 25  # of one block: 128 MiB in float32


def row_blocks(rows: int, cols: int, elements: int | None = None) -> Iterator[slice]:
    """Consecutive slices of at most `elements` (default BLOCK_ELEMENTS) elements, at least one row each."""
    step = max(1, (elements or BLOCK_ELEMENTS) // max(cols, 1))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


def gradient_rows(grad: Tensor) -> Callable[[slice], Tensor]:
    """A function that gives rows [begin, end) of a gradient [rows, cols] as a dense tensor.

    A row-sparse gradient is a coalesced COO tensor with one sparse dimension; what it does not name is zero. Its ids
    come to the host once, not once per block.
    """
    if grad.layout is not torch.sparse_coo:
        return lambda rows: grad[rows]
    ids, values = grad.indices()[0].cpu(), grad.values()

    def read(rows: slice) -> Tensor:
        first, last = torch.searchsorted(ids, torch.tensor([rows.start, rows.stop])).tolist()
        block = values.new_zeros(rows.stop - rows.start, *values.shape[1:])
        here = (ids[first:last] - rows.start).to(values.device)
        return block.index_copy_(0, here, values[first:last])

    return read


def row_sparse(ids: Tensor, values: Tensor, rows: int) -> Tensor:
    """The gradient [rows, cols] that is `values` [n, cols] at ascending, distinct `ids` int64 [n], 0 elsewhere."""
    shape = (rows, *values.shape[1:])
    return torch.sparse_coo_tensor(ids[None], values, shape, is_coalesced=True, check_invariants=False)
