"""Megatron's .bin/.idx writer, imported late and without noise."""

from __future__ import annotations

import contextlib
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dsv41.data.files import sync_file
from megatron_dsv41.data.prepared import prepared_paths

UINT16_IDS = 65500  # Megatron's own limit for two-byte tokens


def token_dtype(vocab_size: int) -> str:
    """Numpy name of the type that a vocabulary's tokens are stored in."""
    return "uint16" if vocab_size < UINT16_IDS else "int32"


class TokenWriter:
    """Writes documents to PREFIX.bin and PREFIX.idx. As a context it closes its file however the block ends.

    Megatron's builder is made at the first document: importing it takes seconds, in which workers are busy.
    """

    def __init__(self, prefix: Path, dtype: str) -> None:
        self.paths = prepared_paths(prefix)
        self.dtype = dtype
        self.documents = self.tokens = 0
        self._builder: Any = None

    def __enter__(self) -> TokenWriter:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close without finishing; after `finish` there is nothing left to close."""
        if self._builder is not None:
            # On a full disk closing fails once more for what is still buffered; the first error is under way.
            with contextlib.suppress(OSError):
                self._builder.data_file.close()

    def add(self, ids: np.ndarray) -> None:
        """Append one document, integers [tokens]."""
        if self._builder is None:
            self._builder = _megatron_builder()(str(self.paths.bin), dtype=np.dtype(self.dtype).type)
        self._builder.add_document(ids, [len(ids)])
        self.documents += 1
        self.tokens += len(ids)

    def finish(self) -> None:
        """Write the index and force both files to disk. ValueError when there was no document."""
        if self._builder is None:
            raise ValueError(f"no document for {self.paths.bin.stem}")
        self._builder.finalize(str(self.paths.idx))
        sync_file(self.paths.bin)
        sync_file(self.paths.idx)


def _megatron_builder() -> Any:
    """Megatron's class. Importing it warns about a missing GPU and optional packages, which do not matter here."""
    torch_extensions = logging.getLogger("torch.utils.cpp_extension")
    level = torch_extensions.level
    torch_extensions.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    finally:
        torch_extensions.setLevel(level)
    return IndexedDatasetBuilder
