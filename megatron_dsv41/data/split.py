"""Which documents are for validation. The draw depends on seed and document number alone."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np

Part = Literal["train", "validation"]


def split_share(documents: Iterable[np.ndarray], share: float, seed: int) -> Iterator[tuple[Part, np.ndarray]]:
    """(part, tokens) of each document, in order; each goes to validation with probability `share`."""
    for number, ids in enumerate(documents):
        yield ("validation" if share and _uniform(seed, number) < share else "train"), ids


def split_count(documents: Iterable[np.ndarray], count: int, seed: int) -> Iterator[tuple[Part, np.ndarray]]:
    """(part, tokens): the `count` documents with the smallest draw are for validation and come last, in order.

    One pass, `count` documents in memory. A document that a later one displaces comes when it is displaced.
    """
    drawn: list[tuple[float, int, np.ndarray]] = []  # heap with the largest draw on top
    for number, ids in enumerate(documents):
        entry = (-_uniform(seed, number), number, ids)
        if len(drawn) < count:
            heapq.heappush(drawn, entry)
            continue
        *_, ids = heapq.heappushpop(drawn, entry)
        yield "train", ids
    for _, _, ids in sorted(drawn, key=lambda entry: entry[1]):
        yield "validation", ids


def _uniform(seed: int, number: int) -> float:
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
