"""The trainer of `timing`: times steps, profiles one, draws weights on the device. Imported after `launch`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.utils import unwrap_model
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from megatron_dsv41.backends.megatron import launch, trainer
from megatron_dsv41.backends.megatron.builder import DSV41ModelBuilder
from megatron_dsv41.backends.megatron.model import DSV41Model
from megatron_dsv41.backends.megatron.timing import Steps
from megatron_dsv41.experiments.traces import GRADIENTS, STEP
from megatron_dsv41.run_config import Leg
from megatron_dsv41.testing.wire import WireMeter


class TimedTrainer(trainer.Trainer):
    """One run on this rank. `trace`: where the profile of a step goes (.json or .json.gz)."""

    def __init__(self, leg: Leg, checked: trainer.Checked, steps: Steps, trace: Path):
        super().__init__(leg, checked)
        self.steps, self.trace = steps, trace
        self.seconds: list[float] = []  # of timed steps
        self.losses: list[float] = []
        self.peak = self.weights = 0
        self.began = 0.0
        self.reporter.reports = False
        self.recording = contextlib.ExitStack()  # of the whole step
        self.profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])],
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda done: done.export_chrome_trace(str(trace)),
        )

    def build_optimizer(self, stock: Any, config: Any, model: list[Any], **kwargs: Any) -> Any:
        """Megatron's or ours, or one that leaves everything as it is."""
        stages = unwrap_model(model)
        self.weights = sum(p.numel() * p.element_size() for stage in stages for p in stage.parameters())
        if self.steps.updates:
            return super().build_optimizer(stock, config, model, **kwargs)
        return Still(self.engram)

    def finalize(self, model: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
        """See the trainer's; a range of the profile."""
        with record_function(GRADIENTS):
            super().finalize(model, num_tokens, **kwargs)

    def training_log(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, stock: Any, loss_dict: dict[str, Any], total: Any, learning_rate: Any, step: int, *rest: Any, **more: Any
    ) -> bool:
        """After every step."""
        torch.cuda.synchronize()
        seconds = time.perf_counter() - self.began
        if step == self.steps.recorded:
            self.recording.close()
        if loss_dict:
            self.losses.append(float(loss_dict["lm loss"]))
        if self.steps.warm < step <= self.steps.warm + self.steps.timed:
            self.seconds.append(seconds)
        if step == self.steps.warm:
            torch.cuda.reset_peak_memory_stats()
        if step == self.steps.warm + self.steps.timed:
            self.peak = torch.cuda.max_memory_allocated()
            self.profiler.start()
        elif step in (self.steps.recorded - 1, self.steps.recorded):
            self.profiler.step()
        if step == self.steps.recorded:
            self.profiler.stop()
        torch.distributed.barrier()
        torch.cuda.synchronize()
        if step == self.steps.recorded - 1:
            for context in (WireMeter(ranges=True).running(), _late_bound_reduction(), record_function(STEP)):
                self.recording.enter_context(context)
        self.began = time.perf_counter()
        return False

    def save_checkpoint(self, stock: Any, iteration: int, *args: Any, **kwargs: Any) -> None:
        """None."""


@contextlib.contextmanager
def _late_bound_reduction() -> Iterator[None]:
    """Megatron's gradient buffers took the function from torch when they were imported."""
    stock = param_and_grad_buffer.dist_reduce_scatter_func
    param_and_grad_buffer.dist_reduce_scatter_func = lambda *args, **kwargs: torch.distributed.reduce_scatter_tensor(
        *args, **kwargs
    )
    try:
        yield
    finally:
        param_and_grad_buffer.dist_reduce_scatter_func = stock


class Still:
    """What Megatron's loop asks of an optimizer, without an update."""

    is_stub_optimizer = True

    def __init__(self, engram: Any):
        self.engram, self.param_groups = engram, [{"params": [], "lr": 0.0}]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing."""

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Unchanged."""
        return loss

    def step(self) -> tuple[bool, None, None]:
        """Rows of the next step may cross: the tables are what it must read."""
        if self.engram is not None:
            self.engram.tables_changed()
        return True, None, None


class BuilderOnDevice(DSV41ModelBuilder):
    """Initial weights are drawn where the model will be: the same distribution, other numbers, in seconds."""

    def build_model(self, *args: Any, **kwargs: Any) -> DSV41Model:
        """See the builder's."""
        with torch.device(launch.device()), _WithoutGenerators():
            return super().build_model(*args, **kwargs)


class _WithoutGenerators(TorchFunctionMode):
    """Weights that are drawn with a generator of the processor take the device's own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(kwargs.get("generator"), torch.Generator):
            kwargs["generator"] = None
        return func(*args, **kwargs)
