"""Where this rank's tensors lie in the whole model: what a checkpoint needs to be read in any layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from megatron_dsv41.backends.megatron.layout import Axis, Layout, cuts_of
from megatron_dsv41.backends.megatron.shadows import logical_state


def sharded_model(module: nn.Module, prefix: str, groups: ProcessGroupCollection, layout: Layout) -> dict[str, Any]:
    """Native name -> ShardedTensor of every parameter and persistent buffer of `module` but shadows."""
    return {
        prefix + name: _sharded(prefix + name, tensor, groups, layout) for name, tensor in logical_state(module).items()
    }


def _sharded(name: str, tensor: Tensor, groups: ProcessGroupCollection, layout: Layout) -> ShardedTensor:
    cuts = cuts_of(tensor)
    offsets = [(cut.dim, getattr(layout, cut.axis).rank, getattr(layout, cut.axis).size) for cut in cuts]
    if is_expert(tensor):
        replica = (0, 0, groups.expt_dp.rank())
    else:
        replica = (0, 0 if cuts else groups.tp.rank(), groups.dp_cp.rank())
    return ShardedTensor.from_rank_offsets(name, tensor, *offsets, replica_id=replica)


def is_expert(tensor: Tensor) -> bool:
    """The parameter belongs to routed experts whose gradients are reduced over the expert data-parallel group."""
    return not getattr(tensor, "allreduce", True)


def local_cut(shape: Sequence[int], like: Tensor, layout: Layout) -> tuple[slice, ...]:
    """Where this rank's part lies in a whole tensor of `shape` whose parameter here is `like`."""
    parts = [slice(0, size) for size in shape]
    for cut in cuts_of(like):
        axis: Axis = getattr(layout, cut.axis)
        size = axis.share(shape[cut.dim])
        parts[cut.dim] = slice(axis.rank * size, (axis.rank + 1) * size)
    return tuple(parts)


def local_part(tensor: Tensor, like: Tensor, layout: Layout) -> Tensor:
    """This rank's part of a whole tensor whose parameter is `like`."""
    return tensor[local_cut(tensor.shape, like, layout)]
