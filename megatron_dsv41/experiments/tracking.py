"""What a run leaves to look at: metrics.jsonl beside its checkpoints, and one wandb run across restarts.

The only importer of wandb, and only when a run asks for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

METRICS_FILE = "metrics.jsonl"
RUN_ID_FILE = "wandb_run_id"


class Metrics:
    """One JSON object per line and per logged step, each step once: a resume takes back the lines after its step."""

    def __init__(self, folder: str | Path, resume_step: int):
        self.path = Path(folder) / METRICS_FILE
        kept = [row for row in read_metrics(folder) if row["step"] <= resume_step]
        _write_whole(self.path, "".join(json.dumps(row) + "\n" for row in kept))
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
        config: Mapping[str, Any] | None = None,
    ):
        import wandb

        folder = Path(folder)
        id_file = folder / RUN_ID_FILE
        if not id_file.exists():
            _write_whole(id_file, uuid.uuid4().hex[:12])
        self.id = id_file.read_text().strip()
        self.run = wandb.init(
            id=self.id,
            resume="allow",
            mode=mode,
            project=project,
            entity=entity,
            name=name,
            tags=list(tags),
            config=dict(config or {}),
            dir=str(folder),
        )
        self.run.define_metric("tokens", hidden=True)
        self.run.define_metric("*", step_metric="tokens")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Send one row."""
        self.run.log(dict(values), step=step)

    def close(self, exit_code: int = 0) -> None:
        """Finish the run."""
        self.run.finish(exit_code=exit_code)


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
