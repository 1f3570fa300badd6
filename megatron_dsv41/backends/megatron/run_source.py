"""The weights in a training run's folder, tensor by tensor: what `dsv41 convert export RUN DST` and other runs read.

Needs torch alone, whatever layout wrote the checkpoint. Optimizer state is not looked at.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from megatron_dsv41.backends.megatron.checkpoints import (
    checkpoint_path,
    checkpoint_step,
    complete_steps,
    published_steps,
    refuse_damaged,
)
from megatron_dsv41.checkpoint.distributed import DistributedTensors
from megatron_dsv41.checkpoint.mapping import bind
from megatron_dsv41.config import DSV41Config
from megatron_dsv41.data.files import sha256_of, write_whole
from megatron_dsv41.data.prepared import read_sidecar
from megatron_dsv41.data.tokenizer import find_tokenizer
from megatron_dsv41.run_config import RUN_FILE, Run, is_run, load_run

START_FILE = "started_from.json"


class RunSource(DistributedTensors):
    """A `StateSource` over the newest complete checkpoint of a run, or that of `step`.

    ValueError when there is none, or when a file or a tensor of the run's model is missing.
    """

    def __init__(self, folder: str | Path, step: int | None = None):
        try:
            self.run: Run = load_run(Path(folder) / RUN_FILE)
            self.config: DSV41Config = self.run.architecture()
        except ValueError as error:
            raise ValueError(f"{Path(folder) / RUN_FILE}: {error}") from error
        steps = published_steps(folder)
        if not steps:
            raise ValueError(f"{folder} has no complete checkpoint yet")
        if step is not None and step not in steps:
            found = ", ".join(map(str, complete_steps(folder)))
            raise ValueError(f"{folder} has no checkpoint of step {step}; it has {found or 'none'}")
        self.step = steps[-1] if step is None else step
        refuse_damaged(folder, self.step)
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
    """(RUN, None) for a run's folder, (RUN, 100) for its checkpoint `RUN/iter_0000100`, None for any other path.

    A link to a checkpoint is as good as its own path.
    """
    for place in (Path(path), Path(path).resolve()):
        if is_run(place):
            return place, None
        step = checkpoint_step(place)
        if step is not None and is_run(place.parent):
            return place.parent, step
    return None


def named_checkpoint(path: str | Path, step: int | None) -> tuple[Path, int | None] | None:
    """`run_and_step`, where a step may be asked for beside the path. ValueError where the path names another one."""
    found = run_and_step(path)
    if found is None or step is None:
        return found
    if found[1] not in (None, step):
        raise ValueError(
            f"{path} is the checkpoint of step {found[1]}, and asked is step {step}: leave one of them out"
        )
    return found[0], step


def origin_of(folder: str | Path) -> str | None:
    """The imported or released folder that a run's weights come from, be it through other runs; None: from scratch.

    ValueError where the run's record, which users may write, does not say it.
    """
    record = Path(folder) / START_FILE
    if record.is_file():
        try:
            return json.loads(record.read_text())["origin"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{record} does not say where the weights come from ({type(error).__name__}: {error}): write "
                '{"origin": "FOLDER"} into it, or {"origin": null} for a run from scratch'
            ) from error
    start = load_run(Path(folder) / RUN_FILE).train.init_from
    found = None if start is None else run_and_step(start)
    if found is None:
        return start
    return None if found[0].resolve() == Path(folder).resolve() else origin_of(found[0])


def check_origin(origin: str | None, folder: str | Path) -> None:
    """ValueError with what to do when the origin of a run in `folder` is not there, and exports need it."""
    if origin is not None and not (Path(origin) / "config.json").is_file():
        raise ValueError(
            f"the weights of {folder} come from {origin}, which is no checkpoint folder (any more), and exports take "
            'scales, drafts and side files from it: bring it back, or write where it lies now as "origin" into '
            f"{Path(folder) / START_FILE}; dsv41 convert export takes --like FOLDER, too"
        )


@dataclasses.dataclass(frozen=True)
class StartRecord:
    """A run's `started_from.json`: what its weights are (a folder or a run's checkpoint) and their `origin_of`.

    None: from scratch. It names the origin, so that a run which started from another one can be exported when that is
    gone. Paths are absolute: who reads them may be elsewhere.
    """

    weights: str | None
    origin: str | None

    @classmethod
    def of(cls, weights: Path | None) -> StartRecord:
        """The record of a run that starts from `weights` now."""
        found = None if weights is None else run_and_step(weights)
        origin = weights if found is None else origin_of(found[0])
        return cls(*(None if path is None else str(Path(path).absolute()) for path in (weights, origin)))

    def write(self, folder: str | Path) -> None:
        """Into a run's folder."""
        write_whole(Path(folder) / START_FILE, (json.dumps(dataclasses.asdict(self)) + "\n").encode())
