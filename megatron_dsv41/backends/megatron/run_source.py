"""The weights in a training run's folder, tensor by tensor: what `dsv41 convert export RUN DST` and other runs read.

Needs torch alone, whatever layout wrote the checkpoint. Optimizer state is not looked at.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_dsv41.backends.megatron.checkpoints import (
    checkpoint_path,
    checkpoint_step,
    complete_steps,
    refuse_damaged,
)
from megatron_dsv41.checkpoint.distributed import DistributedTensors
from megatron_dsv41.checkpoint.mapping import bind
from megatron_dsv41.config import DSV41Config
from megatron_dsv41.data.files import sha256_of
from megatron_dsv41.data.prepared import read_sidecar
from megatron_dsv41.data.tokenizer import find_tokenizer
from megatron_dsv41.run_config import RUN_FILE, Run, is_run, load_run

START_FILE = "started_from.json"


class RunSource(DistributedTensors):
    """A `StateSource` over the newest complete checkpoint of a run, or that of `step`.

    ValueError when there is none, or when a file or a tensor of the run's model is missing.
    """

    def __init__(self, folder: str | Path, step: int | None = None):
        self.run: Run = load_run(Path(folder) / RUN_FILE)
        self.config: DSV41Config = self.run.architecture()
        refuse_damaged(folder, step)
        steps = complete_steps(folder)
        if not steps:
            raise ValueError(f"{folder} has no complete checkpoint yet")
        if step is not None and step not in steps:
            raise ValueError(f"{folder} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
        self.step = steps[-1] if step is None else step
        super().__init__(checkpoint_path(folder, self.step), [binding.native for binding in bind(self.config)])

    def tokenizer_files(self) -> list[Path]:
        """tokenizer.json of the run's data and what lies beside it. ValueError when it is gone or has changed."""
        sidecar = read_sidecar(next(iter(self.run.data.train)))
        path = find_tokenizer(self.run.data.tokenizer or sidecar.tokenizer)
        if sha256_of(path) != sidecar.tokenizer_sha256:
            raise ValueError(f"{path} is not the tokenizer that the run's data was prepared with")
        beside = path.with_name("tokenizer_config.json")
        return [path, beside] if beside.is_file() else [path]


def run_and_step(path: str | Path) -> tuple[Path, int | None] | None:
    """(RUN, None) for a run's folder, (RUN, 100) for its checkpoint `RUN/iter_0000100`, None for any other path."""
    path = Path(path)
    if is_run(path):
        return path, None
    step = checkpoint_step(path)
    return (path.parent, step) if step is not None and is_run(path.parent) else None


def origin_of(folder: str | Path) -> str | None:
    """The imported or released folder that a run's weights come from, be it through other runs; None: from scratch."""
    record = Path(folder) / START_FILE
    if record.is_file():
        return json.loads(record.read_text())["origin"]
    return load_run(Path(folder) / RUN_FILE).train.init_from


def start_record(weights: Path | None) -> str:
    """The text of a run's `started_from.json`. weights: a folder or a run's checkpoint; None: from scratch.

    It names the origin, so that a run which started from another one can be exported when that is gone.
    """
    found = None if weights is None else run_and_step(weights)
    origin = weights if found is None else origin_of(found[0])
    names = {"weights": weights, "origin": origin}
    return json.dumps({key: None if path is None else str(path) for key, path in names.items()}) + "\n"
