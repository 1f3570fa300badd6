"""The cells of a ladder: single training runs, each a point of arm x depth x tokens x seed, made by the dial."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import yaml

from megatron_dsv41.experiments import ladder_rules
from megatron_dsv41.experiments.flops import active_parameters, flops_per_token
from megatron_dsv41.experiments.ladder import BASE, Ladder
from megatron_dsv41.run_config import Model, Run, run_from_dict
from megatron_dsv41.typed_yaml import build


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One training run of a ladder."""

    arm: str
    depth: int
    seed: int
    kind: Literal["tokens", "flops"]
    size: float  # tokens per active parameter, or training FLOPs
    lr_factor: float = 1.0
    batch_factor: float = 1.0

    @property
    def id(self) -> str:
        """Name of the cell's files and of its wandb run."""
        amount = f"x{self.size:g}" if self.kind == "tokens" else f"c{self.size:.3g}".replace("+", "")
        factors = [f"{key}{value:g}" for key, value in (("lr", self.lr_factor), ("b", self.batch_factor)) if value != 1]
        return "-".join([self.arm, f"d{self.depth}", amount, *factors, f"s{self.seed}"])


@dataclasses.dataclass(frozen=True)
class PlannedCell:
    """A cell with its run and where its files lie."""

    cell: Cell
    run: Run
    folder: Path  # of the ladder

    @property
    def id(self) -> str:
        """As of the cell."""
        return self.cell.id

    @property
    def config_file(self) -> Path:
        """The cell's run file."""
        return self.folder / "configs" / f"{self.id}.yaml"

    @property
    def run_folder(self) -> Path:
        """Checkpoints and metrics."""
        return Path(self.run.checkpoint.folder)

    @property
    def config_digest(self) -> str:
        """Changes with every setting that can change the result; not with where files lie or how it is logged.

        Data are in it by their weights alone: what they hold has a digest of its own.
        """
        settings = {k: v for k, v in self.run.to_dict().items() if k not in ("checkpoint", "logging")}
        data = self.run.data
        settings["data"] = [data.seq_length, list(data.train.values()), list(data.valid.values())]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def cells_of(ladder: Ladder) -> list[Cell]:
    """All cells, small ones first within an arm, the base arm first."""
    cells: list[Cell] = []
    for name in (BASE, *ladder.arms):
        arm = ladder.arm(name)
        depths, seeds = arm.depths or ladder.depths, arm.seeds or ladder.seeds
        sizes = arm.tokens_per_parameter or ladder.tokens_per_parameter
        for depth in sorted(depths):
            cells += [_token_cell(name, depth, size, seed) for size in sizes for seed in seeds]
    for budget in ladder.iso_flops.budgets:
        for depth in sorted(ladder.iso_flops.depths or ladder.depths):
            cells += [Cell(arm=BASE, depth=depth, seed=s, kind="flops", size=budget) for s in ladder.seeds]
    return list(dict.fromkeys([*cells, *_swept(ladder)]))


def plan_cells(ladder: Ladder) -> list[PlannedCell]:
    """Every cell with its run. ValueError naming the cell whose run cannot be."""
    return [plan_cell(ladder, cell) for cell in cells_of(ladder)]


def plan_cell(ladder: Ladder, cell: Cell) -> PlannedCell:
    """The run of one cell."""
    try:
        return PlannedCell(cell, _run_of(ladder, cell), Path(ladder.folder))
    except ValueError as error:
        raise ValueError(f"cell {cell.id}: {error}") from error


def _run_of(ladder: Ladder, cell: Cell) -> Run:
    values = _shape_values(ladder, cell)
    overrides = [f"{key}={yaml.safe_dump(value)}" for key, value in ladder.arm(cell.arm).overrides.items()]
    shape = run_from_dict(values, overrides)  # all but what follows from the model's size
    rules, seq_length = ladder.arm_rules(cell.arm), shape.data.seq_length
    per_pass = seq_length * shape.batch.micro * _data_parallel(ladder, shape)
    tokens = _tokens(cell, shape)
    batch = ladder_rules.batch_tokens(rules, tokens, per_pass, cell.batch_factor)
    steps = ladder_rules.steps(rules, tokens, batch)
    lr = ladder_rules.learning_rate(rules, cell.depth) * cell.lr_factor
    values["batch"]["sequences"] = batch // seq_length
    values["train"]["steps"] = steps
    values["optimizer"] = {**ladder.base.get("optimizer", {}), "lr": lr}
    values["schedule"] = ladder_rules.schedule(rules, steps, lr)
    values["eval"] = {**ladder.base.get("eval", {}), "interval": steps // rules.evals}
    values["checkpoint"]["interval"] = max(steps // rules.checkpoints, 1)
    return run_from_dict(values, overrides)


def _shape_values(ladder: Ladder, cell: Cell) -> dict[str, Any]:
    """The run file of a cell, with one step of one sequence."""
    rules, base, folder = ladder.arm_rules(cell.arm), ladder.base, Path(ladder.folder)
    model = build(Model, base.get("model", {}), "base.model")
    dial = ladder_rules.model_settings(rules, cell.depth)
    dial = json.loads(json.dumps(dial))  # lists for tuples, as a run file has them
    values: dict[str, Any] = {key: dict(section) for key, section in base.items()}
    return values | {
        "model": {"preset": model.preset, "path": model.path, "overrides": {**model.overrides, **dial}},
        "batch": {**base.get("batch", {}), "sequences": 1},
        "train": {**base.get("train", {}), "steps": 1, "seed": cell.seed},
        "checkpoint": {"keep": 1, **base.get("checkpoint", {}), "folder": str(folder / "cells" / cell.id)},
        "logging": {**base.get("logging", {}), "name": f"{ladder.name}/{cell.id}"},
    }


def _tokens(cell: Cell, shape: Run) -> float:
    """Training tokens that the cell asks for, before rounding to whole steps."""
    config = shape.architecture()
    if cell.kind == "tokens":
        return cell.size * active_parameters(config).decode
    return cell.size / flops_per_token(config, shape.data.seq_length, shape.phase).training_total


def _data_parallel(ladder: Ladder, run: Run) -> int:
    parallel, ranks = run.parallel, ladder.hardware.ranks
    model_size = parallel.tp * parallel.pp * parallel.cp
    if ranks % model_size:
        raise ValueError(f"hardware.ranks {ranks} is not a multiple of tp x pp x cp = {model_size}")
    return ranks // model_size


def _token_cell(arm: str, depth: int, size: float, seed: int, lr: float = 1.0, batch: float = 1.0) -> Cell:
    return Cell(arm=arm, depth=depth, seed=seed, kind="tokens", size=size, lr_factor=lr, batch_factor=batch)


def _swept(ladder: Ladder) -> list[Cell]:
    """Cells of the learning-rate and batch sweeps, at the first token multiple."""
    sweep, cells = ladder.sweep, list[Cell]()
    points = [(lr, 1.0) for lr in sweep.lr if lr != 1] + [(1.0, batch) for batch in sweep.batch if batch != 1]
    for depth in sorted(sweep.depths or ladder.depths) if points else ():
        for lr, batch in points:
            size = ladder.tokens_per_parameter[0]
            cells += [_token_cell(BASE, depth, size, seed, lr, batch) for seed in ladder.seeds]
    return cells
