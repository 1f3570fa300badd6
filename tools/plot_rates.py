"""Plot loss over learning rate for two families of a ladder's arms: python tools/plot_rates.py FOLDER PICTURE.png.

FOLDER holds the rows that `dsv41 ladder collect` wrote, with one rung whose learning rate the arms vary; arms whose
name begins with --family are one curve, all others the other. Prints each family's best rate, with mean and range over
seeds.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from pathlib import Path

from megatron_dsv41.experiments.collect import Row, read_rows
from megatron_dsv41.experiments.plots import COLOURS, new_axes, save_axes
from megatron_dsv41.testing.bench import table


def main() -> None:
    """Print the table, write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument(
        "--family", default="published", help="name's beginning of the compared arms (default published)"
    )
    parser.add_argument("--others", default="adamw", help="what to call the others (default adamw)")
    args = parser.parse_args()
    curves = {name: by_rate(rows) for name, rows in families(read_rows(args.folder), args.family, args.others).items()}
    axes = new_axes("loss over learning rate", "learning rate", "validation loss (nats per token)")
    axes.set_xscale("log")
    for colour, (name, losses) in zip(COLOURS, curves.items(), strict=False):
        means = [statistics.mean(values) for values in losses.values()]
        axes.plot(list(losses), means, color=colour, label=name, linewidth=1.5)
        for rate, values in losses.items():
            axes.plot([rate] * len(values), values, "o", color=colour, markersize=3)
    axes.legend(frameon=False)
    save_axes(axes, args.picture)
    print(table(("arms", "rate", "seeds", "mean loss", "least", "largest", ""), summary(curves)))


def families(rows: list[Row], family: str, others: str) -> dict[str, list[Row]]:
    """Rows by family. ValueError where they are of several rungs or lengths: losses would not compare."""
    sizes = {(row.depth, row.tokens) for row in rows}
    if len(sizes) != 1:
        raise ValueError(f"cells of one rung and one number of tokens compare, found (depth, tokens) {sorted(sizes)}")
    found: dict[str, list[Row]] = {others: [], family: []}
    for row in rows:
        found[family if row.arm.startswith(family) else others].append(row)
    return found


def by_rate(rows: list[Row]) -> dict[float, list[float]]:
    """Losses of all seeds by learning rate, ascending."""
    found: dict[float, list[float]] = defaultdict(list)
    for row in rows:
        found[row.lr].append(row.loss)
    return dict(sorted(found.items()))


def summary(curves: dict[str, dict[float, list[float]]]) -> list[tuple[str, ...]]:
    """Table rows; the best mean of every family is marked."""
    rows = []
    for name, losses in curves.items():
        if not losses:
            raise ValueError(f"no finished cell of {name}")
        best = min(losses, key=lambda rate: statistics.mean(losses[rate]))
        for rate, values in losses.items():
            numbers = (statistics.mean(values), min(values), max(values))
            shown = (f"{value:.4f}" for value in numbers)
            rows.append((name, f"{rate:g}", str(len(values)), *shown, "best" if rate == best else ""))
    return rows


if __name__ == "__main__":
    main()
