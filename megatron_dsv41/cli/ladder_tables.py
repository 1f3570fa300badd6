"""The tables that `dsv41 ladder` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from megatron_dsv41.cli.tables import make_table, open_console


def print_plan(report: dict[str, Any]) -> None:
    """Rungs, cells, totals, problems."""
    console = open_console()
    console.print("[bold]Rungs[/bold]")
    console.print(_rung_table(report["rungs"]))
    for rung in report["rungs"]:
        kinds = " ".join(_runs(rung["kinds"]))
        console.print(f"  {rung['arm']} d{rung['depth']}: {kinds}; decoder from layer {rung['decoder_start']}")
    console.print("\n[bold]Parameters by kind[/bold]")
    console.print(_kind_table(report["rungs"]))
    console.print("\n[bold]Cells[/bold]")
    console.print(_cell_table(report["cells"]))
    total = report["total"]
    hours = (
        "hours unknown (set hardware.tflops)"
        if total["hours"] is None
        else f"{total['hours']:.3g} hours one after another"
    )
    console.print(
        f"\n[bold]In all[/bold]: {total['cells']} cells, {short(total['tokens'])} tokens, "
        f"{total['flops']:.3g} FLOPs, {hours}"
    )
    for problem in report["problems"]:
        console.print(f"[bold]Does not fit[/bold]: {problem}")


def print_status(report: dict[str, Any]) -> None:
    """State and progress of every cell, and how many there are of each state."""
    console = open_console()
    rows = [
        (
            cell["cell"],
            cell["state"],
            f"{cell['step']:,}/{cell['steps']:,}",
            "-" if cell["valid_loss"] is None else f"{cell['valid_loss']:.4f}",
            short(cell["tokens_per_second"]),
        )
        for cell in report["cells"]
    ]
    console.print(make_table(("cell", "state", "step", "validation loss", "tokens/s"), rows))
    counted = Counter(cell["state"] for cell in report["cells"])
    console.print(", ".join(f"{number} {state}" for state, number in counted.items()))


def print_rows(report: dict[str, Any]) -> None:
    """The collected cells, and what about them does not agree."""
    console = open_console()
    rows = [
        (
            row["cell"],
            *(short(row[key]) for key in ("n_active", "n_total", "tokens")),
            f"{row['flops']:.3g}",
            f"{row['loss']:.4f}",
            short(row["tokens_per_second"]),
            (row["commit"] or "-")[:10],
            row["config_digest"][:8],
            row["data_digest"][:8],
            row["wandb_id"] or "-",
        )
        for row in report["rows"]
    ]
    columns = ("cell", "active", "total", "tokens", "FLOPs", "loss", "tokens/s", "commit", "config", "data", "wandb")
    console.print(make_table(columns, rows))
    console.print(f"{len(rows)} cells in {' and '.join(report['files'])}; {report['missing']} not finished")
    for difference in report["differences"]:
        console.print(f"[bold]Differs[/bold]: {difference}")


def short(number: float | None) -> str:
    """Three digits and a unit."""
    if number is None:
        return "-"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def _rung_table(rungs: Sequence[dict[str, Any]]) -> Any:
    columns = ("arm", "depth", "hidden", "heads", "active", "prefill", "backbone", "non-embedding", "total", "C / 6D")
    return make_table(
        columns,
        ((r["arm"], r["depth"], r["hidden_size"], r["heads"], *(short(n) for n in r["n"].values())) for r in rungs),
    )


def _kind_table(rungs: Sequence[dict[str, Any]]) -> Any:
    kinds = list(dict.fromkeys(kind for rung in rungs for kind in rung["by_kind"]))
    rows = ((r["arm"], r["depth"], *(short(r["by_kind"].get(kind, 0)) for kind in kinds)) for r in rungs)
    return make_table(("arm", "depth", *kinds), rows)


def _cell_table(cells: Sequence[dict[str, Any]]) -> Any:
    columns = ("cell", "active", "tokens", "steps", "batch", "rate", "FLOPs", "GB per rank", "hours")
    return make_table(
        columns,
        (
            (
                c["cell"],
                short(c["n"]["active"]),
                short(c["tokens"]),
                f"{c['steps']:,}",
                short(c["batch_tokens"]),
                f"{c['lr']:.3g}",
                f"{c['flops']:.3g}",
                f"{c['memory_bytes'] / 1e9:.3g}",
                "-" if c["hours"] is None else f"{c['hours']:.3g}",
            )
            for c in cells
        ),
    )


def _runs(names: Sequence[str]) -> list[str]:
    """a a b -> 2xa b."""
    counted = [(name, len(list(group))) for name, group in groupby(names)]
    return [name if count == 1 else f"{count}x{name}" for name, count in counted]
