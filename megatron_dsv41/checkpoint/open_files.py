"""Files that stay open between reads."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Any


class OpenFiles:
    """The files of a folder, each opened for reading when it is first asked for. Thread-safe.

    They are closed with this object. A copy in another process opens its own.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._descriptors)

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenFiles, (self.folder,)

    def descriptor(self, file: str) -> int:
        """Of a file by its name in the folder. OSError where it cannot be opened."""
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(self.folder / file, os.O_RDONLY)
            return self._descriptors[file]


def _close_all(descriptors: dict[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
