"""Parameter groups: which parameters decay, by name (SPEC 17), and one dtype per group.

Megatron's own rule goes by shape and would not decay norms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron_dsv41.run_config import Run

# Sinks, mHC offsets and gains, lookup tables and the head do not decay; matrices and RMSNorm weights do.
NO_DECAY = (".attn_sink", "_hc.base", "_hc.scale", "embed.weight", "head.weight")


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter of this native name (a wrapper's prefix does not matter)."""
    return not name.endswith(NO_DECAY)


def group_overrides(run: Run) -> dict[Any, Any]:
    """Megatron's parameter-group overrides of a run."""
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate, ParamWithNamePredicate
    from megatron.core.optimizer_param_scheduler import ParamGroupOverride

    def no_decay(parameter: nn.Parameter, name: str) -> bool:
        return not decays(name)

    def stays_fp32(parameter: nn.Parameter) -> bool:
        return parameter.dtype is torch.float32

    overrides = {
        ParamKey(with_name_predicate=ParamWithNamePredicate(name="no_decay", fn=no_decay)): ParamGroupOverride(
            wd_mult=0.0
        )
    }
    if run.train.precision != "fp32":
        # The distributed optimizer takes one parameter's state for another's in a group of two dtypes. A rate of
        # their own, equal to the others', puts the fp32 parameters into groups of their own.
        key = ParamKey(predicate=ParamPredicate(name="stays_fp32", fn=stays_fp32))
        overrides[key] = ParamGroupOverride(max_lr=run.optimizer.lr)
    return overrides
