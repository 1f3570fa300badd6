"""Texts to token ids, in this process or in several. Output order is input order, whatever the number of processes.

Workers import this module and nothing heavy.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.synchronize import Event
from typing import Literal, NamedTuple

import numpy as np

from megatron_dsv41.data.sources import Document
from megatron_dsv41.data.tokenizer import OpenTokenizer, open_tokenizer

CHUNK_CHARACTERS = 1 << 19
CHUNK_DOCUMENTS = 512
CHUNKS_IN_FLIGHT = 4  # per worker: enough to hide the writer, little enough to bound memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoding:
    """How texts become tokens; the same in every process."""

    tokenizer: str  # path of tokenizer.json
    eod_id: int
    dtype: str  # numpy name
    special_tokens: Literal["parse", "text"] = "parse"  # what a special token written in a text is


class Encoded(NamedTuple):
    """Documents of one chunk, in order."""

    ids: np.ndarray  # their tokens end to end, in `Encoding.dtype`
    lengths: list[int]  # tokens of each, its end-of-document token included
    skipped: int  # texts without content
    weight: float  # sum of `Document.weight`

    def documents(self) -> list[np.ndarray]:
        """The tokens of each document."""
        return np.split(self.ids, np.cumsum(self.lengths[:-1])) if self.lengths else []


class Encoder:
    """Encodes chunks with one tokenizer."""

    def __init__(self, encoding: Encoding) -> None:
        tokenizer = open_tokenizer(encoding.tokenizer)
        tokenizer.backend.encode_special_tokens = encoding.special_tokens == "text"
        self.tokenizer: OpenTokenizer = tokenizer
        self.encoding = encoding

    def __call__(self, chunk: list[Document]) -> Encoded:
        """Encode a chunk. Every document ends with exactly one end-of-document token and holds no other."""
        texts = [document.text for document in chunk if document.text and not document.text.isspace()]
        skipped = len(chunk) - len(texts)
        pieces: list[np.ndarray] = []
        for encoded in self.tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False):
            documents = split_at_ends(np.array(encoded.ids, dtype=np.int64), self.encoding.eod_id)
            pieces += documents
            skipped += not documents
        ids = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
        weight = sum(document.weight for document in chunk)
        return Encoded(ids.astype(self.encoding.dtype), [len(piece) for piece in pieces], skipped, weight)


def split_at_ends(ids: np.ndarray, eod_id: int) -> list[np.ndarray]:
    """Documents in the tokens of one text, each with its end-of-document token; none if there is no other token.

    A text that already ends with the token gets no second one. One with the token inside is several documents:
    the model would treat it so anyway.
    """
    pieces = np.split(ids, np.flatnonzero(ids == eod_id) + 1)
    contents = [piece[piece != eod_id] for piece in pieces]
    return [np.append(content, eod_id) for content in contents if content.size]


def encode_in_order(documents: Iterable[Document], encoding: Encoding, workers: int) -> Generator[Encoded, None, None]:
    """Chunks of `documents`, encoded by `workers` processes (1: by this one), in order.

    ChildProcessError when a worker dies. Errors inside a worker come out as they are.
    """
    chunks = _chunks(documents)
    if workers == 1:
        yield from map(Encoder(encoding), chunks)
        return
    # spawn, not fork: the parent may have threads (torch, tokenizers, datasets) that a fork would leave locked.
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    executor = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(encoding, stop))
    try:
        waiting: deque[Future[Encoded]] = deque()
        for chunk in chunks:
            waiting.append(executor.submit(_encode_in_worker, chunk))
            if len(waiting) >= workers * CHUNKS_IN_FLIGHT:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a worker process died (out of memory, or killed): nothing was written; try fewer --workers"
        ) from error
    finally:
        stop.set()  # chunks that a worker has already been handed cannot be cancelled
        executor.shutdown(wait=True, cancel_futures=True)


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.text or "")
        if size >= CHUNK_CHARACTERS or len(chunk) >= CHUNK_DOCUMENTS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


_encoder: Encoder | None = None  # one per worker process
_stop: Event | None = None


def _start_worker(encoding: Encoding, stop: Event) -> None:
    global _encoder, _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism here
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = Encoder(encoding)


def _end_with_parent() -> None:
    """Workers of a parent that was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(chunk: list[Document]) -> Encoded:
    assert _encoder is not None and _stop is not None
    if _stop.is_set():
        raise CancelledError
    return _encoder(chunk)
