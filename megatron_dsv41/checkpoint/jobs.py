"""Writing a folder as many small units of work: bounded memory, several threads, resumable, atomic.

Work happens in `DST.incomplete` beside the target, which is renamed when the last file is synced: a folder under its
final name is complete. `done.log` there lists finished units, so the same command run again continues; another
command is refused. Bad input removes the work folder, a full disk or a kill leaves it to be continued.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any

from megatron_dsv41.checkpoint.safetensors_io import ShardWriter, require_space, sync_folder

SYNC_SECONDS = 5.0
BATCH_BYTES, BATCH_UNITS = 4 * 2**20, 128  # small units are run together: most of 96,085 tensors are small
JOB, DONE = "job.json", "done.log"
Report = Callable[[int], None]  # bytes written since the last call


@dataclasses.dataclass(frozen=True)
class Unit:
    """A piece of work: reads some rows, writes `num_bytes` at fixed places. Running it twice does no harm."""

    num_bytes: int
    run: Callable[[ShardWriter], None]


@dataclasses.dataclass(frozen=True)
class Job:
    """A folder to be made.

    identity: a JSON value that two runs share exactly when they write the same bytes; None: never resumed, what an
    earlier run left is discarded.
    """

    target: Path
    writer: Callable[[Path], ShardWriter]
    units: Sequence[Unit]
    finish: Callable[[Path], None]  # writes the small files
    identity: Any
    title: str


def batched(units: Iterable[Unit]) -> Iterator[Unit]:
    """Join small neighbours, so that a unit is worth its bookkeeping."""
    group: list[Unit] = []
    size = 0
    for unit in units:
        if group and (size + unit.num_bytes > BATCH_BYTES or len(group) == BATCH_UNITS):
            yield _joined(tuple(group), size)
            group, size = [], 0
        group.append(unit)
        size += unit.num_bytes
    if group:
        yield _joined(tuple(group), size)


def _joined(group: tuple[Unit, ...], size: int) -> Unit:
    def run(writer: ShardWriter) -> None:
        for unit in group:
            unit.run(writer)

    return group[0] if len(group) == 1 else Unit(size, run)


def require_free_target(target: Path) -> None:
    """ValueError when the output folder exists and holds anything, or is a file."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} exists and is not a folder")
    if target.is_dir() and any(target.iterdir()):
        raise ValueError(f"{target} is not empty: choose a new folder or remove it first")


def run_job(job: Job, *, workers: int, progress: bool) -> None:
    """Carry out a job, or continue it where an earlier run was stopped."""
    target = job.target
    require_free_target(target)
    work = target.with_name(target.name + ".incomplete")
    work.parent.mkdir(parents=True, exist_ok=True)
    writer = job.writer(work)
    written = sum(p.stat().st_blocks * 512 for p in work.iterdir() if p.name in writer.sizes) if work.exists() else 0
    require_space(work.parent, sum(writer.sizes.values()) - written)
    work.mkdir(exist_ok=True)
    with _locked(work, job.identity) as done_before:
        try:
            with (work / DONE).open("a") as log, _bar(job, progress, done_before) as report:
                _run_units(job.units, done_before, writer, log, workers, report)
            writer.close()
            job.finish(work)
        except ValueError:
            writer.release()
            shutil.rmtree(work)
            raise
        except BaseException:
            writer.release()
            raise
        (work / DONE).unlink()
        (work / JOB).unlink()
        sync_folder(work)
        work.rename(target)
        sync_folder(target.parent)


@contextlib.contextmanager
def _locked(work: Path, identity: Any) -> Generator[frozenset[int]]:
    """Hold the work folder; yields the units that an earlier run of the same job finished."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    with (work / JOB).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{work} is in use: the same conversion is running already") from error
        file.seek(0)
        found = file.read()
        if identity is None:
            _empty(work)
        elif found == digest:
            yield _finished(work / DONE)
            return
        elif found:
            raise ValueError(
                f"{work} was left by another conversion (other source, options or version): remove it first"
            )
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())
        yield frozenset()


def _empty(work: Path) -> None:
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != JOB:
            path.unlink()


def _finished(log: Path) -> frozenset[int]:
    if not log.exists():
        return frozenset()
    lines = log.read_text().split("\n")
    return frozenset(int(line) for line in lines[:-1])  # a last line without newline was cut off


def _run_units(
    units: Sequence[Unit],
    done_before: frozenset[int],
    writer: ShardWriter,
    log: IO[str],
    workers: int,
    report: Report,
) -> None:
    todo = iter([i for i in range(len(units)) if i not in done_before])
    running: dict[Future[None], int] = {}
    finished: list[int] = []
    last_sync = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        try:
            while True:
                while len(running) < 2 * workers and (unit := next(todo, None)) is not None:
                    running[pool.submit(units[unit].run, writer)] = unit
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    unit = running.pop(future)
                    future.result()
                    finished.append(unit)
                    report(units[unit].num_bytes)
                if time.monotonic() - last_sync > SYNC_SECONDS:
                    _note_finished(finished, writer, log)
                    last_sync = time.monotonic()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    _note_finished(finished, writer, log)


def _note_finished(finished: list[int], writer: ShardWriter, log: IO[str]) -> None:
    """A unit is called finished only after its bytes are on the disk."""
    writer.sync()
    log.write("".join(f"{unit}\n" for unit in finished))
    log.flush()
    os.fsync(log.fileno())
    finished.clear()


@contextlib.contextmanager
def _bar(job: Job, progress: bool, done_before: frozenset[int]) -> Generator[Report]:
    if not progress:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        total = sum(unit.num_bytes for unit in job.units)
        before = sum(job.units[unit].num_bytes for unit in done_before)
        task = bar.add_task(job.title, total=total, completed=before)
        yield lambda count: bar.advance(task, count)
