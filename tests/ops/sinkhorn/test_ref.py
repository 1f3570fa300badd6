"""The balanced update against a dense fp64 implementation that rewrites the matrix at every step."""

import pytest
import torch

from megatron_dsv41.ops.row_blocks import row_sparse
from megatron_dsv41.ops.sinkhorn.ref import Balance, sinkhorn_update


def sinkhorn_balance(update, **settings):
    """The balanced update of a whole table, from blocks of about three rows."""
    found = Balance(lambda rows: update[rows], tuple(update.shape), update, block_elements=25, **settings)
    return torch.cat([found.rows(block) for block in found.blocks]) if found.blocks else update


def plain_balance(update, steps=11, threshold=1e-3, eps=1e-20):
    u = update.double().clone()
    norms = u.norm(dim=1)
    u[norms <= threshold * norms.mean()] = 0
    for step in range(1, steps + 1):
        u = u / (u.norm(dim=1, keepdim=True) + eps) if step % 2 else u / (u.norm(dim=0, keepdim=True) + eps)
    return u.shape[1] ** 0.5 * u


def random_table(rows, cols, seed=0):
    """Rows of very different size, some empty, some below the threshold."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(rows, cols, generator=generator) * torch.rand(rows, 1, generator=generator) ** 3
    table[::5] = 0
    table[1::7] *= 1e-6
    return table


@pytest.mark.parametrize("rows,cols", [(40, 8), (7, 5), (5, 7), (33, 1), (129, 16)])
@pytest.mark.parametrize("steps", [0, 1, 2, 10, 11])
def test_is_the_dense_update(rows, cols, steps):
    table = random_table(rows, cols)
    found = sinkhorn_balance(table, steps=steps)
    expected = plain_balance(table, steps)
    assert (found.double() - expected).abs().max() <= 1e-6 * expected.abs().max()
    torch.testing.assert_close(sinkhorn_balance(table.double(), steps=steps), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e12])
def test_any_scale(scale):
    table = random_table(40, 8)
    found = sinkhorn_balance(table * scale, eps=0.0)
    assert (found - sinkhorn_balance(table, eps=0.0)).abs().max() < 1e-4


def test_rows_under_the_threshold_stay_untouched():
    table = random_table(40, 8)
    found = sinkhorn_balance(table)
    quiet = table.norm(dim=1) <= 1e-3 * table.norm(dim=1).mean()
    assert quiet.any() and not found[quiet].any()
    torch.testing.assert_close(found[~quiet].norm(dim=1), torch.full(((~quiet).sum(),), 8**0.5))


def test_an_empty_column_and_an_empty_table():
    table = random_table(40, 8)
    table[:, 3] = 0
    found = sinkhorn_balance(table)
    assert torch.isfinite(found).all() and not found[:, 3].any()
    assert not sinkhorn_balance(torch.zeros(6, 4)).any()


def test_row_shards_equal_the_whole():
    """Shards of unequal size, one of them empty: two passes that record and replay the sums."""
    table = random_table(41, 8)
    shards = [table[:13], table[13:13], table[13:]]
    whole = sinkhorn_balance(table)
    # A lock-step of generators would need threads: the sums of the whole are the reductions of the shards.
    sums = []
    sinkhorn_balance(table, reduce=lambda x: (sums.append(x), x)[1])
    for shard, begin in zip(shards, (0, 13, 13), strict=True):
        replay = iter(sums)
        found = sinkhorn_balance(shard, total_rows=41, reduce=lambda x, replay=replay: next(replay))
        torch.testing.assert_close(found, whole[begin : begin + len(shard)], rtol=1e-6, atol=1e-7)


def test_step_is_the_plain_step():
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(30, 6, generator=generator)
    momentum, plain, plain_momentum = torch.zeros(30, 6), weight.double(), torch.zeros(30, 6).double()
    for seed in range(4):
        grad = random_table(30, 6, seed)
        sinkhorn_update(weight, grad, momentum, lr=0.05)
        plain_momentum = 0.95 * plain_momentum + 0.05 * grad.double()
        plain = plain - 0.18 * 0.05 * plain_balance(0.95 * plain_momentum + 0.05 * grad.double())
    assert (weight.double() - plain).abs().max() < 1e-6


def test_bf16_momentum_rounds_only_what_is_kept():
    grad = random_table(30, 6)
    one, two, short = torch.zeros(30, 6), torch.zeros(30, 6), torch.zeros(30, 6, dtype=torch.bfloat16)
    sinkhorn_update(one, grad, torch.zeros(30, 6), lr=0.1)
    sinkhorn_update(two, grad, short, lr=0.1)
    assert torch.equal(one, two)


def test_row_sparse_gradient_is_its_dense_form(monkeypatch):
    monkeypatch.setattr("megatron_dsv41.ops.row_blocks.BLOCK_ELEMENTS", 64)  # ten rows of six
    grad, start = random_table(30, 6), random_table(30, 6, 1)
    ids = grad.any(1).nonzero()[:, 0]
    one, two, first, second = start.clone(), start.clone(), start * 0.1, start * 0.1
    sinkhorn_update(one, grad, first, lr=0.1)
    sinkhorn_update(two, row_sparse(ids, grad[ids], 30), second, lr=0.1)
    assert torch.equal(one, two) and torch.equal(first, second)
    empty = start.clone()
    sinkhorn_update(empty, row_sparse(ids[:0], grad[:0], 30), torch.zeros(30, 6), lr=0.1)
    assert torch.equal(empty, start)


def test_bf16_weight_is_rounded_once():
    grad, start = random_table(30, 6), random_table(30, 6, 1).bfloat16()
    wide, short = start.float(), start.clone()
    sinkhorn_update(wide, grad, torch.zeros(30, 6), lr=0.5)
    sinkhorn_update(short, grad, torch.zeros(30, 6), lr=0.5)
    assert torch.equal(short, wide.bfloat16()) and not torch.equal(short, start)


def test_no_buffer_of_the_tables_size(monkeypatch):
    """Peak memory beside the table and its momentum: some blocks and one scale per row, at any number of rows."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            views = ("aten::slice", "aten::view", "aten::detach", "aten::_indices", "aten::_values")
            if torch.is_tensor(out) and not func._schema.name.startswith(views) and not func._schema.is_mutable:
                self.numel = max(self.numel, out.numel())
            return out

    rows, cols, block = 4000, 16, 1024
    ids = torch.arange(0, rows, 100)
    grad = row_sparse(ids, torch.randn(len(ids), cols), rows)
    weight, momentum = torch.randn(rows, cols), torch.zeros(rows, cols)
    monkeypatch.setattr("megatron_dsv41.ops.row_blocks.BLOCK_ELEMENTS", block)
    with Largest() as seen:
        sinkhorn_update(weight, grad, momentum, lr=0.1)
    assert seen.numel == rows  # row scales; a block has 1024 elements, the table 64,000
