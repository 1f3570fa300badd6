"""How large updates are: root mean square of what each logical matrix moved by, over the learning rate (SPEC 17)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_dsv41.optim.groups import ParameterGroup


@torch.no_grad()
def update_rms(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], groups: Sequence[ParameterGroup], lr: float
) -> dict[str, Tensor]:
    """Root mean square of one step per logical matrix, without weight decay, over its learning rate.

    before, after: whole parameters by native name around one step at rate `lr` (times each group's multiplier).
    Returns float32 [matrices] for every parameter of the groups that are not frozen; a table counts as one.
    """
    found: dict[str, Tensor] = {}
    for group in groups:
        rate = lr * group.lr
        for name in () if group.frozen else group.shapes:
            moved = after[name].float() - before[name].float() * (1 - rate * group.decay)
            found[name] = (moved / rate).reshape(group.matrices, -1).square().mean(1).sqrt()
    return found
