"""The balanced update against a dense fp64 implementation that rewrites the matrix at every step."""

import pytest
import torch

from megatron_dsv41.optim.sinkhorn import sinkhorn_balance, sinkhorn_update


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
        sinkhorn_update(weight, grad, momentum, sinkhorn_balance, lr=0.05)
        plain_momentum = 0.95 * plain_momentum + 0.05 * grad.double()
        plain = plain - 0.18 * 0.05 * plain_balance(0.95 * plain_momentum + 0.05 * grad.double())
    assert (weight.double() - plain).abs().max() < 1e-6


def test_bf16_momentum_rounds_only_what_is_kept():
    grad = random_table(30, 6)
    one, two, short = torch.zeros(30, 6), torch.zeros(30, 6), torch.zeros(30, 6, dtype=torch.bfloat16)
    sinkhorn_update(one, grad, torch.zeros(30, 6), sinkhorn_balance, lr=0.1)
    sinkhorn_update(two, grad, short, sinkhorn_balance, lr=0.1)
    assert torch.equal(one, two)
