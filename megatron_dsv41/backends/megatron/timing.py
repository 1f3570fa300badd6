"""Steps of the real trainer, timed: no checkpoint, no update unless asked, and a profile of one step.

A step is everything from reading its micro-batches to the summed gradients (and the router biases, and the check for
numbers that are not finite); with `updates` also the optimizer's step. The device is synchronised after each.
Imports no Megatron itself.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_dsv41.backends.megatron import launch
from megatron_dsv41.backends.megatron.train import quiet
from megatron_dsv41.data.files import write_whole
from megatron_dsv41.run_config import Run, run_from_dict


@dataclasses.dataclass(frozen=True)
class Steps:
    """How many steps of a run are for what. Three more follow: one that starts the profiler, the one that it records,
    and one whose Engram rows the recorded one fetches."""

    warm: int = 3
    timed: int = 5
    updates: bool = False

    @property
    def recorded(self) -> int:
        """The profiled step."""
        return self.warm + self.timed + 2

    @property
    def total(self) -> int:
        """Steps of the run."""
        return self.warm + self.timed + 3


def time_runs(
    jobs: Sequence[tuple[str, dict[str, Any]]], folder: str | Path, steps: Steps, on_device: bool = True
) -> None:
    """On every rank of a started world: the runs (by name, as `Run.to_dict`) one after the other.

    Leaves `NAME.json` in `folder`, what every rank found, and `NAME.RANK.trace.json.gz`; or `NAME.error`, with which
    it ends.
    """
    rank, folder = torch.distributed.get_rank(), Path(folder)
    for name, values in jobs:
        try:
            found = time_run(run_from_dict(values), steps, folder / f"{name}.{rank}.trace.json.gz", on_device)
        except BaseException:
            write_whole(folder / f"{name}.error", f"rank {rank}: {traceback.format_exc()}".encode())
            raise
        if rank == 0:
            write_whole(folder / f"{name}.json", json.dumps(found).encode())
        launch.destroy_groups()
        launch.release()


def time_run(run: Run, steps: Steps, trace: Path, on_device: bool) -> list[dict[str, Any]]:
    """What every rank found: seconds of the timed steps, bytes, its pipeline stage, losses, fetch times of Engram."""
    from megatron_dsv41.backends.megatron import timed_trainer, trainer

    gc.collect()
    before = torch.cuda.memory_allocated()
    with quiet(run.logging.megatron):
        checked = trainer.check(run.legs[0])
        launch.create_groups(run.parallel)
        timed = timed_trainer.TimedTrainer(run.legs[0], checked, steps, trace)
        if on_device:
            timed.model_config.builder = f"{timed_trainer.__name__}.BuilderOnDevice"  # type: ignore[misc]
        status = timed.pretrain()
    assert status == 0 and len(timed.seconds) == steps.timed, (status, timed.seconds)
    own = {
        "seconds": timed.seconds,
        "peak": timed.peak - before,
        "weights": timed.weights,
        "stage": timed.groups.pp.rank(),
        "losses": timed.losses,
        "engram": {key: float(value) for key, value in timed.engram_metrics.items()},
    }
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    timed.let_go()
    return everyone
