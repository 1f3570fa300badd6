"""Checks of prepared data before the first step: whole, of this tokenizer, with ids that the model has.

Everything found wrong is a ValueError with file, value, limit and fix. Reads the files with numpy alone, so it
works wherever the files are. In a distributed run call it on one rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.data.files import sha256_of
from megatron_dsv41.data.prepared import Sidecar, prepared_paths, read_sidecar
from megatron_dsv41.data.token_map import TokenClasses, TokenMap

MAGIC = b"MMIDIDX\x00\x00"
HEADER_BYTES = 34  # magic 9, version 8, dtype code 1, sequences 8, documents 8
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
SCAN_BLOCK = 1 << 20  # tokens read at once
FULL_SCAN_TOKENS = 1 << 28  # more than this is sampled: 256 blocks spread evenly
SAMPLED_DOCUMENTS = 1 << 16
AGAIN = "run dsv41 prep again or copy the file again"


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """An open .bin/.idx pair whose sizes agree."""

    prefix: Path
    tokens: np.ndarray  # memory map of .bin, [number of tokens]
    ends: np.ndarray  # int64 [documents]: index one past each document's last token


def open_tokens(prefix: str | Path) -> TokenFile:
    """Open a .bin/.idx pair. ValueError when one is missing, empty, cut off, or does not fit the other."""
    paths = prepared_paths(prefix)
    for path in (paths.bin, paths.idx):
        if not path.is_file():
            raise ValueError(f"{path} is missing: prepared data is a pair {prefix}.bin and {prefix}.idx; {AGAIN}")
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty: {AGAIN}")
    dtype, lengths, document_indices = _read_index(paths.idx)
    itemsize = np.dtype(dtype).itemsize
    expected, found = int(lengths.sum(dtype=np.int64)) * itemsize, paths.bin.stat().st_size
    if found != expected:
        what = "cut off" if found < expected else "longer than its index"
        raise ValueError(f"{paths.bin} is {what}: it has {found} bytes, {paths.idx} counts {expected}; {AGAIN}")
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[document_indices[1:]]
    return TokenFile(Path(prefix), np.memmap(paths.bin, dtype=dtype, mode="r"), ends)


def check_prepared(
    prefix: str | Path,
    config: DSV41Config,
    *,
    tokenizer_sha256: str | None = None,
    token_map: TokenMap | None = None,
    min_tokens: int = 1,
) -> Sidecar:
    """Check that the data of `prefix` can train a model of `config`, and return its sidecar.

    tokenizer_sha256 and token_map: of the run (or of the checkpoint it continues), compared where given.
    min_tokens: what the run needs at least, one sample being sequence length + 1.
    """
    sidecar, paths = read_sidecar(prefix), prepared_paths(prefix)
    _check_tokenizer(paths.sidecar, sidecar, config, tokenizer_sha256, token_map)
    file = open_tokens(prefix)
    if paths.bin.stat().st_size != sidecar.bin_bytes or sha256_of(paths.idx) != sidecar.idx_sha256:
        raise ValueError(
            f"{paths.sidecar} describes other data than {paths.bin} and {paths.idx} beside it: they were replaced "
            f"or damaged; {AGAIN}"
        )
    saved_map = TokenClasses.load(paths.token_map) if paths.token_map.is_file() else None
    if saved_map is None or saved_map.digest != sidecar.token_map_sha256:
        found = "missing" if saved_map is None else "of another tokenizer"
        raise ValueError(f"{paths.token_map} is {found}: {AGAIN}")
    if len(file.tokens) < min_tokens:
        raise ValueError(
            f"{paths.bin} has {len(file.tokens)} tokens, the run needs at least {min_tokens} for one sample: prepare "
            "more text or shorten the sequence"
        )
    check_tokens(file, config.vocab_size, sidecar.eod_id, config.image_token_id)
    return sidecar


def check_tokens(file: TokenFile, vocab_size: int, eod_id: int, image_token_id: int | None = None) -> None:
    """Check ids and document ends: all of them up to FULL_SCAN_TOKENS, evenly spread samples of more.

    ValueError for an id outside 0..vocab_size-1, for a document without exactly one end-of-document token, at its
    end, and for an image token in what `dsv41 prep` made of text: the model would take that text for an image
    (other router biases, no n-grams).
    """
    path = prepared_paths(file.prefix).bin
    for first, block in _blocks(file.tokens):
        low, high = int(block.min()), int(block.max())
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            where = first + int(np.flatnonzero(block == bad)[0])
            raise ValueError(
                f"{path} has token id {bad} at token {where}, the model's ids are 0..{vocab_size - 1}: take the "
                "tokenizer of the model or raise vocab_size"
            )
        images = np.flatnonzero(block == image_token_id)
        if images.size:
            raise ValueError(
                f"{path} is text with the model's image_token_id {image_token_id} at token {first + int(images[0])}: "
                "set image_token_id to an id that the tokenizer keeps for images, or to one above its vocabulary"
            )
        inside = first + np.flatnonzero(block == eod_id) + 1
        stray = inside[~np.isin(inside, _ends_within(file.ends, first, first + len(block)))]
        if stray.size:
            raise ValueError(
                f"{path} has end-of-document token {eod_id} inside a document, at token {int(stray[0]) - 1}: one "
                f"document would train as two; {AGAIN}"
            )
    sample = np.unique(np.linspace(0, len(file.ends) - 1, min(len(file.ends), SAMPLED_DOCUMENTS)).astype(np.int64))
    last = np.asarray(file.tokens[file.ends[sample] - 1])
    missing = np.flatnonzero(last != eod_id)
    if missing.size:
        number = int(sample[missing[0]])
        raise ValueError(
            f"{path}: document {number} ends with token {int(last[missing[0]])}, not with the end-of-document token "
            f"{eod_id}: it would run into the next one; prepare the data with an end-of-document token"
        )


def _check_tokenizer(
    path: Path, sidecar: Sidecar, config: DSV41Config, tokenizer_sha256: str | None, token_map: TokenMap | None
) -> None:
    wrong = None
    if tokenizer_sha256 not in (None, sidecar.tokenizer_sha256):
        wrong = f"tokenizer_sha256 is {sidecar.tokenizer_sha256}, the run's tokenizer has {tokenizer_sha256}"
    elif token_map is not None and token_map.digest != sidecar.token_map_sha256:
        wrong = f"token_map_sha256 is {sidecar.token_map_sha256}, the model's token map has {token_map.digest}"
    elif sidecar.vocab_size > config.vocab_size:
        wrong = f"vocab_size is {sidecar.vocab_size}, the model's is {config.vocab_size}"
    elif sidecar.num_classes != config.engram_compressed_vocab_size:
        wrong = (
            f"num_classes is {sidecar.num_classes}, the model's engram_compressed_vocab_size is "
            f"{config.engram_compressed_vocab_size}"
        )
    elif sidecar.eod_id != config.eos_token_id:
        wrong = f"eod_id is {sidecar.eod_id}, the model's eos_token_id is {config.eos_token_id}"
    if wrong:
        raise ValueError(
            f"{path}: {wrong}: the data was made with another tokenizer ({sidecar.tokenizer}); prepare it again with "
            "the model's tokenizer, or for a new model set these sizes to the data's"
        )


def _read_index(path: Path) -> tuple[str, np.ndarray, np.ndarray]:
    """dtype name, tokens per sequence int32 [sequences], first sequence of each document int64 [documents + 1]."""
    size = path.stat().st_size
    with open(path, "rb") as stream:
        header = stream.read(HEADER_BYTES)
    if header[:9] != MAGIC or len(header) < HEADER_BYTES:
        raise ValueError(f"{path} is not an index of Megatron's .bin/.idx format (version 1), or is cut off; {AGAIN}")
    version, code = int.from_bytes(header[9:17], "little"), header[17]
    sequences, documents = (int.from_bytes(header[i : i + 8], "little") for i in (18, 26))
    if version != 1 or code not in DTYPES:
        raise ValueError(f"{path} has version {version} and token type {code}, need version 1 and one of {DTYPES}")
    expected = HEADER_BYTES + 12 * sequences + 8 * documents
    if size != expected:
        what = "cut off" if size < expected else "too long"
        raise ValueError(f"{path} is {what}: it has {size} bytes, its header counts {expected}; {AGAIN}")
    if sequences == 0 or documents < 2:
        raise ValueError(f"{path} is empty: it holds no document; check the input of dsv41 prep")
    content = np.memmap(path, mode="r")
    lengths = content[HEADER_BYTES:].view(np.uint8)[: 4 * sequences].view(np.int32)
    pointers = content[HEADER_BYTES + 4 * sequences :][: 8 * sequences].view(np.int64)
    indices = content[HEADER_BYTES + 12 * sequences :].view(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]) * np.dtype(DTYPES[code]).itemsize
    if lengths.min() <= 0 or not np.array_equal(starts, pointers):
        raise ValueError(f"{path} is damaged: its sequences do not follow each other; {AGAIN}")
    if indices[0] != 0 or indices[-1] != sequences or (np.diff(indices) <= 0).any():
        raise ValueError(f"{path} is damaged: its documents do not cover its sequences, or some are empty; {AGAIN}")
    return DTYPES[code], lengths, indices


def _blocks(tokens: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(first index, tokens) of the blocks to scan."""
    starts = np.arange(0, len(tokens), SCAN_BLOCK)
    if len(tokens) > FULL_SCAN_TOKENS:
        starts = starts[np.unique(np.linspace(0, len(starts) - 1, FULL_SCAN_TOKENS // SCAN_BLOCK).astype(np.int64))]
    for first in starts.tolist():
        yield first, np.asarray(tokens[first : first + SCAN_BLOCK])


def _ends_within(ends: np.ndarray, first: int, last: int) -> np.ndarray:
    return ends[np.searchsorted(ends, first, "right") : np.searchsorted(ends, last, "right")]
