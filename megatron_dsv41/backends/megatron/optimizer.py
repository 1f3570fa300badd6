"""Which parameters decay, by name (SPEC 17). Megatron's own rule goes by shape and would not decay norms."""

from __future__ import annotations

from typing import Any

from torch import nn

# Sinks, mHC offsets and gains, lookup tables and the head do not decay; matrices and RMSNorm weights do.
NO_DECAY = (".attn_sink", "_hc.base", "_hc.scale", "embed.weight", "head.weight")


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter of this native name (a wrapper's prefix does not matter)."""
    return not name.endswith(NO_DECAY)


def group_overrides() -> dict[Any, Any]:
    """Megatron's parameter-group overrides for `decays`."""
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
    from megatron.core.optimizer_param_scheduler import ParamGroupOverride

    def no_decay(parameter: nn.Parameter, name: str) -> bool:
        return not decays(name)

    key = ParamKey(with_name_predicate=ParamWithNamePredicate(name="no_decay", fn=no_decay))
    return {key: ParamGroupOverride(wd_mult=0.0)}
