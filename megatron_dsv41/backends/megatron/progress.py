"""The progress line, metrics.jsonl and wandb of a run. One rank of the world reports."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from megatron_dsv41.experiments.run_flops import RunFlops, training_flops_per_token
from megatron_dsv41.experiments.tracking import Metrics, WandbRun
from megatron_dsv41.run_config import Run

# Dense bf16 tensor-core peak of one GPU in TFLOP/s, by a part of its name (vendor data sheets).
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "H800": 989.0, "B200": 2250.0, "GB200": 2500.0, "A100": 312.0}


@dataclasses.dataclass
class Reporter:
    """Averages over `logging.interval` steps and reports. On ranks that do not report, every method returns at once."""

    run: Run
    resume_step: int
    reports: bool
    recorded: Run | None = None  # what wandb keeps as the run's settings; None: `run`
    out: Any = dataclasses.field(default_factory=lambda: sys.__stdout__)

    def __post_init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.begin = self.interval_begin = time.perf_counter()
        self.first_step = self.interval_step = self.resume_step
        self.validated_step = -1
        self.metrics = self.wandb = None
        self.world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        self.flops_per_token = training_flops_per_token(self.run)
        self.flops = RunFlops.of(self.recorded or self.run)
        if self.reports:
            logging, folder = self.run.logging, self.run.checkpoint.folder
            self.metrics = Metrics(folder, self.resume_step)
            if logging.wandb != "off":
                self.wandb = WandbRun(
                    folder,
                    logging.wandb,
                    project=logging.project,
                    entity=logging.entity,
                    name=logging.name,
                    tags=logging.tags,
                    config=(self.recorded or self.run).to_dict(),
                )

    def start(self) -> None:
        """Time begins now: set-up does not count."""
        self.begin = self.interval_begin = time.perf_counter()

    def logs(self, step: int) -> bool:
        """Some rank reports after `step`."""
        return step % self.run.logging.interval == 0 or step == self.run.steps

    def due(self, step: int) -> bool:
        """This rank reports after `step`."""
        return self.reports and self.logs(step)

    def step(
        self, step: int, loss: torch.Tensor | None, grad_norm: float | None, lr: float, more: Mapping[str, Any]
    ) -> None:
        """Account one finished step; report when its interval is full. `loss` and `more` may lie on the GPU."""
        if not self.reports:
            return
        if loss is not None:
            self.losses.append(loss.detach())
        if not self.due(step):
            return
        now = time.perf_counter()
        steps, seconds = step - self.interval_step, now - self.interval_begin
        values: dict[str, Any] = {
            "tokens": step * self.run.tokens_per_step,
            "flops": self.flops.until(step),
            "loss": float(torch.stack(self.losses).double().mean()) if self.losses else math.nan,
            "last_loss": float(self.losses[-1]) if self.losses else math.nan,
            "grad_norm": float(grad_norm) if grad_norm is not None else None,
            "lr": lr,
            "tokens_per_second": steps * self.run.tokens_per_step / seconds,
            "seconds": now - self.begin,
            **{key: float(value) for key, value in more.items()},
        }
        values |= self._speed(values["tokens_per_second"])
        self._print(step, values, now)
        self._log(step, values)
        self.losses.clear()
        self.interval_begin, self.interval_step = time.perf_counter(), step

    def validation(self, step: int, loss: float) -> None:
        """Report a validation loss, once per step: Megatron validates again after the last one."""
        if self.reports and step != self.validated_step:
            self.validated_step = step
            self._say(f"step {step}  validation loss {loss:.4f}")
            counts = {"tokens": step * self.run.tokens_per_step, "flops": self.flops.until(step)}
            self._log(step, {**counts, "valid_loss": loss})

    def say(self, text: str) -> None:
        """Print a line of our own."""
        if self.reports:
            self._say(text)

    def close(self, exit_code: int = 0) -> None:
        """Close files and the wandb run."""
        if self.metrics is not None:
            self.metrics.close()
        if self.wandb is not None:
            self.wandb.close(exit_code)

    def _speed(self, tokens_per_second: float) -> dict[str, float]:
        if not torch.cuda.is_available():
            return {}
        tflops = tokens_per_second * self.flops_per_token / self.world / 1e12
        name = torch.cuda.get_device_name()
        peak = next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)
        return {"tflops": tflops} | ({"mfu": tflops / peak} if peak else {})

    def _print(self, step: int, values: Mapping[str, Any], now: float) -> None:
        done = step - self.first_step
        left = (now - self.begin) / done * (self.run.steps - step)
        parts = [
            f"step {step}/{self.run.steps}",
            f"tokens {_short(values['tokens'])}",
            f"loss {values['loss']:.4f}",
            f"grad norm {values['grad_norm']:.3f}" if values["grad_norm"] is not None else "",
            f"lr {values['lr']:.3e}",
            f"{_short(values['tokens_per_second'])} tokens/s",
            f"{values['tflops']:.1f} TFLOP/s" if "tflops" in values else "",
            f"MFU {values['mfu']:.1%}" if "mfu" in values else "",
            f"left {_duration(left)}",
        ]
        self._say("  ".join(part for part in parts if part))

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        assert self.metrics is not None
        self.metrics.log(step, values)
        if self.wandb is not None:
            self.wandb.log(step, values)

    def _say(self, text: str) -> None:
        print(text, file=self.out, flush=True)


def _short(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
