"""Text to prepared data (`data/prepared.py`): read, tokenize in parallel, split, write, put in place.

The same input, tokenizer and options give the same bytes, whatever the number of workers. Everything is written
in a folder beside the output and renamed at the end, the sidecar last: a run that fails or is killed leaves no
data that looks whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_dsv41.data.check import check_tokens, open_tokens
from megatron_dsv41.data.encode import Encoding, encode_in_order
from megatron_dsv41.data.files import (
    disk_full_explained,
    sha256_of,
    staging_folder,
    staging_prefix,
    sync_folder,
    write_whole,
)
from megatron_dsv41.data.prepared import Sidecar, prepared_paths, read_sidecar
from megatron_dsv41.data.progress import progress
from megatron_dsv41.data.sources import Source, SourceOptions, open_source
from megatron_dsv41.data.split import Part, split_count, split_share
from megatron_dsv41.data.token_map import TokenClasses, token_classes
from megatron_dsv41.data.tokenizer import OpenTokenizer, open_tokenizer
from megatron_dsv41.data.writer import TokenWriter, token_dtype

BYTES_PER_TOKEN = 10  # more text than any tokenizer packs in a token on average: a lower bound of the output


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepOptions:
    """What to prepare. At most one of the two validation settings."""

    source: SourceOptions
    tokenizer: str
    output: str  # prefix
    workers: int = 1
    eod_token: str | None = None
    special_tokens: Literal["parse", "text"] = "parse"
    validation_fraction: float = 0.0  # each document goes to validation with this probability
    validation_documents: int = 0  # or exactly so many, drawn evenly from all
    seed: int = 1234  # of the draw
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"--workers must be at least 1, got {self.workers}")
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"--validation-fraction must be in [0, 1), got {self.validation_fraction}")
        if self.validation_documents < 0:
            raise ValueError(f"--validation-documents must not be negative, got {self.validation_documents}")
        if self.validation_fraction and self.validation_documents:
            raise ValueError("--validation-fraction and --validation-documents say one thing twice: give one of them")

    @property
    def prefixes(self) -> dict[Part, Path]:
        """Output prefix of each part."""
        train = Path(self.output).expanduser().absolute()
        if self.validation_fraction or self.validation_documents:
            return {"train": train, "validation": valid_prefix(train)}
        return {"train": train}


def valid_prefix(prefix: str | Path) -> Path:
    """Where the validation part of `prefix` goes."""
    return Path(f"{prefix}-valid")


def prepare(options: PrepOptions) -> dict[Part, Sidecar]:
    """Write the prepared data of `options` and return the sidecar of each part.

    ValueError for wrong input, existing output without `overwrite`, and input without documents; OSError for a
    full disk. Nothing is left behind in either case.
    """
    prefixes = options.prefixes
    train = prefixes["train"]
    _check_outputs(options)
    tokenizer = open_tokenizer(options.tokenizer)
    encoding = Encoding(
        tokenizer=str(tokenizer.path),
        eod_id=tokenizer.eod_id(options.eod_token),
        dtype=token_dtype(tokenizer.vocab_size),
        special_tokens=options.special_tokens,
    )
    source = open_source(options.source)
    train.parent.mkdir(parents=True, exist_ok=True)
    _check_space(train.parent, source, np.dtype(encoding.dtype).itemsize)
    with disk_full_explained(train.parent), staging_folder(train) as folder:
        writers, skipped = _write_documents(folder, source, encoding, options)
        classes = token_classes(tokenizer)
        facts = _tokenizer_facts(options.tokenizer, tokenizer, classes, encoding.eod_id)
        origin = _origin(source, options)
        sidecars: dict[Part, Sidecar] = {
            part: _describe(writer, classes, skipped, facts, {"part": part, **origin})
            for part, writer in writers.items()
        }
        _put_in_place(writers, prefixes)
    return sidecars


def adopt(prefix: str, tokenizer_name: str, eod_token: str | None = None, *, overwrite: bool = False) -> Sidecar:
    """Write sidecar and token map for .bin/.idx that another tool made with `tokenizer_name`.

    ValueError when the data does not fit the tokenizer or its documents do not end with `eod_token`.
    """
    target = Path(prefix).expanduser().absolute()
    paths = prepared_paths(target)
    existing = [path for path in (paths.token_map, paths.sidecar) if path.exists()]
    if existing and not overwrite:
        raise ValueError(f"{existing[0]} exists: pass --overwrite to replace it")
    tokenizer = open_tokenizer(tokenizer_name)
    eod_id = tokenizer.eod_id(eod_token)
    file = open_tokens(target)
    check_tokens(file, tokenizer.vocab_size, eod_id)
    classes = token_classes(tokenizer)
    sidecar = Sidecar(
        **_tokenizer_facts(tokenizer_name, tokenizer, classes, eod_id),
        documents=len(file.ends),
        tokens=len(file.tokens),
        skipped=0,
        dtype=file.tokens.dtype.name,
        bin_bytes=paths.bin.stat().st_size,
        idx_sha256=sha256_of(paths.idx),
        source={"adopted": str(prefix)},
    )
    with disk_full_explained(target.parent):
        classes.save(paths.token_map)
        write_whole(paths.sidecar, sidecar.to_json())
    return sidecar


def _write_documents(
    folder: Path, source: Source, encoding: Encoding, options: PrepOptions
) -> tuple[dict[Part, TokenWriter], int]:
    """Write every part in `folder`; return the finished writers and how many texts were skipped."""
    skipped = 0

    def documents() -> Generator[np.ndarray, None, None]:
        nonlocal skipped
        tokens = 0
        with (
            progress("tokenize", source.total, source.unit) as advance,
            contextlib.closing(encode_in_order(source.documents(), encoding, options.workers)) as chunks,
        ):
            for chunk in chunks:
                skipped += chunk.skipped
                yield from chunk.documents()
                tokens += len(chunk.ids)
                advance(chunk.weight, f"{tokens / 1e6:.2f} M tokens")

    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(contextlib.closing(documents()))
        writers: dict[Part, TokenWriter] = {
            part: stack.enter_context(TokenWriter(folder / part, encoding.dtype)) for part in options.prefixes
        }
        for part, ids in _split(stream, options):
            writers[part].add(ids)
        empty = [part for part, writer in writers.items() if not writer.documents]
        if empty:
            raise ValueError(
                f"no document for the {empty[0]} part: the input has none with text, or too few for the validation "
                "part asked for"
            )
        for writer in writers.values():
            writer.finish()
    return writers, skipped


def _split(documents: Iterator[np.ndarray], options: PrepOptions) -> Iterator[tuple[Part, np.ndarray]]:
    if options.validation_documents:
        return split_count(documents, options.validation_documents, options.seed)
    return split_share(documents, options.validation_fraction, options.seed)


def _tokenizer_facts(name: str, tokenizer: OpenTokenizer, classes: TokenClasses, eod_id: int) -> dict[str, Any]:
    return {
        "tokenizer": name,
        "tokenizer_sha256": tokenizer.sha256,
        "token_map_sha256": classes.digest,
        "num_classes": classes.num_classes,
        "vocab_size": tokenizer.vocab_size,
        "eod_id": eod_id,
    }


def _origin(source: Source, options: PrepOptions) -> dict[str, Any]:
    """What the sidecar says of the source: enough to make the data again."""
    asked = {name: value for name, value in dataclasses.asdict(options.source).items() if name != "inputs"}
    draw = ("validation_fraction", "validation_documents", "seed", "special_tokens")
    return {**source.description, **asked, **{name: getattr(options, name) for name in draw}}


def _describe(
    writer: TokenWriter, classes: TokenClasses, skipped: int, facts: Mapping[str, Any], origin: Mapping[str, Any]
) -> Sidecar:
    """Write token map and sidecar beside what `writer` finished."""
    sidecar = Sidecar(
        **facts,
        documents=writer.documents,
        tokens=writer.tokens,
        skipped=skipped,
        dtype=writer.dtype,
        bin_bytes=writer.paths.bin.stat().st_size,
        idx_sha256=sha256_of(writer.paths.idx),
        source=origin,
    )
    classes.save(writer.paths.token_map)
    write_whole(writer.paths.sidecar, sidecar.to_json())
    return sidecar


def _check_outputs(options: PrepOptions) -> None:
    existing = [p for prefix in options.prefixes.values() for p in prepared_paths(prefix) if p.exists()]
    if existing and not options.overwrite:
        raise ValueError(f"{existing[0]} exists: choose another --output, or pass --overwrite to replace it")
    train = options.prefixes["train"]
    left_over = [str(path) for path in train.parent.glob(f"{staging_prefix(train)}*")]
    if left_over:
        print(f"{left_over} belongs to a run that was killed or still runs: delete it if none runs", file=sys.stderr)
    stale = prepared_paths(valid_prefix(train)).sidecar
    if not existing or "validation" in options.prefixes or not stale.exists():
        return
    if read_sidecar(valid_prefix(train)).source.get("part") == "validation":
        raise ValueError(
            f"{stale} is the validation part of the data to be replaced, and its documents would now be trained on: "
            "delete it, or ask for a validation part again"
        )


def _check_space(folder: Path, source: Source, itemsize: int) -> None:
    """Refuse at once what cannot fit."""
    if source.unit != "bytes" or source.total is None:
        return
    least, free = int(source.total / BYTES_PER_TOKEN) * itemsize, shutil.disk_usage(folder).free
    if least > free:
        raise OSError(
            f"{folder} has {free / 1e9:.2f} GB free, the tokens of {source.total / 1e9:.2f} GB of input need at least "
            f"{least / 1e9:.2f} GB: free some space or choose another --output"
        )


def _put_in_place(writers: Mapping[Part, TokenWriter], prefixes: Mapping[Part, Path]) -> None:
    """Rename the staged files, every sidecar after all data; an old sidecar never stands beside new data."""
    for prefix in prefixes.values():
        prepared_paths(prefix).sidecar.unlink(missing_ok=True)
    staged = [writers[part].paths for part in prefixes]
    final = [prepared_paths(prefix) for prefix in prefixes.values()]
    for sources, targets in zip(zip(*staged, strict=True), zip(*final, strict=True), strict=True):
        for source, target in zip(sources, targets, strict=True):
            os.replace(source, target)
    sync_folder(prefixes["train"].parent)
