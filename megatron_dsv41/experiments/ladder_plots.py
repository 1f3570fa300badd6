"""Pictures of a ladder from its rows and reports, as PNG and SVG. A refused fit leaves its points without a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dsv41.experiments.collect import Row
from megatron_dsv41.experiments.fit import main_rows
from megatron_dsv41.experiments.ladder import BASE
from megatron_dsv41.experiments.laws import Law
from megatron_dsv41.experiments.plots import COLOURS, new_axes, save_axes

LOSS = "validation loss (nats per token)"
FORMATS = ("png", "svg")


def plot_curves(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], folder: Path) -> list[Path]:
    """Validation loss over training tokens, one line per cell."""
    axes = new_axes("validation loss of every cell", "tokens", LOSS)
    axes.set_xscale("log")
    for number, (name, (tokens, loss)) in enumerate(curves.items()):
        axes.plot(tokens, loss, color=COLOURS[number % len(COLOURS)], linewidth=1, marker=".", label=name, alpha=0.8)
    if 0 < len(curves) <= 12:
        axes.legend(frameon=False, fontsize=7)
    return _write(axes, folder, "curves")


def plot_loss_nd(rows: Sequence[Row], fitted: dict[str, Any], convention: str, folder: Path) -> list[Path]:
    """Loss over N, one colour per token multiple, with the fitted law along each multiple."""
    base = [row for row in main_rows(rows, BASE) if row.kind == "tokens"]
    axes = new_axes(f"L(N, D), N by {convention} parameters", f"N ({convention})", LOSS)
    axes.set_xscale("log")
    law = _law(fitted)
    for number, size in enumerate(sorted({row.size for row in base})):
        group = sorted((row for row in base if row.size == size), key=lambda row: row.n[convention])
        n = np.array([row.n[convention] for row in group])
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(n, [row.loss for row in group], "o", color=colour, markersize=4, label=f"{size:g} tokens/parameter")
        if law is not None:
            axes.plot(n, law(n, np.array([row.tokens for row in group])), color=colour, linewidth=1)
    axes.legend(frameon=False)
    return _write(axes, folder, f"loss_nd_{convention}")


def plot_loss_c(rows: Sequence[Row], curves: dict[str, Any], folder: Path) -> list[Path]:
    """Loss over compute of every arm, with the base's L(C) at every token multiple."""
    axes = new_axes("loss over training compute", "training FLOPs", LOSS)
    axes.set_xscale("log")
    for number, arm in enumerate(dict.fromkeys(row.arm for row in rows)):
        group = main_rows(rows, arm)
        colour = COLOURS[number % len(COLOURS)]
        axes.plot([r.flops for r in group], [r.loss for r in group], "o", color=colour, markersize=4, label=arm)
    for size, curve in curves.items():
        law = _law(curve)
        flops = [row.flops for row in main_rows(rows, BASE) if f"{row.size:g}" == size and row.kind == "tokens"]
        if law is not None:
            grid = np.geomspace(min(flops), max(flops), 60)
            axes.plot(grid, law(grid), color=COLOURS[0], linewidth=1, alpha=0.6)
    axes.legend(frameon=False)
    return _write(axes, folder, "loss_c")


def plot_residuals(rows: Sequence[Row], fitted: dict[str, Any], convention: str, folder: Path) -> list[Path]:
    """Relative residuals of L(N, D) over N."""
    law, base = _law(fitted), main_rows(rows, BASE)
    if law is None:
        return []
    n, d = np.array([row.n[convention] for row in base]), np.array([row.tokens for row in base])
    axes = new_axes("residuals of L(N, D)", f"N ({convention})", "measured / fitted - 1 (%)")
    axes.set_xscale("log")
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.plot(n, 100 * (np.array([row.loss for row in base]) / law(n, d) - 1), "o", color=COLOURS[0], markersize=4)
    return _write(axes, folder, "residuals")


def plot_predictions(held: dict[str, Any], folder: Path, name: str) -> list[Path]:
    """Predicted over measured loss of held-out points, with intervals."""
    points = held.get("predictions", [])
    if not points:
        return []
    axes = new_axes(f"prediction of held-out cells: {name.replace('_', ' ')}", f"measured {LOSS}", "predicted")
    measured = [p["measured"] for p in points]
    spread = [[p["predicted"] - p["low"] for p in points], [p["high"] - p["predicted"] for p in points]]
    axes.errorbar(measured, [p["predicted"] for p in points], yerr=np.abs(spread), fmt="o", color=COLOURS[0], capsize=2)
    axes.plot([min(measured), max(measured)], [min(measured), max(measured)], color="grey", linewidth=0.8)
    return _write(axes, folder, f"prediction_{name}")


def plot_parabolas(profiles: dict[str, Any], folder: Path, name: str, x: str) -> list[Path]:
    """Profiles of equal compute, or of a sweep, with their parabolas and minima."""
    found = {key: profile for key, profile in profiles.items() if "refused" not in profile}
    if not found:
        return []
    axes = new_axes(name.replace("_", " "), x, LOSS)
    axes.set_xscale("log")
    for number, (key, p) in enumerate(found.items()):
        colour = COLOURS[number % len(COLOURS)]
        points: list[tuple[float, float]] = p["points"]
        sizes, losses = [x for x, _ in points], [loss for _, loss in points]
        grid = np.geomspace(min(sizes), max(sizes), 60)
        axes.plot(sizes, losses, "o", color=colour, markersize=4, label=f"{float(key):.3g}")
        axes.plot(grid, p["curvature"] * np.log(grid / p["best"]) ** 2 + p["least"], color=colour, linewidth=1)
        axes.plot([p["best"]], [p["least"]], "x", color=colour)
    axes.legend(frameon=False)
    return _write(axes, folder, name)


def plot_arms(arms: dict[str, Any], folder: Path) -> list[Path]:
    """Effective compute multipliers with intervals."""
    found = {arm: m for arm, m in arms.items() if "refused" not in m}
    if not found:
        return []
    axes = new_axes("effective compute multiplier of every arm", "multiplier (1: as the base)", "")
    for number, m in enumerate(found.values()):
        axes.plot([m["low"], m["high"]], [number, number], color=COLOURS[0], linewidth=2)
        axes.plot([m["value"]], [number], "o", color=COLOURS[0])
    axes.set_yticks(range(len(found)), list(found))
    axes.axvline(1, color="grey", linewidth=0.8)
    return _write(axes, folder, "arms")


def _law(fitted: dict[str, Any]) -> Law | None:
    values = fitted.get("law")
    return None if values is None else Law(**values)


def _write(axes: Any, folder: Path, name: str) -> list[Path]:
    paths = [folder / f"{name}.{end}" for end in FORMATS]
    for path in paths:
        save_axes(axes, path)
    return paths
