"""All pictures and the page of a ladder, from its collected rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_dsv41.experiments import ladder_plots as plots
from megatron_dsv41.experiments.collect import Row
from megatron_dsv41.experiments.fit_report import fit_report, predict_report
from megatron_dsv41.experiments.ladder import Ladder
from megatron_dsv41.experiments.ladder_cells import PlannedCell
from megatron_dsv41.experiments.ladder_page import write_page
from megatron_dsv41.experiments.plots import series
from megatron_dsv41.experiments.tracking import read_metrics

CONVENTION = "active"  # of N in pictures


def write_report(ladder: Ladder, cells: Sequence[PlannedCell], rows: Sequence[Row]) -> list[Path]:
    """Draw everything that the rows allow and write index.html; the files written. ValueError without rows."""
    if not rows:
        raise ValueError(f"{ladder.folder} has no finished cell: run dsv41 ladder run, then collect")
    folder = Path(ladder.folder) / "plots"
    fitted, predicted = fit_report(rows), predict_report(rows)
    curves = {cell.id: series(read_metrics(cell.run_folder), "tokens", "valid_loss") for cell in cells}
    law = fitted["loss_nd"][CONVENTION]
    written = [
        *plots.plot_curves({name: curve for name, curve in curves.items() if curve[0]}, folder),
        *plots.plot_loss_nd(rows, law, CONVENTION, folder),
        *plots.plot_loss_c(rows, fitted["loss_c"], folder),
        *plots.plot_residuals(rows, law, CONVENTION, folder),
        *plots.plot_predictions(predicted["largest"][CONVENTION], folder, "largest_rung"),
        *plots.plot_predictions(predicted["one_out"][CONVENTION], folder, "each_point"),
        *plots.plot_arms(predicted["arms"], folder),
    ]
    if fitted["iso_flops"]:
        profiles = fitted["iso_flops"][CONVENTION]["profiles"]
        written += plots.plot_parabolas(profiles, folder, "iso_flops", f"N ({CONVENTION})")
    for what, sweep in fitted["sweeps"].items():
        written += plots.plot_parabolas(sweep["profiles"], folder, f"sweep_{what}", what)
    page = Path(ladder.folder) / "index.html"
    write_page(ladder, rows, fitted, predicted, written, page)
    return [*written, page]
