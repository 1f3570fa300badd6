"""Where this rank's tensors lie in the whole model: what a checkpoint needs to be read in any layout."""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn


def sharded_model(module: nn.Module, prefix: str, groups: ProcessGroupCollection) -> dict[str, Any]:
    """Native name -> ShardedTensor of every parameter and persistent buffer of `module`."""
    replica = (0, groups.tp.rank(), groups.dp_cp.rank())
    return {
        prefix + name: ShardedTensor.from_rank_offsets(prefix + name, tensor, replica_id=replica)
        for name, tensor in module.state_dict(keep_vars=True).items()
    }
