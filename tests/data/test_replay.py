"""Replay boundaries: inside their documents, evenly spread, the same after a resume, the loss cut before them."""

import pytest
import torch

from megatron_dsv41.data.replay import draw_replay
from megatron_dsv41.ops.documents import documents_from_ids, documents_from_lengths

WINDOW = 4


def drawn(lengths, seq, samples, probability=1.0, seed=1):
    documents = documents_from_lengths(lengths, seq)
    weight = torch.ones(len(lengths), seq)
    return documents, draw_replay(
        documents, weight, torch.tensor(samples), probability=probability, window=WINDOW, seed=seed
    )


def one_document_per_row(rows, seq, probability=1.0):
    ids = torch.zeros(rows, seq, dtype=torch.int64)
    documents = documents_from_ids(ids, ids == 0, ids > 0)
    samples = torch.arange(rows)
    return draw_replay(documents, ids + 1.0, samples, probability=probability, window=WINDOW, seed=1)


def test_boundaries_leave_a_window_and_a_token():
    documents, replay = drawn([[9, 3, 5, 20], [4, 1, 30]], 40, [7, 8])
    for begin in documents.start_T.unique().tolist():
        members = (documents.start_T == begin) & documents.alive_T
        if not members.any():
            continue
        n, starts = int(members.sum()), replay.start_T[members].unique()
        assert len(starts) == 1
        local = int(starts[0]) - begin
        assert local == 0 if n <= WINDOW else 0 <= local <= n - 1 - WINDOW
    here = torch.arange(80)
    assert torch.equal(replay.weight_BS.reshape(-1) > 0, here >= replay.start_T)


def test_every_boundary_occurs_evenly():
    replay = one_document_per_row(6000, 10)
    counts = torch.bincount(replay.start_T.view(6000, 10)[:, 0] % 10)
    assert counts.sum() == 6000 and len(counts) == 6 and (counts / 1000 - 1).abs().max() < 0.1


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_as_many_documents_as_asked(probability):
    replay = one_document_per_row(4000, 64, probability)
    replayed = (replay.weight_BS[:, 0] == 0).float().mean()  # boundary 0 looks like none: 1 in 60
    assert replayed == pytest.approx(probability * 59 / 60, abs=0.03)
    if probability == 0:
        assert replay.weight_BS.all()


def test_a_sample_draws_the_same_wherever_it_lies():
    _, together = drawn([[30, 10], [25, 15]], 40, [11, 12])
    for row, sample in enumerate((11, 12)):
        _, alone = drawn([[[30, 10], [25, 15]][row]], 40, [sample])
        assert torch.equal(together.start_T.view(2, 40)[row] - 40 * row, alone.start_T)
    _, other_seed = drawn([[30, 10], [25, 15]], 40, [11, 12], seed=2)
    assert not torch.equal(other_seed.start_T, together.start_T)
