"""How the CUDA site deals out work. The kernels themselves: test_triton_site.py on a card, test_compile.py without."""

import pytest
import torch

from megatron_dsv41.ops.mhc import hopper_site

SITES = (hopper_site.FORWARD_BLOCKS, hopper_site.BACKWARD_BLOCKS)


@pytest.fixture(autouse=True)
def multiprocessors(monkeypatch):
    monkeypatch.setattr(hopper_site, "_multiprocessors", lambda device: 132)


def grid_of(tokens: int, dim: int, blocks: int) -> hopper_site.Grid:
    return hopper_site.Grid.of_site(torch.empty(tokens, 4, dim, device="meta"), blocks)


@pytest.mark.parametrize("blocks", SITES)
@pytest.mark.parametrize("dim", [64, 512, 5120, 8192, 65536])
@pytest.mark.parametrize("tokens", [1, 127, 1000, 4001, 4096, 16384])
def test_every_round_is_somebodys_and_those_left_do_not_take_longest(tokens: int, dim: int, blocks: int):
    grid, rounds = grid_of(tokens, dim, blocks), -(-tokens // 64)
    assert grid.chunks == -(-dim // (64 * blocks))
    assert grid.chunks * grid.shares <= max(132, grid.chunks)
    assert grid.limit % grid.shares == 0
    each = grid.limit // grid.shares
    assert each <= -(-rounds // grid.shares)
    if grid.limit >= rounds:
        assert grid.ctas == grid.chunks * grid.shares
    else:
        assert grid.ctas == grid.chunks * (grid.shares + 1)
        free = 132 - grid.chunks * grid.shares
        assert -(-grid.chunks // free) * (rounds - grid.limit + 1) <= each


@pytest.mark.parametrize(
    ("tokens", "blocks", "before", "now"), [(4096, 2, 22, 20), (4096, 4, 11, 10), (16384, 4, 43, 40)]
)
def test_multiprocessors_without_a_share_shorten_the_others(tokens: int, blocks: int, before: int, now: int):
    grid = grid_of(tokens, 5120, blocks)
    assert -(-tokens // 64 // grid.shares) == before
    assert grid.limit // grid.shares == now


def test_the_gradient_of_fn_uses_more_of_its_places():
    grid = hopper_site.Grid.over(4096, 40, 2 * 132)
    assert (grid.shares, grid.limit, grid.ctas) == (6, 60, 280)  # ten rounds each, where eleven were
