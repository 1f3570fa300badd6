"""Pictures of a run from the numbers that it wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# One colour per curve, readable in grey and by the colour-blind.
COLOURS = ("#0b5394", "#d1670c", "#3d7d2b", "#8a3b8f")
MAX_POINTS = 500


def series(rows: Sequence[dict[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
    """Points (x, y) of the rows that have both. Where a resumed run wrote an x again, the later value stands."""
    points = {row[x]: row[y] for row in rows if row.get(x) is not None and row.get(y) is not None}
    return list(points), list(points.values())


def plot_loss(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], path: Path, *, title: str) -> None:
    """Loss over steps, one named curve each, as a PNG."""
    axes = new_axes(title, "step", "loss (nats per token)")
    for colour, (name, (x, y)) in zip(_colours(len(curves)), curves.items(), strict=True):
        axes.plot(x, y, label=name, color=colour, linewidth=1.5, marker="o" if len(x) < 3 else None)
    if len(curves) > 1:
        axes.legend(frameon=False)
    save_axes(axes, path)


def plot_learning_rate(rate: Callable[[int], float], steps: int, path: Path) -> None:
    """Learning rate over the whole run, as a PNG."""
    x = sorted({max(1, round(steps * i / MAX_POINTS)) for i in range(MAX_POINTS + 1)})
    axes = new_axes(f"learning rate over {steps:,} steps", "step", "learning rate")
    axes.plot(x, [rate(step) for step in x], color=COLOURS[0], linewidth=1.5)
    save_axes(axes, path)


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def new_axes(title: str, x: str, y: str) -> Any:
    """Empty axes in the project's look."""
    return new_panels([title], x, y, (8, 4.5))[0]


def new_panels(titles: Sequence[str], x: str, y: str, size: tuple[float, float]) -> list[Any]:
    """The same, one below the other in a picture of `size` inches. Any of them saves it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)  # no display, and no global state of pyplot
    panels: list[Any] = list(figure.subplots(len(titles), squeeze=False)[:, 0])
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return panels


def save_axes(axes: Any, path: Path) -> None:
    """Write the picture in the format of its name's end, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")
    axes.figure.savefig(partial, dpi=130, format=path.suffix[1:])
    partial.replace(path)
