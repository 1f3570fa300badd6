"""Shadow indexers of pipeline stages: one logical parameter with their owner's.

A selection has no gradient, so a shadow adds nothing to its owner's. The owner alone has a gradient, an entry in the
optimizer and a place in checkpoints; the copies follow it: after initialisation, after loading, after every step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_dsv41.backends.megatron.pipeline import Boundaries

PREFIX = "shadows."
WEIGHT = "wq_b.weight"


def logical_state(stage: nn.Module) -> dict[str, Tensor]:
    """Native name -> parameter or persistent buffer of a stage, without its shadows."""
    state = stage.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if not name.startswith(PREFIX)}


def shadow_pairs(boundaries: Boundaries) -> Iterator[tuple[int, int, int]]:
    """(layer, stage of the owner, stage of the shadow) of the whole pipeline, in one order on every rank."""
    for number in range(1, len(boundaries.stages)):
        crossing = boundaries.before(number)
        for layer in crossing.shadows if crossing else ():
            owner = next(stage for stage, layers in enumerate(boundaries.stages) if layer in layers)
            yield layer, owner, number


@torch.no_grad()
def follow_owners(stages: Sequence[Any], group: ProcessGroup) -> None:
    """Give every shadow on the stages (DSV41Model) of this rank the weight of its owner. Collective over `group`."""
    here = {stage.number: stage for stage in stages}
    for layer, owner, shadow in shadow_pairs(stages[0].boundaries):
        source = here[owner].get_parameter(f"layers.{layer}.attn.indexer.{WEIGHT}") if owner in here else None
        target = here[shadow].get_parameter(f"{PREFIX}{layer}.{WEIGHT}") if shadow in here else None
        if source is not None and target is not None:
            target.copy_(source)
        elif source is not None:
            dist.send(source.detach(), dist.get_global_rank(group, shadow % group.size()), group)
        elif target is not None:
            dist.recv(target.detach(), dist.get_global_rank(group, owner % group.size()), group)


def follow_after_steps(optimizer: Any, stages: Sequence[Any], group: ProcessGroup) -> Any:
    """The optimizer, whose `step` ends with `follow_owners`; itself where the pipeline has no shadows."""
    if not any(shadow_pairs(stages[0].boundaries)):
        return optimizer
    stock = optimizer.step

    @functools.wraps(stock)
    def step(*args: Any, **kwargs: Any) -> Any:
        found = stock(*args, **kwargs)
        follow_owners(stages, group)
        return found

    optimizer.step = step
    return optimizer
