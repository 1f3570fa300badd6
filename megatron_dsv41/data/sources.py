"""Where documents come from: Parquet, JSON lines, text files, the standard library, or the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import glob
import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_dsv41.config import nearest
from megatron_dsv41.data.synthetic import STDLIB, stdlib_files, stdlib_texts

PARQUET = (".parquet",)
JSON_LINES = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz")
TEXT = (".txt", ".txt.gz", ".text", ".md")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Document(NamedTuple):
    """One document as its source holds it."""

    text: str | None
    where: str  # file and line or row, for messages
    weight: float  # how much of `Source.total` it is


@dataclasses.dataclass(frozen=True)
class Source:
    """Documents in a fixed order. `documents()` starts over each time it is called."""

    documents: Callable[[], Iterator[Document]]
    total: float | None  # None: not known before the end
    unit: str  # of `total`: "bytes" or "documents"
    files: int
    description: dict[str, Any]  # goes to the sidecar


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """How to read inputs. `inputs` are paths, globs, hub ids, or "python-stdlib"."""

    inputs: Sequence[str]
    text_column: str = "text"
    pattern: str | None = None  # which files of a folder, as a glob on the file name
    split: str = "train"  # hub only, as the three below
    subset: str | None = None
    streaming: bool = False
    revision: str | None = None
    max_bytes: int | None = None  # stop before the text that would pass so many bytes of UTF-8
    skip_undecodable: bool = False  # leave out what is not UTF-8 instead of stopping


def open_source(options: SourceOptions) -> Source:
    """All inputs, one after the other. ValueError when one cannot be found or is of no known kind."""
    if not options.inputs:
        raise ValueError("no input: name files, folders, globs, a hub dataset id, or python-stdlib")
    if options.max_bytes is not None and options.max_bytes < 1:
        raise ValueError(f"--max-bytes must be positive, got {options.max_bytes}")
    parts = [_open_one(name, options) for name in options.inputs]
    units = {part.unit for part in parts}
    if len(units) > 1:
        raise ValueError("inputs mix files and hub datasets: prepare them apart and blend them in training")
    totals = [part.total for part in parts]
    known = [total for total in totals if total is not None]
    total = sum(known) if len(known) == len(totals) else None
    unit = units.pop()
    if options.max_bytes is not None and total is not None and unit == "bytes":
        total = min(total, options.max_bytes)
    return Source(
        documents=lambda: _limited((d for part in parts for d in part.documents()), options.max_bytes),
        total=total,
        unit=unit,
        files=sum(part.files for part in parts),
        description={"inputs": [part.description for part in parts]},
    )


def _limited(documents: Iterator[Document], max_bytes: int | None) -> Iterator[Document]:
    if max_bytes is None:
        yield from documents
        return
    left = max_bytes
    for document in documents:
        left -= len((document.text or "").encode())
        if left < 0:
            return
        yield document


def _open_one(name: str, options: SourceOptions) -> Source:
    if name == STDLIB:
        return _stdlib()
    files = _local_files(name, options.pattern)
    if files is not None:
        return _local(name, files, options)
    looks_local = name.startswith((".", "/", "~")) or name.endswith((*PARQUET, *JSON_LINES, *TEXT))
    if looks_local or not HUB_ID.fullmatch(name):
        raise ValueError(f"input {name!r}: no file or folder is there and no glob matches")
    return _hub(name, options)


def _stdlib() -> Source:
    files = stdlib_files()
    return Source(
        documents=lambda: (Document(text, STDLIB, len(text.encode())) for text in stdlib_texts()),
        total=sum(path.stat().st_size for path in files),
        unit="bytes",
        files=len(files),
        description={"name": STDLIB, "kind": "text", "files": len(files)},
    )


def _local_files(name: str, pattern: str | None) -> list[Path] | None:
    """The files `name` means, sorted, or None when nothing local has that name."""
    path = Path(name).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [p for p in path.rglob(pattern or "*") if p.is_file() and not _hidden(p.relative_to(path))]
        if pattern is None:
            found = [p for p in found if p.name.endswith((*PARQUET, *JSON_LINES, *TEXT))]
        if not found:
            kinds = pattern or ", ".join((*PARQUET, *JSON_LINES, *TEXT))
            raise ValueError(f"folder {name} has no file that matches {kinds}; --pattern '*.py' names others")
        return sorted(found, key=lambda p: p.relative_to(path).as_posix())
    matches = sorted(Path(p) for p in glob.glob(str(path), recursive=True))
    return [p for p in matches if p.is_file()] or None


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _local(name: str, files: list[Path], options: SourceOptions) -> Source:
    def documents() -> Iterator[Document]:
        for path in files:
            yield from _read_file(path, options)

    kinds = sorted({_kind(path) for path in files})
    total = sum(path.stat().st_size for path in files)
    return Source(
        documents=documents,
        total=total,
        unit="bytes",
        files=len(files),
        description={"name": name, "kind": "+".join(kinds), "files": len(files), "bytes": total},
    )


def _kind(path: Path) -> str:
    name = path.name.lower()
    return "parquet" if name.endswith(PARQUET) else "json" if name.endswith(JSON_LINES) else "text"


def _read_file(path: Path, options: SourceOptions) -> Iterator[Document]:
    kind = _kind(path)
    if kind == "parquet":
        return _read_parquet(path, options)
    if kind == "json":
        return _read_json_lines(path, options)
    return _read_text(path, options.skip_undecodable)


def _read_text(path: Path, skip_undecodable: bool) -> Iterator[Document]:
    size = path.stat().st_size
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if not skip_undecodable:
            raise ValueError(
                f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): convert it, narrow --pattern, or "
                "pass --skip-undecodable"
            ) from error
        text = None
    yield Document(text, str(path), size)


def _read_json_lines(path: Path, options: SourceOptions) -> Iterator[Document]:
    column = options.text_column
    with open(path, "rb") as raw:
        before = 0
        lines: Iterable[bytes] = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        for number, line in enumerate(lines, start=1):
            after = raw.tell()
            if not line.strip():
                continue
            weight, before = after - before, after
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where} is not a line of JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where} holds {type(row).__name__}, not an object: one JSON object a line")
            if column not in row:
                raise _no_column(where, column, row)
            yield Document(_text(row[column], where, options), where, weight)


def _read_parquet(path: Path, options: SourceOptions) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    column = options.text_column
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a whole Parquet file: {error}") from error
    with file:
        if column not in file.schema_arrow.names:
            raise _no_column(str(path), column, file.schema_arrow.names)
        weight = path.stat().st_size / max(1, file.metadata.num_rows)
        row = 0
        for batch in file.iter_batches(batch_size=1024, columns=[column]):
            for value in batch.column(0).to_pylist():
                where = f"{path} row {row}"
                yield Document(_text(value, where, options), where, weight)
                row += 1


def _hub(name: str, options: SourceOptions) -> Source:
    """A dataset of the Hugging Face hub (or what else `datasets.load_dataset` takes)."""
    import datasets

    try:
        data: Any = datasets.load_dataset(
            name,
            options.subset,
            split=options.split,
            streaming=options.streaming,
            revision=options.revision,
        )
    except OSError as error:  # not there, or not reached
        raise ValueError(f"input {name!r}: no file or folder of that name, and not from the hub: {error}") from error
    column = options.text_column
    if data.column_names is not None and column not in data.column_names:
        raise _no_column(f"dataset {name}", column, data.column_names)

    def documents() -> Iterator[Document]:
        for number, row in enumerate(data.select_columns([column])):
            where = f"dataset {name} row {number}"
            yield Document(_text(row[column], where, options), where, 1)

    description = {"name": name, "kind": "hub", "subset": options.subset, "split": options.split}
    revision = {"revision": options.revision} if options.revision else {}
    # A map-style dataset carries a digest of its content, a streamed one does not.
    fingerprint = {} if options.streaming else {"fingerprint": data._fingerprint}
    return Source(
        documents=documents,
        total=None if options.streaming else len(data),
        unit="documents",
        files=0,
        description=description | revision | fingerprint,
    )


def _text(value: Any, where: str, options: SourceOptions) -> str | None:
    """The value of a text column; None is a document without text."""
    if value is None:
        return None
    if not isinstance(value, str):
        found = type(value).__name__
        raise ValueError(f"{where}: {options.text_column} holds {found}, not text; choose another --text-column")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        if options.skip_undecodable:
            return None
        raise ValueError(f"{where} is not Unicode text ({error.reason}): pass --skip-undecodable") from error
    return value


def _no_column(where: str, column: str, columns: Iterable[str]) -> ValueError:
    names = list(columns)
    hint = nearest(column, set(names))
    return ValueError(f"{where} has no column {column!r}{hint}; --text-column must be one of {names}")
