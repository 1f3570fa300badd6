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
        speed = _Speed(unit)

        def advance(amount: float, extra: str) -> None:
            bar.update(task, advance=amount, extra=f"{speed.after(amount)}  {extra}")

        yield advance


@contextlib.contextmanager
def _lines(label: str, total: float | None, unit: str) -> Iterator[Advance]:
    shown = time.monotonic()
    speed = _Speed(unit)
    done = 0.0

    def advance(amount: float, extra: str) -> None:
        nonlocal done, shown
        done += amount
        rate = speed.after(amount)
        now = time.monotonic()
        if now - shown < LOG_SECONDS:
            return
        shown = now
        share = f" {done / total:.1%}" if total else ""
        left = f", {_clock((total - done) / speed.per_second)} left" if total and speed.per_second else ""
        print(f"{label}{share}, {rate}, {extra}{left}", file=sys.stderr, flush=True)

    yield advance


class _Speed:
    """Work per second since the first report: what came before it is start-up."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.per_second = 0.0
        self._began: float | None = None
        self._done = 0.0

    def after(self, amount: float) -> str:
        now = time.monotonic()
        if self._began is None:
            self._began = now
            return "starting"
        self._done += amount
        self.per_second = self._done / max(now - self._began, 1e-9)
        if self.unit == "bytes":
            return f"{self.per_second / 1e6:.2f} MB/s"
        return f"{self.per_second:.0f} {self.unit}/s"


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
