"""The phases that a run walks through: how long each lasts and what it changes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

# What a phase may change: section of the run file -> settings that stay the run's, with the reason.
SECTIONS: dict[str, dict[str, str]] = {
    "data": {"tokenizer": "the weights belong to one tokenizer", "cache": "it is one folder"},
    "batch": {"tokens": "the batch in tokens is constant", "sequences": "set batch.tokens in the run"},
    "train": {
        "steps": "give the phase's own steps or tokens",
        "tokens": "give the phase's own steps or tokens",
        "seed": "it belongs to the run",
        "precision": "the weights are stored in one precision",
        "init_from": "a run starts once",
    },
    "optimizer": {"name": "state of one optimizer is not another's", "lr": "give the phase's lr"},
    "parallel": {},
    "phase": {},
    "ops": {},
    "precision": {},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The learning rate over one phase: from `start` (null: what the run had reached) to `end`."""

    start: float | None = None
    end: float
    shape: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        for key in ("start", "end"):
            if (getattr(self, key) or 0.0) < 0:
                raise ValueError(f"lr.{key} must not be negative, got {getattr(self, key)}")

    def at(self, done: float, reached: float) -> float:
        """Rate when the share `done` in [0, 1] of the phase is over; `reached`: the rate before the phase."""
        start = reached if self.start is None else self.start
        share = done if self.shape == "linear" else (1 - math.cos(math.pi * done)) / 2
        return start + (self.end - start) * share


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPhase:
    """One phase: its length, and what it changes of the run's sections (a change replaces the setting's value).

    Without `lr` the run's schedule goes on, counted over the whole run.
    """

    name: str
    steps: int | None = None
    tokens: int | None = None
    lr: LearningRate | None = None
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    batch: dict[str, Any] = dataclasses.field(default_factory=dict)
    train: dict[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    parallel: dict[str, Any] = dataclasses.field(default_factory=dict)
    phase: dict[str, Any] = dataclasses.field(default_factory=dict)
    ops: dict[str, Any] = dataclasses.field(default_factory=dict)
    precision: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("every phase needs a name")
        if (self.steps is None) == (self.tokens is None):
            raise ValueError(f"phase {self.name} needs exactly one of steps and tokens")
        for key in ("steps", "tokens"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"phase {self.name}: {key} must be positive, got {value}")
        for section, fixed in SECTIONS.items():
            for key in getattr(self, section):
                if key in fixed:
                    raise ValueError(f"phase {self.name} cannot change {section}.{key}: {fixed[key]}")

    def changes(self) -> dict[str, dict[str, Any]]:
        """Section -> its changed settings, those that there are."""
        return {section: getattr(self, section) for section in SECTIONS if getattr(self, section)}

    def num_steps(self, tokens_per_step: int) -> int:
        """Optimizer steps."""
        return self.steps or math.ceil((self.tokens or 0) / tokens_per_step)


def check_names(phases: tuple[RunPhase, ...]) -> None:
    """ValueError when two phases have one name."""
    names = [phase.name for phase in phases]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two phases are called {name!r}: name them apart")
