"""Progress of a long job: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

LOG_SECONDS = 30.0

Advance = Callable[[float, str], None]  # (work done since the last call, what else to show)


@contextlib.contextmanager
def progress(label: str, total: float | None, unit: str) -> Iterator[Advance]:
    """Show done / total, rate and time left of a job on standard error; `total` None: unknown."""
    shown = _bar if sys.stderr.isatty() else _lines
    with shown(label, total, unit) as advance:
        yield advance


@contextlib.contextmanager
def _bar(label: str, total: float | None, unit: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[extra]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total, extra="")
        began, done = time.monotonic(), 0.0

        def advance(amount: float, extra: str) -> None:
            nonlocal done
            done += amount
            rate = _rate(done, time.monotonic() - began, unit)
            bar.update(task, advance=amount, extra=f"{rate}  {extra}")

        yield advance


@contextlib.contextmanager
def _lines(label: str, total: float | None, unit: str) -> Iterator[Advance]:
    began = shown = time.monotonic()
    done = 0.0

    def advance(amount: float, extra: str) -> None:
        nonlocal done, shown
        done += amount
        now = time.monotonic()
        if now - shown < LOG_SECONDS:
            return
        shown = now
        share = f" {done / total:.1%}" if total else ""
        left = f", {_clock((now - began) * (total - done) / done)} left" if total and done else ""
        print(f"{label}{share}, {_rate(done, now - began, unit)}, {extra}{left}", file=sys.stderr, flush=True)

    yield advance


def _rate(done: float, seconds: float, unit: str) -> str:
    rate = done / max(seconds, 1e-9)
    return f"{rate / 1e6:.2f} MB/s" if unit == "bytes" else f"{rate:.0f} {unit}/s"


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
