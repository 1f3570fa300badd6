"""Learning rates as the run states them, and what stands still in its present phase."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from megatron_dsv41.backends.megatron.config import PEAK
from megatron_dsv41.backends.megatron.optimizer import frozen_marks
from megatron_dsv41.optim.groups import ROLES, is_frozen, role_of
from megatron_dsv41.run_config import Leg, Run


class RunScheduler(OptimizerParamScheduler):
    """Rates of the whole run by optimizer step.

    Megatron's own counts samples, whose length in tokens changes with the phase. It takes nothing from a checkpoint:
    the run file says what the rate of a step is. A group's rate is in proportion to its `max_lr`; what stands still in
    this phase gets none, and so neither update nor decay.
    """

    def __init__(self, optimizer: Any, leg: Leg, finished_steps: int):
        self.leg, self.finished = leg, finished_steps
        self.still = frozen_marks(leg)
        decay = leg.run.optimizer.weight_decay
        super().__init__(
            optimizer,
            init_lr=0.0,
            max_lr=PEAK,
            min_lr=0.0,
            lr_warmup_steps=0,
            lr_decay_steps=1,
            lr_decay_style="constant",
            start_wd=decay,
            end_wd=decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )

    def get_lr(self, param_group: dict) -> float:
        """Rate of the update after `finished` steps."""
        if param_group.get("min_lr") in self.still:
            return 0.0
        return self.leg.whole.learning_rate(self.finished) * (param_group.get("max_lr", PEAK) / PEAK)

    def step(self, increment: int) -> None:
        """One optimizer step is over; an increment of 0 only sets the rates."""
        self.finished += increment > 0
        super().step(increment)

    def load_state_dict(self, state_dict: dict) -> None:
        """Nothing to take."""
        self.step(0)


def check_thawing(run: Run) -> None:
    """ValueError when Megatron would wait for gradients that a phase does not compute."""
    overlaps = run.asks_megatron("overlap_grad_reduce")
    if overlaps and len({leg.run.phase.index_loss == "off" for leg in run.legs}) > 1:
        raise ValueError(
            "megatron.overlap_grad_reduce waits for every parameter's gradient, but phases without index_loss give the "
            "indexers none: leave overlap_grad_reduce out, or set phase.index_loss in every phase or in none"
        )


def thaw(stages: Iterable[nn.Module], run: Run) -> None:
    """Let everything that some phase trains require gradients, so that all phases share one optimizer state.

    Before Megatron wraps the model. What the present phase leaves alone gets no gradient from its graph.
    """
    for name, parameter in _trainable(stages):
        if not all(is_frozen(name, leg.run.phase, leg.run.optimizer) for leg in run.legs):
            parameter.requires_grad_(True)


def clear_frozen(stages: Iterable[nn.Module], leg: Leg) -> None:
    """Forget the gradients of what stands still, so that they take no part in clipping."""
    for name, parameter in _trainable(stages):
        gradient: Any = getattr(parameter, "main_grad", None)  # owned tables have gradients of another kind
        if gradient is not None and is_frozen(name, leg.run.phase, leg.run.optimizer):
            gradient.zero_()


def _trainable(stages: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for stage in stages:
        yield from ((name, p) for name, p in stage.named_parameters() if role_of(name) in ROLES)
