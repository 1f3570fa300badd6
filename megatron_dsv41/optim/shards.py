"""Updates of logical matrices of which a process holds a part: the result does not depend on the layout.

Matrices are gathered, orthogonalized whole and cut again; balanced tables reduce their sums instead. `group` None, or a
part that holds whole matrices, needs no communication.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Shard:
    """Dimension `dim` of a tensor is cut into equal contiguous parts over the ranks of `group`."""

    dim: int
    group: ProcessGroup


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """A local tensor as [stack, rows, cols], and what must be gathered before its matrices are whole.

    gather: the axes of the view that are cut. split: logical matrices along the rows once these are gathered.
    """

    rows: int
    cols: int
    gather: tuple[Shard, ...] = ()
    split: int = 1


def matrix_view(local_shape: Shape, matrices: int, shards: Sequence[Shard] = ()) -> MatrixView:
    """The view of a tensor whose whole form is a stack of `matrices` equal matrices along its leading axes.

    In a 2-D tensor they follow each other along the rows; in a higher one the leading axes count them. A cut between
    matrices (experts, heads) needs no gathering. Raises ValueError when the sizes do not fit.
    """
    whole, last = list(local_shape), len(local_shape) - 1
    for shard in shards:
        whole[shard.dim] *= shard.group.size()
    height, remainder = divmod(math.prod(whole[:-1]), matrices)
    if remainder or (last > 1 and height != whole[-2]):
        raise ValueError(f"a tensor {whole} is not a stack of {matrices} matrices")
    inside = [Shard(shard.dim - last + 2, shard.group) for shard in shards if shard.dim >= last - 1]
    if last == 1 and local_shape[0] % height == 0:
        inside = [shard for shard in inside if shard.dim == 2]
        return MatrixView(height, local_shape[1], tuple(inside))
    return MatrixView(local_shape[-2], local_shape[-1], tuple(inside), split=matrices if last == 1 else 1)


def on_whole_matrices(update: Tensor, view: MatrixView, direction: Callable[[Tensor], Tensor]) -> Tensor:
    """`direction` of the whole logical matrices, and this process's part of it, in the shape of `update`.

    direction: [..., rows, cols] -> the same shape, each matrix by itself. Collective over the groups of the view.
    """
    whole = update.reshape(-1, view.rows, view.cols)
    for shard in view.gather:
        whole = gather(whole, shard)
    found = direction(whole.unflatten(1, (view.split, -1))).flatten(1, 2)
    for shard in reversed(view.gather):
        found = found.chunk(shard.group.size(), shard.dim)[shard.group.rank()]
    return found.reshape(update.shape)


def gather(part: Tensor, shard: Shard) -> Tensor:
    """All parts along the shard's dimension, in rank order."""
    size = shard.group.size()
    parts = part.new_empty(size, *part.shape)
    dist.all_gather_into_tensor(parts.view(-1, *part.shape[1:]), part.contiguous(), group=shard.group)
    return torch.cat(parts.unbind(0), shard.dim)


def sum_over(groups: Sequence[ProcessGroup]) -> Callable[[Tensor], Tensor]:
    """A function that adds a tensor up over the ranks of every group in turn. Collective."""

    def reduce(x: Tensor) -> Tensor:
        total = x.clone()
        for group in groups:
            dist.all_reduce(total, group=group)
        return total

    return reduce
