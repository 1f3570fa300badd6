"""Which cells of a ladder are missing, running, interrupted or finished, from what lies on disk."""

from __future__ import annotations

import dataclasses
import enum
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import psutil

from megatron_dsv41.experiments.ladder_cells import PlannedCell
from megatron_dsv41.experiments.tracking import read_metrics, write_whole


class State(enum.StrEnum):
    """Of one cell."""

    MISSING = "missing"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    FINISHED = "finished"


@dataclasses.dataclass(frozen=True)
class CellStatus:
    """State and progress of one cell."""

    state: State
    step: int
    steps: int
    valid_loss: float | None  # the newest
    tokens_per_second: float | None


def status_of(planned: PlannedCell) -> CellStatus:
    """Finished is a cell whose last step has its validation loss: that is the datum it exists for."""
    rows = read_metrics(planned.run_folder)
    steps = planned.run.steps
    valid = {row["step"]: row["valid_loss"] for row in rows if "valid_loss" in row}
    speeds = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    if steps in valid:
        state = State.FINISHED
    elif is_taken(planned):
        state = State.RUNNING
    elif record_file(planned).exists():
        state = State.INTERRUPTED
    else:
        state = State.MISSING
    step = max((row["step"] for row in rows), default=0)
    newest = valid[max(valid)] if valid else None
    return CellStatus(state, step, steps, newest, sorted(speeds)[len(speeds) // 2] if speeds else None)


def record_file(planned: PlannedCell) -> Path:
    """What the cell was started with."""
    return planned.folder / "records" / f"{planned.id}.json"


def read_record(planned: PlannedCell) -> dict[str, Any]:
    """What the cell was started with; empty when it never was."""
    path = record_file(planned)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def check_unchanged(planned: PlannedCell, record: dict[str, Any], data_digest: str | None = None) -> None:
    """ValueError when a cell on disk was started from other settings or data than the ladder file now gives.

    data_digest: None for a finished cell, whose data may be gone.
    """
    for what, now in (("config_digest", planned.config_digest), ("data_digest", data_digest)):
        if record and now is not None and record[what] != now:
            raise ValueError(
                f"cell {planned.id} in {planned.folder} was started with {what} {record[what]}, the ladder file now "
                f"gives {now}: restore the file or the data, or set another folder"
            )


def start_record(planned: PlannedCell, facts: dict[str, Any], data_digest: str) -> None:
    """Write down what the cell starts with, once, and its run file every time. ValueError when it has changed."""
    record = read_record(planned)
    check_unchanged(planned, record, data_digest)
    planned.config_file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(planned.config_file, planned.run.to_yaml())
    if not record:
        record = {"cell": planned.id, "config_digest": planned.config_digest, "data_digest": data_digest, **facts}
        record_file(planned).parent.mkdir(parents=True, exist_ok=True)
        write_whole(record_file(planned), json.dumps(record, indent=2) + "\n")


def acquire(planned: PlannedCell) -> int | None:
    """The cell's lock as an open file descriptor, or None when another process has the cell.

    A trainer that inherits the descriptor keeps the cell locked after its runner is gone. Workers that outlive
    both are found by their command line.
    """
    path = _lock_file(planned)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    if _trainers(planned):
        os.close(descriptor)
        return None
    return descriptor


def is_taken(planned: PlannedCell) -> bool:
    """Some process is training the cell or about to."""
    if not _lock_file(planned).exists():
        return False
    descriptor = acquire(planned)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def _trainers(planned: PlannedCell) -> list[int]:
    """Processes of this machine that were started with the cell's run file."""
    config = str(planned.config_file.absolute())
    found = psutil.process_iter(["pid", "cmdline"])
    return [process.info["pid"] for process in found if config in (process.info["cmdline"] or ())]


def _lock_file(planned: PlannedCell) -> Path:
    return planned.folder / "locks" / planned.id
