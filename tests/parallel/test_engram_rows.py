"""Reading fetched rows is an embedding lookup, forward and backward, with and without recomputation."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_dsv41.ops.engram.rows import RowFormat
from megatron_dsv41.ops.engram.runs import Runs
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.parallel.engram_rows import FetchedRows, FetchedTable, RowGradients


class Arrived:
    def __init__(self, rows):
        self.rows, self.waits = rows, 0

    def wait(self):
        self.waits += 1
        return self.rows


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_is_a_lookup(dtype, recompute):
    torch.manual_seed(0)
    kind, form = getattr(torch, dtype), RowFormat(dtype, 8)
    values = torch.randn(50, 8).to(kind).float()
    ids_U = torch.tensor([3, 4, 9, 20, 49])
    source = Arrived(torch.cat([form.encode(values[ids_U]).flip(0), torch.zeros(1, form.width, dtype=torch.uint8)]))
    ops = Ops()
    gradients = RowGradients(ids_U, 8, ops)
    weight = values.to(kind).requires_grad_()
    expected_grad, rows = torch.zeros(50, 8), FetchedTable()
    for _ in range(3):  # micro-batches
        slots_TC = torch.randint(5, (7, 4))
        places_TC, runs = torch.arange(4, -1, -1)[slots_TC], Runs.of(slots_TC.flatten())
        fetched = FetchedRows(source, places_TC, form, kind, ops, gradients, runs)
        scale = torch.randn(7, 4, 8).to(kind)
        run = (lambda f: checkpoint(rows, f, use_reentrant=False)) if recompute else rows
        found = run(fetched)
        expected = torch.nn.functional.embedding(ids_U[slots_TC], weight)
        assert torch.equal(found, expected) and found.dtype is kind
        (found * scale).sum().backward()
        expected_grad.index_add_(0, ids_U[slots_TC].flatten(), scale.float().flatten(0, 1))
    torch.testing.assert_close(torch.zeros(50, 8).index_copy(0, ids_U, gradients.give()), expected_grad)
    assert gradients.sums_UD is None


def test_nothing_is_kept_where_no_gradient_is_asked():
    form, ids_U = RowFormat("float32", 8), torch.tensor([0, 1])
    source = Arrived(torch.randn(2, 8).view(torch.uint8))
    ops = Ops()
    gradients, places_TC = RowGradients(ids_U, 8, ops), torch.zeros(3, 2, dtype=torch.int64)
    with torch.no_grad():
        runs = Runs.of(places_TC.flatten())
        fetched = FetchedRows(source, places_TC, form, torch.float32, ops, gradients, runs)
        assert not fetched.read().requires_grad
    FetchedRows(source, places_TC, form, torch.float32, ops).read().sum().backward()
    assert gradients.sums_UD is None
