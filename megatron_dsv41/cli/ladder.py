"""`dsv41 ladder`: scaling ladders, from one file."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_dsv41.experiments.ladder import Ladder, load_ladder
from megatron_dsv41.experiments.ladder_cells import PlannedCell, plan_cells

HELP = "scaling ladders: plan, run, status, collect, fit, predict, plot, from one file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-command per step of a ladder; all take the ladder file first."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    parsers: dict[str, argparse.ArgumentParser] = {}
    for name, (what, _) in ACTIONS.items():
        parsers[name] = actions.add_parser(name, help=what, description=what)
        parsers[name].add_argument("file", metavar="LADDER.yaml", help="ladder file")
        if name != "run":
            parsers[name].add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    run = parsers["run"].add_argument
    run("--cells", metavar="GLOB", default="*", help="only cells whose name matches, such as 'base-d8-*'")
    run(
        "--slots",
        type=int,
        help="cells at a time (default: GPUs / hardware.ranks, on CPUs 1); cells of one rank share GPUs beyond that",
    )
    run(
        "--launcher",
        choices=("auto", "srun"),
        default="auto",
        help="auto (default): python or torchrun on this machine; srun: for use in a Slurm job, as --slurm writes it",
    )
    run("--slurm", action="store_true", help="write one Slurm script per unfinished cell instead of running")
    run("--submit", action="store_true", help="with --slurm: also sbatch them")


def run(args: argparse.Namespace) -> int:
    """Do one action; 0, or 1 when it says no."""
    return ACTIONS[args.action][1](args, load_ladder(args.file))


def _plan(args: argparse.Namespace, ladder: Ladder) -> int:
    from megatron_dsv41.cli.ladder_tables import print_plan
    from megatron_dsv41.cli.plan import layout_of
    from megatron_dsv41.experiments.ladder_plan import describe_ladder

    report = describe_ladder(ladder, plan_cells(ladder), layout_of)
    _show(args, report, print_plan)
    return 1 if report["problems"] else 0


def _run(args: argparse.Namespace, ladder: Ladder) -> int:
    from megatron_dsv41.cli.plan import layout_of
    from megatron_dsv41.experiments.collect import start_facts
    from megatron_dsv41.experiments.ladder_plan import check_sharing
    from megatron_dsv41.experiments.ladder_run import Machine, Runner
    from megatron_dsv41.experiments.ladder_tracking import track_cell

    _check_options(args)
    cells = [cell for cell in plan_cells(ladder) if fnmatch.fnmatch(cell.id, args.cells)]
    if not cells:
        raise ValueError(f"no cell matches --cells {args.cells!r}: dsv41 ladder plan lists them")
    if args.slurm:
        return _write_slurm(args, ladder, cells)
    devices = _devices() if args.launcher == "auto" else ()
    ranks = ladder.hardware.ranks
    if devices and len(devices) < ranks:
        raise ValueError(f"hardware.ranks {ranks} exceeds the {len(devices)} GPUs of this machine")
    slots = max(1, len(devices) // ranks) if args.slots is None else args.slots
    # More slots than cells stay empty: they share nothing.
    machine = Machine(slots=min(slots, len(cells)), devices=devices, launcher=args.launcher)
    if devices and ranks == 1 and machine.slots > len(devices):
        check_sharing(ladder, cells, layout_of, -(-machine.slots // len(devices)))
    failed = Runner(
        ladder,
        machine,
        facts=start_facts(),
        digest=_data_digest,
        finished=lambda planned: track_cell(ladder, planned),
        say=lambda text: print(text, flush=True),
    ).run(cells)
    unfinished = f"; failed: {' '.join(failed)}" if failed else ""
    print(f"{len(cells) - len(failed)} of {len(cells)} cells finished{unfinished}")
    return 1 if failed else 0


def _check_options(args: argparse.Namespace) -> None:
    """ValueError for options of `run` that would not be read."""
    if args.submit and not args.slurm:
        raise ValueError("--submit sends the scripts of --slurm: give both")
    if args.slurm and (args.slots is not None or args.launcher != "auto"):
        raise ValueError("--slurm writes a script per cell, which Slurm runs as it likes: no --slots, no --launcher")


def _write_slurm(args: argparse.Namespace, ladder: Ladder, cells: Sequence[PlannedCell]) -> int:
    from megatron_dsv41.experiments.ladder_run import write_slurm_script
    from megatron_dsv41.experiments.ladder_state import State, status_of

    unfinished = [cell for cell in cells if status_of(cell).state is not State.FINISHED]
    if not unfinished:
        print(f"all {len(cells)} cells are finished: no script is written", file=sys.stderr)
    for cell in unfinished:
        script = write_slurm_script(ladder, Path(args.file).absolute(), cell)
        print(script, flush=True)
        if args.submit:
            subprocess.run(["sbatch", str(script)], check=True)
    return 0


def _status(args: argparse.Namespace, ladder: Ladder) -> int:
    from megatron_dsv41.cli.ladder_tables import print_status
    from megatron_dsv41.experiments.ladder_state import status_of

    rows = [{"cell": cell.id, **dataclasses.asdict(status_of(cell))} for cell in plan_cells(ladder)]
    _show(args, {"name": ladder.name, "cells": rows}, print_status)
    return 0


def _collect(args: argparse.Namespace, ladder: Ladder) -> int:
    from megatron_dsv41.cli.ladder_tables import print_rows
    from megatron_dsv41.experiments.collect import collect, flat_row, mixed, write_rows
    from megatron_dsv41.experiments.ladder_tracking import track_ladder

    cells = plan_cells(ladder)
    rows = collect(cells)
    files = write_rows(Path(ladder.folder), rows)
    track_ladder(ladder, rows)
    report = {
        "rows": [flat_row(row) for row in rows],
        "missing": len(cells) - len(rows),
        "differences": mixed(rows),
        "files": [str(path) for path in files],
    }
    _show(args, report, print_rows)
    return 0


def _fit(args: argparse.Namespace, ladder: Ladder) -> int:
    from megatron_dsv41.cli.ladder_fits import print_fits
    from megatron_dsv41.experiments.collect import read_rows
    from megatron_dsv41.experiments.fit_report import fit_report

    report = fit_report(read_rows(Path(ladder.folder)))
    _show(args, report, print_fits)
    return 0 if any("refused" not in fit for fit in report["loss_nd"].values()) else 1


def _predict(args: argparse.Namespace, ladder: Ladder) -> int:
    from megatron_dsv41.cli.ladder_fits import print_predictions
    from megatron_dsv41.experiments.collect import read_rows
    from megatron_dsv41.experiments.fit_report import predict_report

    report = predict_report(read_rows(Path(ladder.folder)))
    _show(args, report, print_predictions)
    return 0 if any("refused" not in held for held in report["largest"].values()) else 1


def _plot(args: argparse.Namespace, ladder: Ladder) -> int:
    from megatron_dsv41.experiments.collect import read_rows
    from megatron_dsv41.experiments.ladder_report import write_report

    written = write_report(ladder, plan_cells(ladder), read_rows(Path(ladder.folder)))
    _show(args, {"files": [str(path) for path in written]}, lambda report: print("\n".join(report["files"])))
    return 0


ACTIONS: dict[str, tuple[str, Callable[[argparse.Namespace, Ladder], int]]] = {
    "plan": ("show rungs, parameters, tokens, FLOPs, memory and hours of every cell; starts nothing", _plan),
    "run": ("start missing cells, resume interrupted ones, skip finished ones", _run),
    "status": ("show how far every cell is", _status),
    "collect": ("write one row per finished cell: rows.jsonl and rows.csv in the ladder's folder", _collect),
    "fit": ("fit L(N, D), L(C), iso-FLOP minima and sweeps to the collected rows", _fit),
    "predict": ("predict held-out rungs, and what every arm is worth in compute", _predict),
    "plot": ("draw all of it as PNG and SVG, with one HTML page", _plot),
}


def _show(args: argparse.Namespace, report: dict[str, Any], table: Callable[[dict[str, Any]], None]) -> None:
    if args.json:
        print(json.dumps(report))
    else:
        table(report)


def _data_digest(planned: PlannedCell) -> str:
    """Of the prepared files of a cell, training and validation."""
    from megatron_dsv41.data.prepared import cache_key

    return cache_key([*planned.run.data.train, *planned.run.data.valid])


def _devices() -> tuple[str, ...]:
    """GPUs of this machine as values for CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # As CUDA reads it: what stands behind an empty or negative number is not there.
        return tuple(itertools.takewhile(lambda part: part and part[0] != "-", map(str.strip, visible.split(","))))
    import torch

    return tuple(map(str, range(torch.cuda.device_count())))
