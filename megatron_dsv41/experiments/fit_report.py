"""Everything that `ladder fit` and `ladder predict` say, as plain values; a refusal stands where its number would."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_dsv41.experiments.collect import Row
from megatron_dsv41.experiments.fit import Fit, Refused, cells_c, cells_nd, fit_cells, main_rows
from megatron_dsv41.experiments.fit_minima import (
    fit_minimum_law,
    fit_parabola,
    iso_flop_profiles,
    sweep_profiles,
)
from megatron_dsv41.experiments.fit_predict import (
    HeldOut,
    compute_multiplier,
    leave_largest_out,
    leave_one_out,
)
from megatron_dsv41.experiments.ladder import BASE
from megatron_dsv41.experiments.ladder_plan import N_CONVENTIONS
from megatron_dsv41.experiments.laws import log_residuals

# What a sweep varies -> value of a row
SWEPT: dict[str, Callable[[Row], float]] = {"lr": lambda row: row.lr, "batch": lambda row: row.batch_tokens}


def fit_report(rows: Sequence[Row], conventions: Sequence[str] = N_CONVENTIONS) -> dict[str, Any]:
    """L(N, D) per convention, L(C) per token multiple, iso-FLOP minima, laws of learning rate and batch."""
    base = main_rows(rows, BASE)
    sizes = sorted({row.size for row in base if row.kind == "tokens"})
    profiles = iso_flop_profiles(rows)
    return {
        "loss_nd": {n: _or_refusal(lambda n=n: _described(fit_cells(cells_nd(base, n)))) for n in conventions},
        "loss_c": {f"{size:g}": _or_refusal(lambda s=size: _curve(base, s)) for size in sizes},
        "iso_flops": {n: _minima(profiles, lambda row, n=n: row.n[n]) for n in conventions if profiles},
        "sweeps": {
            what: _minima(found, value) for what, value in SWEPT.items() if (found := sweep_profiles(rows, what))
        },
    }


def predict_report(rows: Sequence[Row], conventions: Sequence[str] = N_CONVENTIONS) -> dict[str, Any]:
    """Held-out errors per convention, and every arm's effective compute multiplier."""
    arms = [arm for arm in dict.fromkeys(row.arm for row in rows) if arm != BASE]
    return {
        "largest": {n: _or_refusal(lambda n=n: _held_out(leave_largest_out(rows, n))) for n in conventions},
        "one_out": {n: _or_refusal(lambda n=n: _held_out(leave_one_out(rows, n))) for n in conventions},
        "arms": {a: _or_refusal(lambda a=a: dataclasses.asdict(compute_multiplier(rows, a))) for a in arms},
    }


def _or_refusal(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return make()
    except Refused as refusal:
        return {"refused": str(refusal)}


def _curve(base: Sequence[Row], size: float) -> dict[str, Any]:
    return _described(fit_cells(cells_c([row for row in base if row.kind == "tokens" and row.size == size])))


def _described(fit: Fit) -> dict[str, Any]:
    residuals = log_residuals(fit.law, fit.cells.variables, fit.cells.loss)
    ends = fit.intervals()
    return {
        "parameters": {
            name: {"value": value, "low": ends[name][0], "high": ends[name][1]}
            for name, value in fit.law.as_published().items()
        },
        "law": dataclasses.asdict(fit.law),
        "cells": len(fit.cells),
        "mean_residual": float(np.abs(residuals).mean()),
        "largest_residual": float(np.abs(residuals).max()),
        "noise": fit.noise,
        "lack_of_fit_p": fit.lack_of_fit,
        "problems": list(fit.problems),
        "remarks": list(fit.remarks),
    }


def _minima(profiles: dict[float, list[Row]], value: Callable[[Row], float]) -> dict[str, Any]:
    return {
        "profiles": {
            f"{key:g}": _or_refusal(
                lambda found=found: dataclasses.asdict(fit_parabola((value(row), row.loss) for row in found))
            )
            for key, found in profiles.items()
        },
        "law": _or_refusal(lambda: dataclasses.asdict(fit_minimum_law(profiles, value))),
    }


def _held_out(held: HeldOut) -> dict[str, Any]:
    return {
        "predictions": [dataclasses.asdict(p) | {"error": p.error} for p in held.predictions],
        "signed": held.signed,
        "unsigned": held.unsigned,
        "problems": list(held.problems),
    }
