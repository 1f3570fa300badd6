"""What a training run costs in floating-point operations, by the architecture's own count."""

from __future__ import annotations

import dataclasses
from typing import Self

from megatron_dsv41.experiments.flops import flops_per_token
from megatron_dsv41.run_config import Run


def training_flops_per_token(run: Run) -> float:
    """FLOPs of one token's forward and backward pass in a run."""
    return flops_per_token(run.architecture(), run.data.seq_length, run.phase).training_total


@dataclasses.dataclass(frozen=True)
class RunFlops:
    """Of a whole run, whose phases may differ in what a token costs. legs: (start, end, FLOPs of a token) of each."""

    tokens_per_step: int
    legs: tuple[tuple[int, int, float], ...]

    @classmethod
    def of(cls, run: Run) -> Self:
        """Reads the architecture once per phase: make it before the steps, not at each."""
        legs = ((leg.start, leg.end, training_flops_per_token(leg.run)) for leg in run.legs)
        return cls(run.tokens_per_step, tuple(legs))

    def until(self, step: int) -> float:
        """What the first `step` steps cost."""
        parts = ((min(step, end) - start, per_token) for start, end, per_token in self.legs if start < step)
        return sum(steps * self.tokens_per_step * per_token for steps, per_token in parts)
