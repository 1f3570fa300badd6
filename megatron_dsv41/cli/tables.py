"""How commands print tables: plain columns, whole rows in a file or pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

PIPE_COLUMNS = 240


def open_console() -> Any:
    """A rich Console of the terminal's width; a file or pipe has room for whole rows."""
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=PIPE_COLUMNS)


def make_table(columns: Sequence[str], rows: Iterable[Sequence[object]], left: Sequence[int] = (0,)) -> Any:
    """A rich Table of cells that are folded where they do not fit, never cut off; None is empty.

    left: columns that are aligned so; the rest are numbers.
    """
    from rich.table import Table

    made = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number in left else "right", overflow="fold")
    for row in rows:
        made.add_row(*("" if value is None else str(value) for value in row))
    return made
