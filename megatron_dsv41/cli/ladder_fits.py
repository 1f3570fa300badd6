"""What `dsv41 ladder fit` and `predict` print."""

from __future__ import annotations

from typing import Any

from megatron_dsv41.cli.ladder_tables import short
from megatron_dsv41.cli.tables import make_table, open_console


def print_fits(report: dict[str, Any]) -> None:
    """Parameters with 95 % intervals, residuals, noise between seeds; minima; refusals in words."""
    console = open_console()
    for title, fits, what in (
        ("L(N, D) = E + A/N^alpha + B/D^beta", report["loss_nd"], "N by"),
        ("L(C) = E + A/C^alpha at one token multiple", report["loss_c"], "tokens per parameter"),
    ):
        console.print(f"[bold]{title}[/bold]")
        good = {name: fit for name, fit in fits.items() if "refused" not in fit}
        if good:
            names = list(next(iter(good.values()))["parameters"])
            columns = (what, *names, "residual", "noise", "lack of fit p", "cells")
            console.print(make_table(columns, [(name, *_fit_row(fit)) for name, fit in good.items()]))
        for name, fit in fits.items():
            for problem in [fit["refused"]] if "refused" in fit else [*fit["problems"], *fit["remarks"]]:
                console.print(f"  {name}: {'refused: ' if 'refused' in fit else ''}{problem}", markup=False)
        console.print()
    for title, found in (("Iso-FLOP", report["iso_flops"]), ("Sweep of", report["sweeps"])):
        for name, minima in found.items():
            console.print(f"[bold]{title} {name}[/bold]")
            for key, profile in minima["profiles"].items():
                console.print(f"  {key}: {_refused(profile) or _parabola_words(profile)}", markup=False)
            console.print(f"  law: {_refused(minima['law']) or _law_words(minima['law'])}", markup=False)


def print_predictions(report: dict[str, Any]) -> None:
    """Errors of held-out points by convention, the largest rung's points, and the arms."""
    console = open_console()
    for title, key in (("Largest rung, from the others", "largest"), ("Each point, from the others", "one_out")):
        console.print(f"[bold]{title}[/bold]")
        good = {name: held for name, held in report[key].items() if "refused" not in held}
        rows = [(n, f"{h['signed']:+.2%}", f"{h['unsigned']:.2%}", len(h["predictions"])) for n, h in good.items()]
        if rows:
            console.print(make_table(("N by", "signed error", "unsigned error", "points"), rows))
        for name, held in report[key].items():
            for problem in [held["refused"]] if "refused" in held else held["problems"]:
                console.print(f"  {name}: {'refused: ' if 'refused' in held else ''}{problem}", markup=False)
        if key == "largest" and good:
            name, held = next(iter(good.items()))
            console.print(f"\nPoints of the largest rung, N by {name}")
            console.print(
                make_table(
                    ("depth", "tokens", "measured", "predicted", "95 %", "error"),
                    [
                        (
                            p["depth"],
                            short(p["tokens"]),
                            f"{p['measured']:.4f}",
                            f"{p['predicted']:.4f}",
                            f"{p['low']:.4f} to {p['high']:.4f}",
                            f"{p['error']:+.2%}",
                        )
                        for p in held["predictions"]
                    ],
                )
            )
        console.print()
    for arm, worth in report["arms"].items():
        words = _refused(worth) or (
            f"{worth['value']:.3g} [{worth['low']:.3g}, {worth['high']:.3g}] over {worth['cells']} cells"
        )
        console.print(f"Arm {arm}: effective compute multiplier {words}", markup=False)


def _fit_row(fit: dict[str, Any]) -> list[str]:
    parameters = [f"{p['value']:.4g} ({p['low']:.3g} to {p['high']:.3g})" for p in fit["parameters"].values()]
    p = fit["lack_of_fit_p"]
    more = [f"{fit['mean_residual']:.2%}", f"{fit['noise']:.2%}", "-" if p is None else f"{p:.2g}", str(fit["cells"])]
    return parameters + more


def _refused(value: dict[str, Any]) -> str | None:
    return f"refused: {value['refused']}" if "refused" in value else None


def _parabola_words(profile: dict[str, Any]) -> str:
    return f"least loss {profile['least']:.4f} at {profile['best']:.4g} over {len(profile['points'])} sizes"


def _law_words(law: dict[str, Any]) -> str:
    low, high = law["power_interval"]
    return f"best = {law['k']:.4g} x^{law['power']:.3f}, exponent {low:.3f} to {high:.3f}"
