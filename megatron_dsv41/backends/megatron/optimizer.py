"""Parameter groups of Megatron's AdamW: what decays, what stands still when, and one dtype per group.

Megatron's own rule goes by shape and would not decay norms. Names decide here, by the table of `optim.groups`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron_dsv41.backends.megatron.config import PEAK
from megatron_dsv41.checkpoint.mapping import parameter_bindings
from megatron_dsv41.optim.groups import decays, is_frozen
from megatron_dsv41.run_config import Leg, Run

Pattern = tuple[bool, ...]  # of a parameter: in which phases of the run it stands still


def group_overrides(leg: Leg) -> dict[Any, Any]:
    """Megatron's parameter-group overrides, equal in every phase of a run: checkpoints match groups by their values."""
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
    from megatron.core.optimizer_param_scheduler import ParamGroupOverride

    overrides: dict[Any, Any] = {}

    def add(name: str, predicate: Callable[[nn.Parameter, str], bool], **values: float) -> None:
        key = ParamKey(with_name_predicate=ParamWithNamePredicate(name=name, fn=predicate))
        overrides[key] = ParamGroupOverride(**values)  # type: ignore[typeddict-item]

    add("no_decay", lambda p, name: not decays(_native(name)), wd_mult=0.0)
    for pattern in _patterns(leg.whole):
        matches = _matcher(leg.whole, pattern)
        add(f"still_{_mark(pattern):g}", lambda p, name, matches=matches: matches(_native(name)), min_lr=_mark(pattern))
    if leg.run.train.precision != "fp32":
        # The distributed optimizer takes one parameter's state for another's in a group of two dtypes. A value of
        # their own, equal in effect to the others', puts the fp32 parameters into groups of their own.
        add("stays_fp32", lambda p, name: p.dtype is torch.float32, max_lr=PEAK)
    return overrides


def frozen_marks(leg: Leg) -> frozenset[float]:
    """The `min_lr` by which groups that stand still in this phase are known. Rates themselves never look at it."""
    here = leg.whole.legs.index(leg)
    return frozenset(_mark(pattern) for pattern in _patterns(leg.whole) if pattern[here])


def _patterns(run: Run) -> list[Pattern]:
    """The different patterns of the run's parameters, but for never standing still."""
    names = (binding.native for binding in parameter_bindings(run.architecture()))
    return sorted(pattern for pattern in {_pattern(run, name) for name in names} if any(pattern))


def _pattern(run: Run, name: str) -> Pattern:
    return tuple(is_frozen(name, leg.run.phase, leg.run.optimizer) for leg in run.legs)


def _matcher(run: Run, pattern: Pattern) -> Callable[[str], bool]:
    return lambda name: _pattern(run, name) == pattern


def _mark(pattern: Pattern) -> float:
    """A negative number per pattern: no rate is negative."""
    return -float(1 + sum(still << place for place, still in enumerate(pattern)))


def _native(name: str) -> str:
    """A parameter's native name without the prefixes of wrappers."""
    return name.rpartition("module.")[2]
