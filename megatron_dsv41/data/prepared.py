"""Prepared data: PREFIX.bin and PREFIX.idx (Megatron's format), PREFIX.json (the sidecar), PREFIX.token_map.npz.

The sidecar says what the tokens mean. It is written last, so data without one is not whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = "megatron_dsv41 prepared data"
VERSION = 1


class PreparedPaths(NamedTuple):
    """The files of one prefix, in the order in which they are put in place."""

    bin: Path
    idx: Path
    token_map: Path
    sidecar: Path


def prepared_paths(prefix: str | Path) -> PreparedPaths:
    """The files of `prefix`; the prefix may hold dots."""
    return PreparedPaths(*(Path(f"{prefix}{end}") for end in (".bin", ".idx", ".token_map.npz", ".json")))


def mask_prefix(prefix: str | Path) -> Path:
    """Prefix of the loss mask beside `prefix`, in the same format: 1 for a trained token, 0 for one only read."""
    return Path(f"{prefix}.mask")


def has_mask(prefix: str | Path) -> bool:
    """Whether there is one, or a part of one, which whoever opens it then finds."""
    files = prepared_paths(mask_prefix(prefix))
    return files.bin.is_file() or files.idx.is_file()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sidecar:
    """What PREFIX.json holds."""

    format: str = FORMAT
    version: int = VERSION
    tokenizer: str  # as it was named
    tokenizer_sha256: str
    token_map_sha256: str
    num_classes: int  # compressed ids: a model's engram_compressed_vocab_size
    vocab_size: int  # the tokenizer's largest id + 1
    eod_id: int
    documents: int
    tokens: int  # end-of-document tokens included
    skipped: int  # texts without content, of the whole input
    dtype: str  # numpy name of a token in .bin
    bin_bytes: int
    idx_sha256: str
    source: Mapping[str, Any]

    def to_json(self) -> bytes:
        """The file's content."""
        return (json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n").encode()


def read_sidecar(prefix: str | Path) -> Sidecar:
    """Read PREFIX.json. ValueError when it is missing, damaged, or of another version."""
    path = prepared_paths(prefix).sidecar
    if not path.is_file():
        raise ValueError(
            f"{path} is missing: {prefix} was not made by dsv41 prep, or its last run was interrupted; run dsv41 prep "
            f"again, or for .bin/.idx made by Megatron's own tools: dsv41 prep --adopt --tokenizer T --output {prefix}"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("format") != FORMAT or content.get("version") != VERSION:
            found = f"{content.get('format')!r} version {content.get('version')!r}"
            raise ValueError(f"{path} is {found}, need {FORMAT!r} version {VERSION}: run dsv41 prep again")
        return Sidecar(**content)
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): run dsv41 prep again") from error


def cache_key(prefixes: Sequence[str | Path]) -> str:
    """Name for the folder of index caches of these data, hex.

    Megatron keys its caches by path and sizes alone, so data made again with another tokenizer in the same place
    would meet the old caches. This key changes with tokenizer, documents and sizes.
    """
    digest = hashlib.sha256()
    for prefix in prefixes:
        sidecar = read_sidecar(prefix)
        parts = (sidecar.tokenizer_sha256, sidecar.idx_sha256, sidecar.bin_bytes, sidecar.dtype)
        digest.update(repr(parts).encode())
    return digest.hexdigest()[:16]
