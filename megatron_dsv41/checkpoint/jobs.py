"""Writing a folder as many small units of work: bounded memory, threads and processes, resumable, atomic.

Work happens in `DST.incomplete` beside the target, which is renamed when the last file is synced: a folder under its
final name is complete. Every process notes its finished units in a `done.N.log` there, so the same command run again
continues, with any number of processes; another command is refused. Bad input removes the work folder, a full disk or
a kill leaves it to be continued.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any

from megatron_dsv41.checkpoint.safetensors_io import ShardWriter, require_space, sync_folder
from megatron_dsv41.checkpoint.team import Team

SYNC_SECONDS = 5.0
BATCH_BYTES, BATCH_UNITS = 4 * 2**20, 128  # small units are run together: most of 96,085 tensors are small
JOB, STOP = "job.json", "stop"
LOGS = "done.*.log"
ALONE = Team()
Report = Callable[[int], None]  # bytes written since the last call


@dataclasses.dataclass(frozen=True)
class Unit:
    """A piece of work: reads some rows, writes `num_bytes` at fixed places. Running it twice does no harm.

    target: the tensor, or the file, that it writes (one of them, if several).
    """

    num_bytes: int
    run: Callable[[ShardWriter], None]
    target: str = ""


@dataclasses.dataclass(frozen=True)
class Job:
    """A folder to be made.

    identity: a JSON value that two runs share exactly when they write the same bytes; None: never resumed, what an
    earlier run left is discarded. sources: folders that are read, which the target must not touch. extra_bytes: what
    units write beside the shards.
    """

    target: Path
    writer: Callable[[Path], ShardWriter]
    units: Sequence[Unit]
    finish: Callable[[Path], None]  # writes the small files
    identity: Any
    title: str
    sources: tuple[Path, ...] = ()
    extra_bytes: int = 0


def batched(units: Iterable[Unit], file_of: Callable[[str], str]) -> Iterator[Unit]:
    """Join small neighbours of one file, so that a unit is worth its bookkeeping."""
    group: list[Unit] = []
    size = 0
    for unit in units:
        full = size + unit.num_bytes > BATCH_BYTES or len(group) == BATCH_UNITS
        if group and (full or file_of(unit.target) != file_of(group[0].target)):
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

    return group[0] if len(group) == 1 else Unit(size, run, group[0].target)


def divide(units: Sequence[Unit], file_of: Callable[[str], str], size: int) -> list[list[int]]:
    """Units of each of `size` processes: whole files, so that a file has one writer; only a file larger than an equal
    share is divided between several.
    """
    files: dict[str, list[int]] = {}
    for i, unit in enumerate(units):
        files.setdefault(file_of(unit.target), []).append(i)
    share = sum(unit.num_bytes for unit in units) / size
    pieces: list[tuple[int, list[int]]] = []
    for members in files.values():
        total = sum(units[i].num_bytes for i in members)
        pieces += [(units[i].num_bytes, [i]) for i in members] if total > share else [(total, members)]
    loads, shares = [0] * size, [list[int]() for _ in range(size)]
    for weight, members in sorted(pieces, key=lambda piece: (-piece[0], piece[1])):
        rank = loads.index(min(loads))
        loads[rank] += weight
        shares[rank] += members
    return [sorted(members) for members in shares]


def work_folder(target: Path) -> Path:
    """Where a folder is made before it gets its name."""
    return target.with_name(target.name + ".incomplete")


def free_target(target: Path, sources: Sequence[Path] = ()) -> Path:
    """The folder to be made, links resolved. ValueError when it holds anything, cannot be put in place by a rename, or
    lies in a folder that is read.
    """
    place = Path(target).resolve()
    if place.exists() and not place.is_dir():
        raise ValueError(f"{target} exists and is not a folder")
    if place.is_dir():
        if any(place.iterdir()):
            raise ValueError(f"{target} is not empty: choose a new folder or remove it first")
        if place == Path.cwd() or os.path.ismount(place):
            raise ValueError(f"{target} is the current folder or a mount point: name a new folder inside it")
    for source in (Path(path).resolve() for path in sources):
        if source in (*place.parents, work_folder(place)):
            raise ValueError(f"{target} lies in {source}, which is read: choose a folder outside of it")
    return place


def run_job(job: Job, *, workers: int, progress: bool, team: Team = ALONE) -> None:
    """Carry out a job, or continue it where an earlier run was stopped. Collective over the team."""
    target = team.first(lambda: free_target(job.target, job.sources))
    work = work_folder(target)
    writer = job.writer(work)
    units = list(batched(job.units, writer.file_of))
    with contextlib.ExitStack() as held:
        done_before = team.first(lambda: held.enter_context(_opened(job, work, writer)))
        own = divide(units, writer.file_of, team.size)[team.rank]

        def carry_out() -> None:
            try:
                _run_units(units, [i for i in own if i not in done_before], writer, team.rank, workers, report)
            except Exception:
                (work / STOP).touch()
                raise
            finally:
                writer.release()

        try:
            with _bar(job.title, units, progress and team.leads, done_before, work) as report:
                team.together(carry_out)
            team.first(lambda: _finish(job, work, target))
        except ValueError:
            if team.leads:
                shutil.rmtree(work)
            raise


def _finish(job: Job, work: Path, target: Path) -> None:
    job.writer(work).close()
    job.finish(work)
    for path in [*work.glob(LOGS), work / JOB]:
        path.unlink()
    sync_folder(work)
    work.rename(target)
    sync_folder(target.parent)


@contextlib.contextmanager
def _opened(job: Job, work: Path, writer: ShardWriter) -> Generator[frozenset[int]]:
    """Make and hold the work folder; yields the units that an earlier run of the same job finished."""
    if work.exists() and not (work.is_dir() and ((work / JOB).exists() or _is_whole(work, writer))):
        raise ValueError(f"{work} exists and is not an unfinished conversion: remove it first")
    work.parent.mkdir(parents=True, exist_ok=True)
    written = sum(p.stat().st_blocks * 512 for p in work.iterdir()) if work.exists() else 0
    require_space(work.parent, sum(writer.sizes.values()) + job.extra_bytes - written)
    work.mkdir(exist_ok=True)
    digest = hashlib.sha256(json.dumps(job.identity, sort_keys=True).encode()).hexdigest()
    with (work / JOB).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{work} is in use: the same conversion is running already") from error
        file.seek(0)
        found = file.read()
        (work / STOP).unlink(missing_ok=True)
        if job.identity is None or not found:
            _empty(work)
        elif found == digest:
            yield frozenset[int]().union(*(_finished(log) for log in work.glob(LOGS)))
            return
        elif found:
            raise ValueError(
                f"{work} was left by another conversion (other source, options or version): remove it first"
            )
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())
        yield frozenset()


def _is_whole(work: Path, writer: ShardWriter) -> bool:
    """Empty, or with every file at its full length: of a conversion that was killed right before it got its name."""
    sizes = {path.name: path.stat().st_size for path in work.iterdir()}
    return not sizes or all(sizes.get(file) == size for file, size in writer.sizes.items())


def _empty(work: Path) -> None:
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != JOB:
            path.unlink()


def log_name(rank: int) -> str:
    """The log of one process."""
    return f"done.{rank}.log"


def _finished(log: Path) -> frozenset[int]:
    lines = log.read_text().split("\n")
    return frozenset(int(line[:-1]) for line in lines if line.endswith("."))  # what a kill cut off is not believed


def _run_units(
    units: Sequence[Unit], todo: Sequence[int], writer: ShardWriter, rank: int, workers: int, report: Report
) -> None:
    waiting = iter(todo)
    running: dict[Future[None], int] = {}
    finished: list[int] = []
    last_sync = time.monotonic()
    with (writer.folder / log_name(rank)).open("a") as log, ThreadPoolExecutor(workers) as pool:
        log.write("\n")  # ends a line that a kill cut off
        try:
            while True:
                while len(running) < 2 * workers and (unit := next(waiting, None)) is not None:
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
                    if (writer.folder / STOP).exists():  # another process failed and will say why
                        break
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        pool.shutdown()
        _note_finished(finished, writer, log)


def _note_finished(finished: list[int], writer: ShardWriter, log: IO[str]) -> None:
    """A unit is called finished only after its bytes are on the disk."""
    writer.sync()
    log.write("".join(f"{unit}.\n" for unit in finished))
    log.flush()
    os.fsync(log.fileno())
    finished.clear()


@contextlib.contextmanager
def _bar(
    title: str, units: Sequence[Unit], progress: bool, done_before: frozenset[int], work: Path
) -> Generator[Report]:
    """Bytes of all processes: this one's as they are written, the others' as their logs name them."""
    if not progress:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    ended = threading.Event()
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        before = sum(units[unit].num_bytes for unit in done_before)
        task = bar.add_task(title, total=sum(unit.num_bytes for unit in units), completed=before)
        watch = threading.Thread(target=_watch_others, args=(units, done_before, work, ended, bar, task), daemon=True)
        watch.start()
        try:
            yield lambda count: bar.advance(task, count)
        finally:
            ended.set()
            watch.join()


def _watch_others(
    units: Sequence[Unit], known: frozenset[int], work: Path, ended: threading.Event, bar: Any, task: Any
) -> None:
    """Advance the bar by what the logs of other processes name."""
    seen = set(known)
    last = False
    while not last:
        last = ended.wait(1.0)
        logs = [log for log in work.glob(LOGS) if log.name != log_name(0)]
        new = set[int]().union(*(_finished(log) for log in logs)) - seen
        seen |= new
        bar.advance(task, sum(units[unit].num_bytes for unit in new))
