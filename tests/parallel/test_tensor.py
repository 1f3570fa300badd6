"""The moves of tensor parallelism: an example block and the head, split over ranks, equal those on one."""

import functools

import pytest
import torch
import torch.distributed as dist

from megatron_dsv41.ops.head import blocked, ref
from megatron_dsv41.ops.head.ref import VocabularyPart
from megatron_dsv41.parallel.tensor import enter_site, fan_out, leave_site, max_parts, sum_parts, sum_replicated
from megatron_dsv41.testing.distributed import run_ranks

S, B, D, F = 4, 2, 3, 8


def weights():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in [(D, D), (F, D), (D, F), (S, B, D)]
    ]


def site(x, latent, up, down, group=None, sequence=False):
    """A replicated projection, then work that is split by inner width."""
    h = enter_site(x, group, sequence) @ latent.T
    part = torch.tanh(fan_out(h, group) @ up.T) @ down.T
    return leave_site(part, group, sequence)


def check_site(sequence):
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    latent, up, down, x = (w.requires_grad_() for w in weights())
    out = site(x, latent, up, down)
    weight = torch.arange(out.numel(), dtype=torch.float64).view_as(out)
    (out * weight).sum().backward()

    mine = slice(rank * S // size, (rank + 1) * S // size) if sequence else slice(None)
    inner = slice(rank * F // size, (rank + 1) * F // size)
    x_mine = x.detach()[mine].clone().requires_grad_()
    latent_mine = latent.detach().clone().requires_grad_()
    up_mine, down_mine = up.detach()[inner].clone().requires_grad_(), down.detach()[:, inner].clone().requires_grad_()
    part = site(x_mine, latent_mine, up_mine, down_mine, group, sequence)
    torch.testing.assert_close(part, out[mine])
    (part * weight[mine]).sum().backward()
    torch.testing.assert_close(x_mine.grad, x.grad[mine])
    torch.testing.assert_close(latent_mine.grad, latent.grad)
    torch.testing.assert_close(up_mine.grad, up.grad[inner])
    torch.testing.assert_close(down_mine.grad, down.grad[:, inner])
    assert sum_parts(torch.tensor(1.0 + rank), group).item() == size * (size + 1) / 2


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_split_site_equals_whole_site(size, sequence):
    run_ranks(check_site, size, sequence)


def check_losses(block):
    """On a rank: its rows of the vocabulary give the losses and gradients of the whole."""
    blocked.BLOCK = block
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, D, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(20, D, dtype=torch.float64, generator=generator).requires_grad_()
    labels, share = torch.arange(9) * 2, torch.linspace(0, 1, 9, dtype=torch.float64)
    whole = ref.losses(x, weight, labels)
    (whole * share).sum().backward()
    rows = slice(rank * 20 // size, (rank + 1) * 20 // size)
    part = VocabularyPart(
        rows.start, *(functools.partial(reduce, group=group) for reduce in (max_parts, sum_replicated))
    )
    for losses in (ref.losses, blocked.losses):
        x_mine, weight_mine = (t.detach().clone().requires_grad_() for t in (x, weight[rows]))
        found = losses(fan_out(x_mine, group), weight_mine, labels, part)
        torch.testing.assert_close(found, whole)
        (found * share).sum().backward()
        torch.testing.assert_close(x_mine.grad, x.grad)
        torch.testing.assert_close(weight_mine.grad, weight.grad[rows])


def test_losses_of_a_split_vocabulary():
    run_ranks(check_losses, 2, 3)


def test_one_process_moves_nothing():
    latent, up, down, x = weights()
    assert torch.equal(site(x, latent, up, down), torch.tanh(x @ latent.T @ up.T) @ down.T)
