"""A scaling ladder as one typed value, read from a YAML file. An unknown key is an error that names the nearest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from megatron_dsv41.config import nearest
from megatron_dsv41.experiments.ladder_rules import DIALLED, Rules
from megatron_dsv41.typed_yaml import build, read_yaml

BASE = "base"
# Keys of a run that a cell sets; a ladder file must leave them to it.
CELL_KEYS = (
    *("batch.sequences", "batch.tokens", "train.steps", "train.tokens", "train.seed", "optimizer.lr"),
    *("schedule.unit", "schedule.warmup", "schedule.stable", "schedule.cosine", "schedule.min_lr"),
    *("checkpoint.folder", "checkpoint.interval", "eval.interval", "logging.name"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """One variant of the ladder: changed run settings (dotted keys), changed rules, and a part of the grid."""

    overrides: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    rules: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    depths: tuple[int, ...] | None = None  # None: those of the ladder
    tokens_per_parameter: tuple[float, ...] | None = None
    seeds: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class IsoFlops:
    """Grids of equal training compute: every depth gets the tokens that spend the budget. Of the base arm."""

    budgets: tuple[float, ...] = ()  # training FLOPs of one cell
    depths: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """Factors on the ruled learning rate and batch, each varied alone. Of the base arm; 1 is always in the grid."""

    lr: tuple[float, ...] = ()
    batch: tuple[float, ...] = ()
    depths: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """What one cell runs on, for the plan's hours and memory."""

    ranks: int = 1  # processes (GPUs) of one cell
    tflops: float | None = None  # sustained by one rank in training; None: hours are not estimated
    memory_gb: float | None = None  # of one rank; None: not compared

    def __post_init__(self) -> None:
        for key, value in dataclasses.asdict(self).items():
            if value is not None and value <= 0:
                raise ValueError(f"hardware.{key} must be positive, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slurm:
    """Lines of the scripts that `ladder run --slurm` writes."""

    nodes: int = 1
    time: str = "24:00:00"
    options: tuple[str, ...] = ()  # further `#SBATCH` lines, such as "--partition=gpu"
    setup: tuple[str, ...] = ()  # shell lines before the start


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ladder:
    """A ladder file. `base` is a run file without what the dial and the cells set."""

    name: str
    folder: str
    base: dict[str, Any]
    depths: tuple[int, ...]
    tokens_per_parameter: tuple[float, ...] = ()  # tokens over active (decode) parameters
    seeds: tuple[int, ...] = (1,)
    rules: Rules = dataclasses.field(default_factory=Rules)
    arms: dict[str, Arm] = dataclasses.field(default_factory=dict[str, Arm])
    iso_flops: IsoFlops = dataclasses.field(default_factory=IsoFlops)
    sweep: Sweep = dataclasses.field(default_factory=Sweep)
    hardware: Hardware = dataclasses.field(default_factory=Hardware)
    slurm: Slurm = dataclasses.field(default_factory=Slurm)

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise ValueError(f"name {self.name!r} must consist of letters, digits, '-', '_' and '.'")
        if not (self.tokens_per_parameter or self.iso_flops.budgets):
            raise ValueError("the ladder has no cells: give tokens_per_parameter or iso_flops.budgets")
        for key in ("depths", "tokens_per_parameter", "seeds"):
            _check_grid(key, getattr(self, key))
        _check_grid("iso_flops.budgets", self.iso_flops.budgets)
        if not self.depths or not self.seeds:
            raise ValueError("depths and seeds must each name at least one value")
        if BASE in self.arms:
            raise ValueError(f"arms.{BASE} is the ladder itself: give the arm another name")
        if self.sweep != Sweep() and not self.tokens_per_parameter:
            raise ValueError("sweep varies cells of tokens_per_parameter: give at least one")
        _check_base(self.base)
        for name, arm in self.arms.items():
            _check_arm(name, arm)

    def arm(self, name: str) -> Arm:
        """The arm of that name; `base` changes nothing."""
        return self.arms.get(name, Arm())

    def arm_rules(self, name: str) -> Rules:
        """Constants of the dial in one arm."""
        changes = self.arm(name).rules
        known = {field.name for field in dataclasses.fields(Rules)}
        for key in changes:
            if key not in known:
                raise ValueError(f"arms.{name}.rules.{key} is not a rule{nearest(key, known)}")
        return build(Rules, dataclasses.asdict(self.rules) | changes, f"arms.{name}.rules")


def load_ladder(path: str | Path) -> Ladder:
    """Read a ladder file. ValueError naming the key of whatever is wrong."""
    return build(Ladder, read_yaml(path, "ladder file"))


def _check_grid(key: str, values: Sequence[float]) -> None:
    if len(set(values)) != len(values) or any(value <= 0 for value in values):
        raise ValueError(f"{key} must be distinct positive numbers, got {list(values)}")


def _check_base(base: Mapping[str, Any]) -> None:
    """What the dial or the cell sets must not be in `base`: it would be silently replaced."""
    for section, settings in base.items():
        if not isinstance(settings, Mapping):
            raise ValueError(f"base.{section} must be a section of a run file, got {settings!r}")
        for key in cast("Mapping[str, Any]", settings):
            if f"{section}.{key}" in CELL_KEYS:
                raise ValueError(f"base.{section}.{key} is set by the ladder for every cell: change it through rules")
    overrides: dict[str, Any] = base.get("model", {}).get("overrides") or {}
    dialled = [key for key in overrides if key in DIALLED]
    if dialled:
        raise ValueError(f"base.model.overrides.{dialled[0]} is set by the dial: change it through rules")


def _check_arm(name: str, arm: Arm) -> None:
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"arms: {name!r} must consist of letters, digits, '-' and '_'")
    for key in arm.overrides:
        if key in CELL_KEYS or key.removeprefix("model.overrides.") in DIALLED:
            raise ValueError(f"arms.{name}.overrides.{key} is set by the dial: change it through arms.{name}.rules")
    for key in ("depths", "tokens_per_parameter", "seeds"):
        _check_grid(f"arms.{name}.{key}", getattr(arm, key) or ())
