"""A training run's checkpoint as a folder in the released layout: from the command line, or while training goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from megatron_dsv41.backends.megatron.run_source import RunSource, check_origin, origin_of
from megatron_dsv41.checkpoint.convert import export_checkpoint
from megatron_dsv41.checkpoint.jobs import ALONE, work_folder
from megatron_dsv41.checkpoint.pieces import GIB, Effort
from megatron_dsv41.checkpoint.team import Team
from megatron_dsv41.run_config import Run

RANK_MEMORY = 2 * GIB  # of an export while training, as `Effort` counts it: half of it is there already


def export_run(
    folder: str | Path,
    dst: str | Path,
    *,
    step: int | None = None,
    like: str | Path | None = None,
    team: Team = ALONE,
    **options: Any,
) -> tuple[int, str | None]:
    """Export the newest complete checkpoint, or that of `step`, the tokenizer of the run's data beside it.

    like: where the model came from, default what the run started from. options: of `export_checkpoint`. Returns the
    step, and why the tokenizer is not there (None: it is). Collective over the team, of which one process looks at
    the run and its origin.
    """

    def find() -> tuple[RunSource, list[Path], str | None, str | Path | None]:
        source = RunSource(folder, step)
        try:
            tokenizer, missing = source.tokenizer_files(), None
        except ValueError as error:  # the weights are exported all the same; the run's data may lie elsewhere by now
            tokenizer, missing = [], str(error)
        origin = like
        if origin is None:
            origin = origin_of(folder)
            check_origin(origin, folder)
        return source, tokenizer, missing, origin

    source, tokenizer, missing, origin = team.first(find)
    export_checkpoint(source, dst, config=source.config, like=origin, beside=tokenizer, team=team, **options)
    return source.step, missing


def export_due(run: Run, step: int) -> bool:
    """Whether the checkpoint of this step is to be exported."""
    interval = run.checkpoint.export_interval
    return interval is not None and (step % interval == 0 or step == run.steps)


def export_folder(run: Run, step: int) -> Path:
    """Where the export of a step lies, whole or not at all."""
    return Path(run.checkpoint.folder) / "exports" / f"step_{step:07d}"


def export_step(run: Run, step: int, team: Team) -> Path:
    """Export a saved step of the run that is going on, every rank writing files of its own. Collective.

    An export of the same step, from before a resume, is replaced.
    """
    target = export_folder(run, step)

    def clear() -> None:
        for folder in (target, work_folder(target)):
            if folder.exists():
                shutil.rmtree(folder)

    team.first(clear)
    effort = Effort(max_memory=RANK_MEMORY * team.local_size, workers=2)
    export_run(
        run.checkpoint.folder, target, step=step, storage=run.checkpoint.export_storage, effort=effort, team=team
    )
    return target
