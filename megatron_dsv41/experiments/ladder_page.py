"""One HTML page per ladder, complete without other files: tables, pictures, the cells' run files, wandb links."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_dsv41.experiments.collect import Row, flat_row
from megatron_dsv41.experiments.ladder import Ladder
from megatron_dsv41.experiments.tracking import write_whole
from megatron_dsv41.run_config import Logging
from megatron_dsv41.typed_yaml import build

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;font-size:12px;margin:1em 0}td,th{padding:2px 8px;text-align:right;border-bottom:1px
solid #ddd}td:first-child,th:first-child{text-align:left}img{max-width:100%}.wide{overflow-x:auto}"""


def write_page(
    ladder: Ladder,
    rows: Sequence[Row],
    fitted: dict[str, Any],
    predicted: dict[str, Any],
    pictures: Sequence[Path],
    path: Path,
) -> None:
    """Write the page. Run files are those in the ladder's folder; a cell without one has none on the page either."""
    configs = _run_files(ladder, rows)
    parts = [
        f"<h1>Ladder {html.escape(ladder.name)}</h1>",
        f"<p>{len(rows)} finished cells; depths {', '.join(map(str, ladder.depths))}; seeds "
        f"{', '.join(map(str, ladder.seeds))}. FLOPs count matrix products of forward and backward pass.</p>",
        "<h2>L(N, D) by convention of N</h2>",
        _table(_fit_rows(fitted["loss_nd"])),
        "<h2>L(C) by tokens per parameter</h2>",
        _table(_fit_rows(fitted["loss_c"])),
        "<h2>Held-out predictions</h2>",
        _table(_held_rows(predicted)),
        *(["<h2>Arms</h2>", _table(_arm_rows(predicted["arms"]))] if predicted["arms"] else []),
        "<h2>Pictures</h2>",
        *(_image(picture) for picture in pictures if picture.suffix == ".png"),
        "<h2>Cells</h2>",
        _table(_cell_rows(ladder, rows, configs)),
        *(["<h2>Run files</h2>", *map(_run_file, configs.items())] if configs else []),
    ]
    title = html.escape(ladder.name)
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    write_whole(path, head + "\n".join(parts) + "</html>\n")


def _fit_rows(fits: dict[str, Any]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    for name, fit in fits.items():
        if "refused" in fit:
            found.append({"": name, "note": fit["refused"]})
            continue
        values = {k: f"{v['value']:.4g} [{v['low']:.4g}, {v['high']:.4g}]" for k, v in fit["parameters"].items()}
        p = fit["lack_of_fit_p"]
        found.append(
            {
                "": name,
                **values,
                "mean residual": f"{fit['mean_residual']:.2%}",
                "noise": f"{fit['noise']:.2%}",
                "lack of fit p": "-" if p is None else f"{p:.2g}",
                "note": "; ".join([*fit["problems"], *fit["remarks"]]),
            }
        )
    return found


def _held_rows(predicted: dict[str, Any]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    for what, name in (("largest", "largest rung"), ("one_out", "each point in turn")):
        for convention, held in predicted[what].items():
            row = {"": f"{name}, N {convention}"}
            if "refused" in held:
                found.append(row | {"note": held["refused"]})
            else:
                errors = {"signed error": f"{held['signed']:+.2%}", "unsigned error": f"{held['unsigned']:.2%}"}
                found.append(row | errors | {"note": "; ".join(held["problems"])})
    return found


def _arm_rows(arms: dict[str, Any]) -> list[dict[str, str]]:
    return [
        {"": arm, "note": m["refused"]}
        if "refused" in m
        else {"": arm, "multiplier": f"{m['value']:.3g}", "interval": f"[{m['low']:.3g}, {m['high']:.3g}]"}
        for arm, m in arms.items()
    ]


def _run_files(ladder: Ladder, rows: Sequence[Row]) -> dict[str, str]:
    files = {row.cell: Path(ladder.folder) / "configs" / f"{row.cell}.yaml" for row in rows}
    return {cell: file.read_text() for cell, file in files.items() if file.is_file()}


def _run_file(named: tuple[str, str]) -> str:
    cell, text = map(html.escape, named)
    return f'<details id="{cell}"><summary>{cell}</summary><pre>{text}</pre></details>'


def _cell_rows(ladder: Ladder, rows: Sequence[Row], configs: dict[str, str]) -> Iterable[dict[str, str]]:
    logging = build(Logging, ladder.base.get("logging", {}), "base.logging")
    for row in rows:
        values = flat_row(row)
        shown = {key: _short(values[key]) for key in ("n_active", "n_total", "tokens", "flops", "loss", "lr")}
        cell, wandb = html.escape(row.cell), row.wandb_id or ""
        if row.wandb_id and logging.wandb == "online" and logging.entity:
            wandb = f'<a href="https://wandb.ai/{logging.entity}/{logging.project}/runs/{row.wandb_id}">{wandb}</a>'
        yield {
            "": f'<a href="#{cell}">{cell}</a>' if row.cell in configs else cell,
            **shown,
            "commit": (row.commit or "")[:10],
            "config": row.config_digest[:8],
            "data": row.data_digest[:8],
            "wandb": wandb,
        }


def _table(rows: Iterable[dict[str, str]]) -> str:
    rows = list(rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{row.get(c, '')}</td>" for c in columns) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _image(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}"></p>'


def _short(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else value
