"""Parameter groups of Megatron's AdamW: what decays, what is frozen, and one dtype per group.

Megatron's own rule goes by shape and would not decay norms. Names decide here, by the table of `optim.groups`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron_dsv41.optim.groups import decays, is_frozen
from megatron_dsv41.run_config import Run


def group_overrides(run: Run) -> dict[Any, Any]:
    """Megatron's parameter-group overrides of a run. Their predicates exclude each other but for decay and dtype."""
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
    from megatron.core.optimizer_param_scheduler import ParamGroupOverride

    def frozen(name: str) -> bool:
        return is_frozen(_native(name), run.phase, run.optimizer)

    def fp32(parameter: nn.Parameter) -> bool:
        return parameter.dtype is torch.float32

    overrides: dict[Any, Any] = {}

    def add(name: str, predicate: Callable[[nn.Parameter, str], bool], **values: float) -> None:
        key = ParamKey(with_name_predicate=ParamWithNamePredicate(name=name, fn=predicate))
        overrides[key] = ParamGroupOverride(**values)  # type: ignore[typeddict-item]

    still = {"max_lr": 0.0, "min_lr": 0.0, "wd_mult": 0.0}
    add("no_decay", lambda p, name: not frozen(name) and not decays(_native(name)), wd_mult=0.0)
    if run.train.precision == "fp32":
        add("frozen", lambda p, name: frozen(name), **still)
        return overrides
    # The distributed optimizer takes one parameter's state for another's in a group of two dtypes. Values of their
    # own, equal in effect to the others', put the fp32 parameters into groups of their own.
    add("stays_fp32", lambda p, name: fp32(p) and not frozen(name), max_lr=run.optimizer.lr)
    add("frozen", lambda p, name: frozen(name) and not fp32(p), **still)
    add("frozen_fp32", lambda p, name: frozen(name) and fp32(p), **still, end_wd=0.0, start_wd=0.0)
    return overrides


def _native(name: str) -> str:
    """A parameter's native name without the prefixes of wrappers."""
    return name.rpartition("module.")[2]
