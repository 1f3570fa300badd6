"""Start from released or imported weights, or from another run's, instead of random ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from megatron_dsv41.backends.megatron.checkpoints import reading, stored_hash
from megatron_dsv41.backends.megatron.run_source import RunSource, run_and_step
from megatron_dsv41.backends.megatron.shadows import logical_state
from megatron_dsv41.backends.megatron.state_dict import local_cut
from megatron_dsv41.checkpoint.convert import open_source
from megatron_dsv41.checkpoint.inventory import check_native, refuse
from megatron_dsv41.checkpoint.mapping import bind
from megatron_dsv41.checkpoint.pieces import row_pieces
from megatron_dsv41.checkpoint.sources import StateSource
from megatron_dsv41.checkpoint.team import Team
from megatron_dsv41.config import DSV41Config


@dataclasses.dataclass(frozen=True)
class Start:
    """What a run starts from: weights, the folder where they lie, and what decides their Engram rows.

    Found and checked by one rank and sent to the others (picklable), which then open what they read and nothing else.
    folder: of a run, that of the checkpoint. hash_digest: of the Engram hash constants; None where it was not kept.
    """

    weights: StateSource
    folder: Path
    hash_digest: str | None

    @classmethod
    def find(cls, path: str | Path, config: DSV41Config) -> Start:
        """What `train.init_from` names now: the newest complete checkpoint of a run, any other folder as it is.

        ValueError where there is none, it is damaged, or it is of another model.
        """
        path = Path(path)
        run = run_and_step(path)  # also for a checkpoint that was removed: its run says which there are
        if run is None and not path.is_dir():
            raise ValueError(f"train.init_from {path} is not a folder with a checkpoint")
        source = open_source(path, config) if run is None else RunSource(*run)
        folder = source.path if isinstance(source, RunSource) else path
        refuse(folder, check_native({name: source.shape(name) for name in source.names()}, bind(config)))
        return cls(source, folder, _hash_digest(source))


def _hash_digest(source: StateSource) -> str | None:
    if isinstance(source, RunSource):
        with reading(source.path, _instead(source.path)):
            return stored_hash(source.path)
    return getattr(getattr(source, "record", None), "hash_digest", None)


def _instead(checkpoint: Path) -> str:
    """What to do without it: its run may go on meanwhile, and remove it."""
    return (
        f"start again from {checkpoint.parent} (its newest), or name another one in train.init_from; a run that goes "
        "on removes all but its newest (checkpoint.keep)"
    )


def load_start(stages: list[Any], start: Start) -> list[Any]:
    """`load_weights` of every rank. Collective: where one cannot read its part, everyone raises its error.

    ValueError when files of a run's checkpoint have vanished since it was found.
    """

    def load() -> list[Any]:
        if not isinstance(start.weights, RunSource):
            return load_weights(stages, start.weights)
        with reading(start.folder, _instead(start.folder), errors=(OSError,)):
            return load_weights(stages, start.weights)

    return Team.of_default_group().together(load)


@torch.no_grad()
def load_weights(stages: list[Any], source: StateSource) -> list[Any]:
    """Copy this rank's part of every tensor into the stages (DSV41Model) and return them; no more is read."""
    for stage in stages:
        for name, target in logical_state(stage).items():
            _fill(target, source, name, local_cut(source.shape(name), target, stage.layout))
        for table in stage.engram_tables:
            table.fill(lambda rows, name=table.name: source.read(name, rows))
    return stages


def _fill(target: torch.Tensor, source: StateSource, name: str, cut: tuple[slice, ...]) -> None:
    """Copy a part of a tensor, some rows at a time: an Engram table may be as large as the memory of a host."""
    first = cut[0].start
    for rows in row_pieces(target.shape, stacked=target.dim() > 2):
        part = source.read(name, slice(first + rows.start, first + rows.stop), *cut[1:])
        target[rows].copy_(part)
