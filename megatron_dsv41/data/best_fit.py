"""Best-fit packing: whole documents into sequences of one length, nearly without padding (SPEC 17).

Only lengths decide, so packing works on their histogram: best-fit decreasing, with all documents of one length handled
at once. A document longer than a sequence is cut; its full pieces are sequences of their own.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np

GRAINS = 16


class Pieces(NamedTuple):
    """Contiguous parts of documents, each at most a sequence long; all int64 [pieces]."""

    document: np.ndarray
    offset: np.ndarray  # of the first token in its document
    length: np.ndarray


class Bins(NamedTuple):
    """Kinds of sequences: which lengths one holds, and how many such sequences there are."""

    lengths: list[tuple[int, ...]]
    counts: list[int]

    @property
    def total(self) -> int:
        """Sequences of one epoch."""
        return sum(self.counts)

    def padding(self, capacity: int) -> float:
        """Share of all positions that hold no token."""
        tokens = sum(sum(lengths) * count for lengths, count in zip(self.lengths, self.counts, strict=True))
        return 1.0 - tokens / (capacity * self.total)


class Epoch(NamedTuple):
    """The sequences of one epoch: sequence i holds pieces `piece[start[i] : start[i + 1]]`."""

    start: np.ndarray
    piece: np.ndarray


def cut(lengths: np.ndarray, capacity: int) -> Pieces:
    """Pieces of documents of these lengths (int [documents]), in order; every token lies in exactly one.

    What full pieces leave of a long document is cut once more, at a multiple of capacity / GRAINS: books alone have
    no small documents that would fill the gaps (20,000 books in sequences of 64 Ki: padding 7e-3 without this, 3e-5
    with it).
    """
    lengths = lengths.astype(np.int64)
    grain = max(1, capacity // GRAINS)
    full, rest = np.divmod(lengths, capacity)
    coarse = np.where(full > 0, rest // grain * grain, rest)
    fine = rest - coarse
    counts = full + (coarse > 0) + (fine > 0)
    document = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    number = np.arange(len(document), dtype=np.int64) - np.repeat(counts.cumsum() - counts, counts)
    offset = np.minimum(number, full[document]) * capacity
    is_last = number == counts[document] - 1
    offset = np.where(is_last & (fine[document] > 0), lengths[document] - fine[document], offset)
    end = np.where(is_last, lengths[document], np.append(offset[1:], 0))
    return Pieces(document, offset, end - offset)


def fit(lengths: np.ndarray, capacity: int) -> Bins:
    """Best-fit decreasing over piece lengths in 1 .. capacity. Deterministic; time goes with the distinct lengths."""
    histogram = np.bincount(lengths, minlength=capacity + 1)
    if len(histogram) > capacity + 1 or histogram[0]:
        raise ValueError(f"lengths must be in 1 .. {capacity}, got {int(lengths.min())} .. {int(lengths.max())}")
    # Open kinds by the space that is left; within one space last in, first out.
    spaces: list[int] = []
    open_kinds: dict[int, list[tuple[tuple[int, ...], int]]] = {}

    def put(kind: tuple[int, ...], count: int, space: int) -> None:
        if space not in open_kinds:
            bisect.insort(spaces, space)
            open_kinds[space] = []
        open_kinds[space].append((kind, count))

    for length in range(capacity, 0, -1):
        left = int(histogram[length])
        while left:
            place = bisect.bisect_left(spaces, length)
            if place == len(spaces):
                left = _open(length, left, capacity, put)
                continue
            space = spaces[place]
            kind, count = open_kinds[space].pop()
            if not open_kinds[space]:
                del open_kinds[space], spaces[place]
            used = min(count, left)
            left -= used
            if count > used:
                put(kind, count - used, space)
            put((*kind, length), used, space - length)
    kinds = [entry for space in sorted(open_kinds) for entry in open_kinds[space]]
    return Bins([kind for kind, _ in kinds], [count for _, count in kinds])


def _open(length: int, left: int, capacity: int, put: object) -> int:
    """New sequences of pieces of one length alone: as many full ones as there are, then one with the rest."""
    each = capacity // length
    full, rest = divmod(left, each)
    if full:
        put((length,) * each, full, capacity - length * each)  # type: ignore[operator]
    if rest:
        put((length,) * rest, 1, capacity - length * rest)  # type: ignore[operator]
    return 0


def draw_epoch(bins: Bins, lengths: np.ndarray, seed: int, epoch: int) -> Epoch:
    """Which pieces of these lengths fill which sequence, drawn anew for every epoch: every piece exactly once."""
    random = np.random.default_rng((seed, epoch))
    kinds = random.permutation(np.repeat(np.arange(len(bins.counts)), bins.counts))
    sizes = np.array([len(kind) for kind in bins.lengths], dtype=np.int64)[kinds]
    start = np.concatenate([[0], sizes.cumsum()])
    slots = np.concatenate([np.array(bins.lengths[kind], dtype=np.int64) for kind in kinds])
    shuffled = random.permutation(len(lengths))
    piece = np.empty(len(slots), dtype=np.int64)
    # Slots and pieces of each length meet in the order of the shuffle.
    piece[np.argsort(slots, kind="stable")] = shuffled[np.argsort(lengths[shuffled], kind="stable")]
    return Epoch(start, piece)
