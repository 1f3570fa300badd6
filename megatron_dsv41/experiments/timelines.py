"""Pictures of steps over several ranks: what ran when on every device, and how layouts scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dsv41.experiments import traces
from megatron_dsv41.experiments.overlap import Interval, Span, union, without
from megatron_dsv41.experiments.plots import COLOURS, new_axes, new_panels, save_axes

COMPUTING, EXPOSED, WAITING = "#9aa5b1", "#c00000", "#e6e6e6"
# Three kinds at most meet in a layout that scales along one axis.
KINDS = {
    traces.PIPELINE: COLOURS[0],
    traces.EXPERT: COLOURS[0],
    traces.TENSOR: COLOURS[0],
    traces.GATHER: COLOURS[0],
    traces.HALO: COLOURS[3],
    traces.REDUCE: COLOURS[1],
    traces.FETCH: COLOURS[2],
    traces.RETURN: COLOURS[3],
    traces.SUMS: "#7a5c00",
    traces.OTHER: "#444444",
}


def plot_timelines(steps: Mapping[str, tuple[Interval, Sequence[Sequence[Span]]]], path: Path) -> None:
    """One panel per layout: its step (begin, end), and spans of every rank (`overlap.split_waits`).

    Two bars per rank: computation, and communication by kind, pale where it waits for another rank. A red line below
    them where communication runs and nothing is computed.
    """
    size = (11.0, sum(1.1 + 0.6 * len(ranks) for _, ranks in steps.values()))
    panels = new_panels(list(steps), "ms", "", size)
    for axes, ((begin, end), ranks) in zip(panels, steps.values(), strict=True):
        names = dict[str, str]()
        for rank, spans in enumerate(ranks):
            row = -2.0 * rank
            computing = union((span.begin, span.end) for span in spans if not span.kind)
            _bars(axes, computing, begin, row, 0.8, COMPUTING)
            kinds = sorted({span.kind for span in spans if span.kind})
            for kind in kinds:
                moving = [(s.begin, s.end) for s in spans if s.kind == kind and not s.waits]
                waiting = [(s.begin, s.end) for s in spans if s.kind == kind and s.waits]
                _bars(axes, union(waiting), begin, row - 0.8, 0.7, WAITING)
                _bars(axes, union(moving), begin, row - 0.8, 0.7, KINDS[kind])
                names[kind] = KINDS[kind]
            exposed = without(((s.begin, s.end) for s in spans if s.kind), computing)
            _bars(axes, exposed, begin, row - 0.95, 0.12, EXPOSED)
        axes.set_xlim(0, end - begin)
        axes.set_yticks([-2.0 * rank for rank in range(len(ranks))], [f"rank {rank}" for rank in range(len(ranks))])
        shown = {"computation": COMPUTING, **names, "waits for a rank": WAITING, "exposed": EXPOSED}
        for name, colour in shown.items():
            axes.plot([], [], color=colour, linewidth=6, label=name)
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    save_axes(panels[0], path)


def plot_efficiency(found: Mapping[str, float], wanted: Mapping[str, float], path: Path, title: str) -> None:
    """Tokens per second and GPU as a share of one GPU's, by layout; a line where at least so much is wanted."""
    axes = new_axes(title, "share of one GPU", "")
    names = list(found)[::-1]
    axes.barh(range(len(names)), [found[name] for name in names], height=0.6, color=COLOURS[0])
    for place, name in enumerate(names):
        axes.text(found[name], place, f" {found[name]:.3f}", va="center", fontsize=9)
        if name in wanted:
            axes.plot([wanted[name]] * 2, [place - 0.4, place + 0.4], color=COLOURS[1], linewidth=2)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, max(1.1, *(share * 1.1 for share in found.values())))
    save_axes(axes, path)


def _bars(axes: Any, intervals: Sequence[Interval], begin: float, row: float, height: float, colour: str) -> None:
    axes.broken_barh([(a - begin, b - a) for a, b in intervals], (row - height / 2, height), color=colour, linewidth=0)
