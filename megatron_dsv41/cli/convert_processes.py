"""Several processes for one conversion: those that torchrun or srun started, or `--processes` of this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace

    from megatron_dsv41.checkpoint.team import Team

Work = Callable[["Namespace", "Team"], int]


def carry_out(work: Work, args: Namespace) -> int:
    """`work(args, team)` in every process of the team; the exit status."""
    from megatron_dsv41.checkpoint.team import Team

    if args.processes < 1:
        raise ValueError(f"--processes must be at least 1, got {args.processes}")
    with _launched() as team:
        if team is not None:
            return _quietly(work, args, team)
    return work(args, Team()) if args.processes == 1 else _local(work, args)


@contextlib.contextmanager
def _launched() -> Iterator[Team | None]:
    """The team of all ranks that a launcher started; None where there was none."""
    import torch.distributed as dist

    from megatron_dsv41.checkpoint.team import Team
    from megatron_dsv41.parallel.environment import adopt_slurm_ranks

    adopt_slurm_ranks()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    dist.init_process_group("gloo")
    try:
        yield Team.of_world()
    finally:
        dist.destroy_process_group()


def _local(work: Work, args: Namespace) -> int:
    """Start the processes here and wait. When one ends badly, the others are ended, too."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="dsv41-convert-") as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        processes = [
            context.Process(target=_member, args=(work, args, rank, os.getpid(), rendezvous))
            for rank in range(args.processes)
        ]
        for process in processes:
            process.start()
        try:
            return _status(processes)
        finally:
            for process in processes:
                process.terminate()
                process.join()


def _status(processes: list[Any]) -> int:
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode < 0:
                raise OSError(
                    f"one of {len(processes)} processes was ended by signal {-process.exitcode} (out of memory?): the "
                    "same command, with any --processes, continues"
                )
            if process.exitcode:
                return process.exitcode
    return 0


def _member(work: Work, args: Namespace, rank: int, parent: int, rendezvous: str) -> None:
    """One of the processes started here."""
    import torch.distributed as dist

    from megatron_dsv41.checkpoint.team import Team

    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=args.processes)
    try:
        status = _quietly(work, args, Team.of_world(args.processes))
    except (ValueError, OSError) as error:
        print(f"dsv41 convert: {error}", file=sys.stderr)
        status = 2
    dist.destroy_process_group()
    sys.exit(status)


def _quietly(work: Work, args: Namespace, team: Team) -> int:
    """Every process meets the same user's error: one of them says it, the others have the status."""
    try:
        return work(args, team)
    except (ValueError, OSError):
        if team.leads:
            raise
        return 2


def _end_with(parent: int) -> None:
    """A killed parent must not leave processes that go on writing."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
