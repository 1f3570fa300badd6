"""A ladder in wandb: one group; one run per cell (the trainer's own, same id after every restart) with its summary row;
one run for the ladder with the table that reports use. Complete offline; `wandb sync` sends it later.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from megatron_dsv41.experiments.collect import Row, collect_cell, flat_row
from megatron_dsv41.experiments.ladder import Ladder
from megatron_dsv41.experiments.ladder_cells import PlannedCell
from megatron_dsv41.experiments.tracking import WandbRun, write_whole
from megatron_dsv41.run_config import Logging
from megatron_dsv41.typed_yaml import build

FACTS = ("commit", "config_digest", "data_digest")


def track_cell(ladder: Ladder, planned: PlannedCell) -> None:
    """Send a finished cell's summary row, once."""
    logging, sent = planned.run.logging, Path(ladder.folder) / "tracked" / planned.id
    if logging.wandb == "off":
        return
    row = collect_cell(planned)
    content = json.dumps(dataclasses.asdict(row), sort_keys=True)
    if sent.exists() and sent.read_text() == content:
        return
    run = _open(ladder, logging, planned.run_folder, logging.name)
    values = flat_row(row)
    run.summarize(
        {k: v for k, v in values.items() if k not in FACTS},
        {k: values[k] for k in FACTS},
    )
    run.close()
    sent.parent.mkdir(parents=True, exist_ok=True)
    write_whole(sent, content)


def track_ladder(ladder: Ladder, rows: Sequence[Row]) -> str | None:
    """Send the table of all rows to the ladder's own run; its id, or None without wandb."""
    logging = build(Logging, ladder.base.get("logging", {}), "base.logging")
    if logging.wandb == "off" or not rows:
        return None
    folder = Path(ladder.folder) / "ladder_run"
    folder.mkdir(parents=True, exist_ok=True)
    run = _open(ladder, logging, folder, f"{ladder.name}/ladder")
    run.table("cells", [flat_row(row) for row in rows])
    run.close()
    return run.id


def _open(ladder: Ladder, logging: Logging, folder: Path, name: str | None) -> WandbRun:
    assert logging.wandb != "off"
    return WandbRun(
        folder,
        logging.wandb,
        project=logging.project,
        entity=logging.entity,
        name=name,
        tags=logging.tags,
        group=ladder.name,
    )
