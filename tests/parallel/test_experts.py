"""Tokens to every rank and sums back to their owners: gradients of each other, exact where sums are."""

import pytest
import torch
import torch.distributed as dist

from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.parallel.experts import GatheredTokens, add_at_owners, gather_numbers
from megatron_dsv41.testing.distributed import run_ranks

T, D = 5, 3


def draw(rank, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def check_gather(dtype):
    """Parts of a gradient are added in fp32 in rank order, and rounded once."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x = draw(rank, T, D, dtype=dtype).requires_grad_()
    gathered = GatheredTokens(x, group, Ops()).wait()
    assert torch.equal(gathered, torch.cat([draw(r, T, D, dtype=dtype) for r in range(size)]))
    gathered.backward(draw(10 + rank, size * T, D, dtype=dtype))
    expected = torch.zeros(T, D)
    for r in range(size):
        expected = expected + draw(10 + r, size * T, D, dtype=dtype)[rank * T : (rank + 1) * T].float()
    assert x.grad.dtype == dtype and torch.equal(x.grad, expected.to(dtype))


def check_sum(dtype):
    """fp32 sums of parts in rank order; gradients cross in the dtype of the parts."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    parts = draw(rank, size * T, D, dtype=dtype).requires_grad_()
    own = add_at_owners(parts, group, torch.float32, Ops())
    expected = torch.zeros(T, D)
    for r in range(size):
        expected = expected + draw(r, size * T, D, dtype=dtype)[rank * T : (rank + 1) * T].float()
    assert own.dtype == torch.float32 and torch.equal(own, expected)
    own.backward(draw(10 + rank, T, D))
    assert torch.equal(parts.grad, torch.cat([draw(10 + r, T, D).to(dtype) for r in range(size)]))


def check_no_tokens():
    group, x = dist.group.WORLD, torch.empty(0, D, requires_grad=True)
    own = add_at_owners(GatheredTokens(x, group, Ops()).wait(), group, torch.float32, Ops())
    own.sum().backward()
    assert own.shape == x.grad.shape == (0, D)


def check_numbers():
    rank, size = dist.get_rank(), dist.get_world_size()
    found = gather_numbers(torch.full((2, 1), rank), dist.group.WORLD)
    assert found.flatten().tolist() == [r for r in range(size) for _ in range(2)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("check", [check_gather, check_sum])
def test_moves(check, dtype, size):
    run_ranks(check, size, dtype)


def test_numbers():
    run_ranks(check_numbers, 3)


def test_no_tokens():
    run_ranks(check_no_tokens, 2)
