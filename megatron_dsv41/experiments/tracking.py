"""What a run leaves to look at: metrics.jsonl beside its checkpoints, and one wandb run across restarts.

The only importer of wandb, and only when a run asks for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

METRICS_FILE = "metrics.jsonl"
RUN_ID_FILE = "wandb_run_id"


class Metrics:
    """One JSON object per line and per logged step, each step once: a resume takes back the lines after its step."""

    def __init__(self, folder: str | Path, resume_step: int):
        self.path = Path(folder) / METRICS_FILE
        kept = [row for row in read_metrics(folder) if row["step"] <= resume_step]
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self.stream = self.path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one line; on disk when this returns."""
        self.stream.write(json.dumps({"step": step, **values}) + "\n")
        self.stream.flush()
        os.fsync(self.stream.fileno())

    def close(self) -> None:
        """Close the file."""
        self.stream.close()


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """All complete lines of a run's metrics file; the torn last line of a killed run is left out."""
    path = Path(folder) / METRICS_FILE
    rows: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


class WandbRun:
    """A wandb run that goes on after a restart: its id lives in the run's folder.

    Rows carry the optimizer step as wandb's own step, so the rows that a killed run had already sent are dropped by
    wandb when the resumed run sends them again; `tokens` is the default x axis. ImportError when wandb is missing.
    """

    def __init__(
        self,
        folder: str | Path,
        mode: Literal["online", "offline"],
        *,
        project: str,
        entity: str | None = None,
        name: str | None = None,
        tags: tuple[str, ...] = (),
        group: str | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        import wandb

        folder = Path(folder)
        id_file = folder / RUN_ID_FILE
        if not id_file.exists():
            write_whole(id_file, uuid.uuid4().hex[:12])
        self.id = id_file.read_text().strip()
        self.run = wandb.init(
            id=self.id,
            resume="allow",
            mode=mode,
            project=project,
            entity=entity,
            name=name,
            tags=list(tags),
            group=group,  # None: what WANDB_RUN_GROUP says
            config=dict(config or {}),
            dir=str(folder),
        )
        self.run.define_metric("tokens", hidden=True)
        self.run.define_metric("*", step_metric="tokens")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Send one row."""
        self.run.log(dict(values), step=step)

    def summarize(self, row: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Put a row into the run's summary and facts into its config."""
        run: Any = self.run
        run.summary.update(dict(row))
        run.config.update(dict(facts), allow_val_change=True)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log rows of equal keys as a table, for reports."""
        import wandb

        columns: list[Any] = list(rows[0])
        self.run.log({name: wandb.Table(columns=columns, data=[[row[c] for c in columns] for row in rows])})

    def close(self, exit_code: int = 0) -> None:
        """Finish the run."""
        self.run.finish(exit_code=exit_code)


def write_whole(path: Path, text: str) -> None:
    """Replace `path` by `text`: a reader or a crash sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
