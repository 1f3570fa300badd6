"""From what runs wrote to one row per finished cell: what it was, what it cost, what it reached."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import platform
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_dsv41 import __version__
from megatron_dsv41.experiments.ladder_cells import PlannedCell
from megatron_dsv41.experiments.ladder_plan import N_CONVENTIONS, count_n
from megatron_dsv41.experiments.ladder_state import State, check_unchanged, read_record, status_of
from megatron_dsv41.experiments.run_flops import training_flops_per_token
from megatron_dsv41.experiments.tracking import RUN_ID_FILE, read_metrics, write_whole

ROWS_FILE, TABLE_FILE = "rows.jsonl", "rows.csv"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One finished cell. n: parameters by convention; tokens: D; flops: C, of training; loss: nats per token."""

    cell: str
    arm: str
    depth: int
    seed: int
    kind: str
    size: float
    lr_factor: float
    batch_factor: float
    n: dict[str, float]
    tokens: float
    flops: float
    loss: float  # validation, after the last step
    train_loss: float | None
    lr: float
    batch_tokens: int
    seconds: float | None
    tokens_per_second: float | None
    commit: str | None
    config_digest: str
    data_digest: str
    wandb_id: str | None


def start_facts() -> dict[str, Any]:
    """What a cell's record says of the place and code that it starts on."""
    return {
        "commit": git_commit(Path(__file__).parent),
        "version": __version__,
        "python": platform.python_version(),
        "host": platform.node(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def git_commit(folder: Path) -> str | None:
    """Commit of the checkout around `folder`, with `+changes` when files differ from it; None outside of one."""
    git = ["git", "-C", str(folder)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "."], capture_output=True).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}+changes" if changed else commit


def collect(cells: Sequence[PlannedCell]) -> list[Row]:
    """Rows of all finished cells, in the order of the ladder."""
    return [collect_cell(cell) for cell in cells if status_of(cell).state is State.FINISHED]


def collect_cell(planned: PlannedCell) -> Row:
    """The row of one finished cell. ValueError when it was started from other settings than the ladder file gives."""
    run, cell, status = planned.run, planned.cell, status_of(planned)
    assert status.state is State.FINISHED and status.valid_loss is not None
    record, metrics = read_record(planned), read_metrics(planned.run_folder)
    check_unchanged(planned, record)
    training = [row for row in metrics if "loss" in row]
    per_token = training_flops_per_token(run)
    tokens = run.steps * run.tokens_per_step
    wandb_id = planned.run_folder / RUN_ID_FILE
    return Row(
        **{key: value for key, value in dataclasses.asdict(cell).items()},
        cell=planned.id,
        n=count_n(run.architecture(), per_token),
        tokens=tokens,
        flops=tokens * per_token,
        loss=status.valid_loss,
        train_loss=training[-1]["loss"] if training else None,
        lr=run.optimizer.lr,
        batch_tokens=run.tokens_per_step,
        seconds=_seconds(training),
        tokens_per_second=status.tokens_per_second,
        commit=record.get("commit"),
        config_digest=record.get("config_digest", planned.config_digest),
        data_digest=record.get("data_digest", ""),
        wandb_id=wandb_id.read_text().strip() if wandb_id.exists() else None,
    )


def write_rows(folder: Path, rows: Sequence[Row]) -> tuple[Path, Path]:
    """rows.jsonl for programs and rows.csv for spreadsheets and reports, both replaced whole."""
    folder.mkdir(parents=True, exist_ok=True)
    lines, table = folder / ROWS_FILE, folder / TABLE_FILE
    write_whole(lines, "".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows))
    text = io.StringIO()
    flat = [flat_row(row) for row in rows]
    writer = csv.DictWriter(text, flat[0].keys() if flat else ["cell"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    write_whole(table, text.getvalue())
    return lines, table


def read_rows(folder: Path) -> list[Row]:
    """What `write_rows` wrote. ValueError when it is missing, damaged or without rows."""
    path = folder / ROWS_FILE
    if not path.exists():
        raise ValueError(f"{path} does not exist: run dsv41 ladder collect first")
    try:
        rows = [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): run dsv41 ladder collect again") from error
    if not rows:
        raise ValueError(f"{path} has no finished cell: run dsv41 ladder run, then collect")
    return rows


def flat_row(row: Row) -> dict[str, Any]:
    """The row without nesting: n_active, n_prefill and so on."""
    values = dataclasses.asdict(row)
    sizes = values.pop("n")
    return values | {f"n_{name}": sizes[name] for name in N_CONVENTIONS}


def mixed(rows: Iterable[Row]) -> list[str]:
    """What differs among rows that should agree, in words: commit and data."""
    rows = list(rows)
    found: list[str] = []
    for what in ("commit", "data_digest"):
        values = {getattr(row, what) for row in rows}
        if len(values) > 1:
            found.append(f"rows come from {len(values)} different values of {what}: {', '.join(map(str, values))}")
    return found


def _seconds(training: Sequence[dict[str, Any]]) -> float | None:
    """Time of training, over all restarts: tokens of every interval over its speed."""
    total, before = 0.0, 0
    for row in training:
        total += (row["tokens"] - before) / row["tokens_per_second"]
        before = row["tokens"]
    return total or None
