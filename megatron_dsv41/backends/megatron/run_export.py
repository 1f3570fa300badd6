"""A training run's checkpoint as a folder in the released layout: from the command line, or while training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_dsv41.backends.megatron.run_source import RunSource
from megatron_dsv41.checkpoint.convert import export_checkpoint


def export_run(
    folder: str | Path, dst: str | Path, *, step: int | None = None, like: str | Path | None = None, **options: Any
) -> tuple[int, str | None]:
    """Export the newest complete checkpoint, or that of `step`, the tokenizer of the run's data beside it.

    like: where the model came from, default what the run started from. options: of `export_checkpoint`. Returns the
    step, and why the tokenizer is not there (None: it is).
    """
    source = RunSource(folder, step)
    try:
        tokenizer, missing = source.tokenizer_files(), None
    except ValueError as error:  # the weights are exported all the same; the run's data may lie elsewhere by now
        tokenizer, missing = [], str(error)
    like = like or source.run.train.init_from
    export_checkpoint(source, dst, config=source.config, like=like, beside=tokenizer, **options)
    return source.step, missing
