"""Starts the cells of a ladder that are not finished, one after another or several at a time, and waits for them.

Killing the runner at any point loses nothing: trainers are asked to save and stop when it dies, cells are locked while
anything trains them, and the next runner resumes what was interrupted and skips what is finished.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megatron_dsv41.experiments.ladder import Ladder
from megatron_dsv41.experiments.ladder_cells import PlannedCell
from megatron_dsv41.experiments.ladder_state import (
    State,
    acquire,
    check_unchanged,
    read_record,
    start_record,
    status_of,
)

POLL_SECONDS = 0.5
LOG_LINES = 15
PR_SET_PDEATHSIG = 1
Launcher = Literal["auto", "srun"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Where cells run: how many at a time, on which GPUs (none: on CPUs), started how.

    Cells of one rank share GPUs in turn where there are more slots; others have their GPUs to themselves.
    """

    slots: int = 1
    devices: tuple[str, ...] = ()  # values for CUDA_VISIBLE_DEVICES
    launcher: Launcher = "auto"

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"--slots must be at least 1, got {self.slots}")

    def gpus(self, slot: int, ranks: int) -> tuple[str, ...]:
        """Those of a slot's cell, which has so many ranks."""
        if ranks == 1:
            return (self.devices[slot % len(self.devices)],)
        return self.devices[slot * ranks : (slot + 1) * ranks]


@dataclasses.dataclass
class _Started:
    planned: PlannedCell
    process: subprocess.Popen[bytes]
    lock: int
    slot: int


class Runner:
    """Runs cells of one ladder. `facts` go into each new cell's record; `digest` names the data of a cell."""

    def __init__(
        self,
        ladder: Ladder,
        machine: Machine,
        *,
        facts: Mapping[str, Any],
        digest: Callable[[PlannedCell], str],
        finished: Callable[[PlannedCell], None],
        say: Callable[[str], None] = print,
    ):
        ranks = ladder.hardware.ranks
        if machine.devices and ranks > 1 and len(machine.devices) < machine.slots * ranks:
            raise ValueError(
                f"{machine.slots} slots of hardware.ranks {ranks} need more GPUs than the "
                f"{len(machine.devices)} here: lower --slots"
            )
        self.ladder, self.machine, self.facts = ladder, machine, facts
        self.digest, self.finished, self.say = digest, finished, say
        self.active: list[_Started] = []

    def run(self, cells: Sequence[PlannedCell]) -> list[str]:
        """Bring every cell to its end; names of those that failed. A failed cell does not stop the others."""
        waiting, failed = self._unfinished(cells), list[str]()
        with self._children_end_with_us():
            while waiting or self.active:
                waiting = self._fill_slots(waiting)
                time.sleep(POLL_SECONDS)
                failed += self._reap()
        return failed

    def _unfinished(self, cells: Sequence[PlannedCell]) -> list[PlannedCell]:
        waiting: list[PlannedCell] = []
        for planned in cells:
            if status_of(planned).state is State.FINISHED:
                check_unchanged(planned, read_record(planned))
                self.say(f"{planned.id}: finished, skipped")
                self.finished(planned)
            else:
                waiting.append(planned)
        return waiting

    def _fill_slots(self, waiting: list[PlannedCell]) -> list[PlannedCell]:
        """Start cells in free slots. Cells that another process trains stay in the list until it is done."""
        left: list[PlannedCell] = []
        for planned in waiting:
            free = set(range(self.machine.slots)) - {started.slot for started in self.active}
            if not free:
                left.append(planned)
                continue
            lock = acquire(planned)
            if lock is None:
                left.append(planned)
                continue
            status = status_of(planned)  # again: another runner may have finished it meanwhile
            if status.state is State.FINISHED:
                os.close(lock)
                self.say(f"{planned.id}: finished by another process")
                self.finished(planned)
                continue
            try:
                self._start(planned, lock, min(free), status.step)
            except BaseException:
                os.close(lock)
                raise
        return left

    def _start(self, planned: PlannedCell, lock: int, slot: int, step: int) -> None:
        start_record(planned, dict(self.facts), self.digest(planned))
        log = planned.folder / "logs" / f"{planned.id}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self.say(f"{planned.id}: {f'resumes (had reached step {step})' if step else 'starts'}, log in {log}")
        with log.open("ab") as stream:
            process = subprocess.Popen(
                train_command(planned, self.ladder.hardware.ranks, self.machine.launcher),
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._environment(slot),
                pass_fds=(lock,),
                preexec_fn=_stop_when_parent_dies if sys.platform == "linux" else None,
            )
        self.active.append(_Started(planned, process, lock, slot))

    def _environment(self, slot: int) -> dict[str, str]:
        ranks = self.ladder.hardware.ranks
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        environment = {
            "OMP_NUM_THREADS": str(max(1, cores // (self.machine.slots * ranks))),
            **os.environ,
            "WANDB_RUN_GROUP": self.ladder.name,
            "PYTHONUNBUFFERED": "1",
        }
        if self.machine.devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.machine.gpus(slot, ranks))
        return environment

    def _reap(self) -> list[str]:
        """Cells whose process has ended: say how, and return the failed ones."""
        failed: list[str] = []
        for started in [s for s in self.active if s.process.poll() is not None]:
            self.active.remove(started)
            os.close(started.lock)
            planned, status = started.planned, status_of(started.planned)
            if status.state is State.FINISHED:
                self.say(f"{planned.id}: finished, validation loss {status.valid_loss:.4f}")
                self.finished(planned)
            else:
                failed.append(planned.id)
                self.say(f"{planned.id}: ended with status {started.process.returncode} at step {status.step}")
                self.say(_tail(planned.folder / "logs" / f"{planned.id}.log"))
        return failed

    @contextlib.contextmanager
    def _children_end_with_us(self) -> Generator[None]:
        """On SIGTERM, SIGINT or an error: trainers save and stop, then this process ends."""
        previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)
            for started in self.active:
                started.process.send_signal(signal.SIGTERM)
            for started in self.active:
                started.process.wait()


def train_command(planned: PlannedCell, ranks: int, launcher: Launcher) -> list[str]:
    """The process that trains a cell: plain Python for one rank, torchrun for several, srun in a Slurm job."""
    train = ["-m", "megatron_dsv41", "train", "--config", str(planned.config_file.absolute())]
    if launcher == "srun":
        return ["srun", "--kill-on-bad-exit=1", f"--ntasks={ranks}", sys.executable, *train]
    if ranks == 1:
        return [sys.executable, *train]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *train]


def write_slurm_script(ladder: Ladder, ladder_file: Path, planned: PlannedCell) -> Path:
    """A job that brings one cell to its end. Jobs of one cell run one at a time, and skip what is finished."""
    slurm, ranks = ladder.slurm, ladder.hardware.ranks
    if ranks % slurm.nodes:
        raise ValueError(f"hardware.ranks {ranks} is not a multiple of slurm.nodes {slurm.nodes}")
    per_node = ranks // slurm.nodes
    logs = planned.folder.absolute() / "logs"
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={ladder.name}-{planned.id}",
        f"#SBATCH --nodes={slurm.nodes}",
        f"#SBATCH --ntasks-per-node={per_node}",
        f"#SBATCH --gpus-per-node={per_node}",
        f"#SBATCH --time={slurm.time}",
        "#SBATCH --dependency=singleton",
        "#SBATCH --signal=B:TERM@300",
        "#SBATCH --requeue",
        f"#SBATCH --output={logs}/slurm-{planned.id}-%j.log",
        *(f"#SBATCH {option}" for option in slurm.options),
        "set -euo pipefail",
        f"cd {Path.cwd()}",
        *slurm.setup,
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
        "export MASTER_ADDR MASTER_PORT",
        f"exec {sys.executable} -m megatron_dsv41 ladder run {ladder_file} --cells {planned.id} --launcher srun",
        "",
    ]
    path = planned.folder / "slurm" / f"{planned.id}.sbatch"
    path.parent.mkdir(parents=True, exist_ok=True)
    logs.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))
    return path


def _stop_when_parent_dies() -> None:
    """In the child, before exec: the kernel sends SIGTERM when the runner dies, so the trainer saves and stops."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join(f"    {line}" for line in lines)
