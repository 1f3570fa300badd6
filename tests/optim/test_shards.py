"""An update of a part is the part of the update, over real process groups."""

import pytest
import torch
import torch.distributed as dist

from megatron_dsv41.ops.sinkhorn.ref import Balance
from megatron_dsv41.optim.muon import muon_direction
from megatron_dsv41.optim.shards import Shard, matrix_view, on_whole_matrices, sum_over
from megatron_dsv41.testing.distributed import run_ranks


class Group:
    """Stands for a process group of a given size where nothing is sent."""

    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size


def test_cuts_between_matrices_need_no_gathering():
    two = Group(2)
    assert matrix_view((8, 5), 4, [Shard(0, two)]).gather == ()  # four of eight rows per head: heads 0-1 here
    assert matrix_view((3, 2, 7, 5), 12, [Shard(0, two)]).gather == ()  # experts
    view = matrix_view((3, 2, 7, 5), 12, [Shard(0, two), Shard(2, two)])
    assert (view.rows, view.cols, view.split) == (7, 5, 1)
    assert [shard.dim for shard in view.gather] == [1]


def test_cuts_inside_matrices():
    two = Group(2)
    view = matrix_view((6, 5), 1, [Shard(0, two)])
    assert (view.rows, view.cols, view.split, view.gather[0].dim) == (6, 5, 1, 1)
    view = matrix_view((6, 5), 3, [Shard(0, two)])  # 12 rows in matrices of 4: the cut goes through the second
    assert (view.rows, view.split, view.gather[0].dim) == (6, 3, 1)
    view = matrix_view((6, 5), 3, [Shard(1, two)])
    assert (view.rows, view.cols, view.split, view.gather[0].dim) == (2, 5, 1, 2)


def test_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"\[10, 5\] is not a stack of 4 matrices"):
        matrix_view((10, 5), 4)
    with pytest.raises(ValueError, match="not a stack of 3"):
        matrix_view((3, 2, 7, 5), 3)


CASES = [
    # whole shape, matrices, cut dimensions
    ((8, 6), 1, (0,)),
    ((8, 6), 1, (1,)),
    ((16, 6), 4, (0,)),
    ((12, 6), 3, (0,)),
    ((12, 8), 3, (1,)),
    ((4, 2, 6, 5), 8, (0,)),
    ((4, 2, 6, 5), 8, (2,)),
    ((4, 6, 8), 4, (2,)),
    ((4, 2, 6, 8), 8, (0, 2)),
    ((4, 6, 8), 4, (0, 2)),
]


def balanced(update, **settings):
    found = Balance(lambda rows: update[rows], tuple(update.shape), update, block_elements=25, **settings)
    return torch.cat([found.rows(block) for block in found.blocks])


def check_directions():
    """On a rank: every case over the world, or over a grid of two axes where two dimensions are cut."""
    world, rank = dist.get_world_size(), dist.get_rank()
    grid = (
        [dist.new_group([i, i + 1]) for i in range(0, world, 2)],
        [dist.new_group([i, i + 2]) for i in range(2)] if world == 4 else [],
    )
    worst = 0.0
    for number, (shape, matrices, dims) in enumerate(CASES):
        if len(dims) == 2 and world != 4:
            continue
        groups = [dist.group.WORLD] if len(dims) == 1 else [grid[0][rank // 2], grid[1][rank % 2]]
        if any(shape[dim] % group.size() for dim, group in zip(dims, groups, strict=True)):
            continue
        update = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        expected = muon_direction(update.view(matrices, -1, shape[-1])).view(shape)
        shards = [Shard(dim, group) for dim, group in zip(dims, groups, strict=True)]
        part = update
        for shard in shards:
            part = part.chunk(shard.group.size(), shard.dim)[shard.group.rank()]
            expected = expected.chunk(shard.group.size(), shard.dim)[shard.group.rank()]
        found = on_whole_matrices(part, matrix_view(tuple(part.shape), matrices, shards), muon_direction)
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    table = torch.randn(37, 6, generator=torch.Generator().manual_seed(9))
    begin, end = 37 * rank // world, 37 * (rank + 1) // world
    found = balanced(table[begin:end], total_rows=37, reduce=sum_over([dist.group.WORLD]))
    torch.testing.assert_close(found, balanced(table)[begin:end], rtol=1e-6, atol=1e-6)
    return worst


@pytest.mark.ranks(4)
@pytest.mark.parametrize("world", [2, 4])
def test_a_part_of_the_update_is_the_update_of_the_part(world):
    assert max(run_ranks(check_directions, world)) < 1e-6
