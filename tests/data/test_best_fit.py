"""Best-fit packing: nothing lost, nothing twice, hardly any padding."""

import numpy as np
import pytest

from megatron_dsv41.data.best_fit import cut, draw_epoch, fit


def lengths_of(kind: str, count: int) -> np.ndarray:
    """Document lengths in tokens: log-normal fits of web pages, of source files, and of books."""
    mean, sigma, least = {"web": (6.2, 1.1, 8), "code": (6.9, 1.5, 8), "books": (11.3, 0.7, 200)}[kind]
    drawn = np.random.default_rng(0).lognormal(mean, sigma, count)
    return np.maximum(drawn, least).astype(np.int64)


@pytest.mark.parametrize(("kind", "count"), [("web", 800_000), ("code", 400_000), ("books", 20_000)])
@pytest.mark.parametrize("capacity", [4096, 65536])
def test_padding_is_below_one_in_ten_thousand(kind, count, capacity):
    pieces = cut(lengths_of(kind, count), capacity)
    bins = fit(pieces.length, capacity)
    assert bins.padding(capacity) <= 1e-4
    assert all(sum(lengths) <= capacity for lengths in bins.lengths)
    held = np.concatenate([np.repeat(kind, count) for kind, count in zip(bins.lengths, bins.counts, strict=True)])
    assert np.array_equal(np.bincount(held), np.bincount(pieces.length))


@pytest.mark.parametrize("capacity", [1, 5, 16, 64, 100])
def test_pieces_are_the_documents(capacity):
    lengths = np.array([1, 5, 16, 17, 99, 100, 101, 64, 333])
    pieces = cut(lengths, capacity)
    assert pieces.length.min() >= 1 and pieces.length.max() <= capacity
    for document, length in enumerate(lengths):
        mine = pieces.document == document
        covered = [np.arange(o, o + n) for o, n in zip(pieces.offset[mine], pieces.length[mine], strict=True)]
        assert np.concatenate(covered).tolist() == list(range(length))
        assert mine.sum() == 1 or length > capacity  # what fits stays whole


def test_small_cases_are_packed_as_best_fit_decreasing():
    bins = fit(np.array([7, 5, 5, 3, 3, 2, 2, 1]), 10)
    packed = sorted(kind for kind, count in zip(bins.lengths, bins.counts, strict=True) for _ in range(count))
    assert packed == [(3, 2, 2, 1), (5, 5), (7, 3)]
    assert bins.padding(10) == pytest.approx(2 / 30)


def test_every_piece_once_per_epoch_and_the_same_again():
    pieces = cut(lengths_of("code", 3000), 1024)
    bins = fit(pieces.length, 1024)
    first, again, second = (draw_epoch(bins, pieces.length, 5, epoch) for epoch in (0, 0, 1))
    for epoch in (first, second):
        assert np.array_equal(np.sort(epoch.piece), np.arange(len(pieces.length)))
        filled = np.add.reduceat(pieces.length[epoch.piece], epoch.start[:-1])
        assert filled.max() <= 1024 and len(epoch.start) == bins.total + 1
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first.piece, second.piece)


def test_lengths_beyond_the_sequence_are_refused():
    with pytest.raises(ValueError, match=r"lengths must be in 1 \.\. 8, got 3 \.\. 9"):
        fit(np.array([3, 9]), 8)
