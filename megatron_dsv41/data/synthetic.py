"""A corpus that every machine with Python has: the standard library's own source text."""

from __future__ import annotations

import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

STDLIB = "python-stdlib"
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


def stdlib_files() -> list[Path]:
    """The standard library's .py files in one fixed order, its tests and installed packages left out.

    ValueError when this Python comes without source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = [path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts)]
    if not found:
        raise ValueError(f"no Python source files under {root}: this Python has no readable standard library")
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def stdlib_texts() -> Iterator[str]:
    """One text per file, in the order of `stdlib_files`.

    Files are decoded as Python itself would; the few that it could not read are left out.
    """
    for path in stdlib_files():
        try:
            with tokenize.open(path) as stream:
                text = stream.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
        yield text
