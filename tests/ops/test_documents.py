"""Positions, windows and compressed entries of packed documents."""

import pytest
import torch

from megatron_dsv41.ops.documents import documents_from_ids, documents_from_lengths, shard_groups


def brute_entries(lengths, ratio):
    """(first token, position) of every entry, document by document."""
    entries, begin = [], 0
    for length in lengths:
        entries += [(begin + j * ratio, j * ratio) for j in range(length // ratio)]
        begin += length
    return entries


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("lengths", [[1], [2], [7], [3, 1, 1, 6], [5, 4, 2], [1, 1, 1]])
def test_entries_never_straddle_documents(lengths, ratio):
    total = sum(lengths)
    documents = documents_from_lengths([lengths], total)
    entries = documents.entries(ratio)
    expected = brute_entries(lengths, ratio)
    assert entries.token_C.shape == (total // ratio,)
    assert entries.valid_C.sum() == len(expected) and entries.valid_C[: len(expected)].all()
    assert list(zip(entries.token_C.tolist(), entries.position_C.tolist(), strict=True))[: len(expected)] == expected
    for t in range(total):
        start, position = documents.start_T[t].item(), documents.position_T[t].item()
        assert start + position == t
        first, count = entries.first_T[t].item(), entries.num_visible_T[t].item()
        mine = [i for i, (token, _) in enumerate(expected) if start <= token and token + ratio - 1 <= t]
        assert list(range(first, first + count)) == mine


def test_rows_are_documents():
    documents = documents_from_lengths([[4], [4]], 4)
    assert documents.start_T.tolist() == [0, 0, 0, 0, 4, 4, 4, 4]
    assert documents.window_start(3).tolist() == [0, 0, 0, 1, 4, 4, 4, 5]


def test_padding_is_a_dead_document_of_its_own():
    documents = documents_from_lengths([[3]], 5)
    assert documents.alive_T.tolist() == [True, True, True, False, False]
    assert documents.start_T.tolist() == [0, 0, 0, 3, 3]


def test_left_padding_does_not_shift_positions():
    ids = torch.zeros(1, 5, dtype=torch.int64)
    alive = torch.tensor([[False, False, True, True, True]])
    documents = documents_from_ids(ids, alive, torch.zeros_like(alive))
    assert documents.position_T.tolist() == [0, 1, 0, 1, 2]


def test_too_long_documents_are_refused():
    with pytest.raises(ValueError, match=r"row 1: document lengths \[3, 3\] exceed the sequence length 5"):
        documents_from_lengths([[5], [3, 3]], 5)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[12], [5, 7], [1, 1, 3, 7], [3, 3, 3, 3], [11]])
def test_shards_compress_every_group_once_even_across_their_edges(lengths, shards, ratio):
    documents = documents_from_lengths([lengths], 12)
    entries = documents.entries(ratio)
    tokens = torch.arange(12)
    gathered, positions = [], []
    for shard in range(shards):
        groups = shard_groups(entries, 12, shards, shard)
        size = 12 // shards
        haloed = torch.cat([torch.full((ratio - 1,), -99), tokens]) if shard == 0 else tokens
        begin = shard * size - (ratio - 1) if shard else 0
        held = haloed[begin : begin + size + ratio - 1]
        gathered.append(held[groups.token_C])
        positions.append(groups.position_C)
        assert groups.token_C.shape[0] == gathered[0].shape[0]
    slot_C = groups.slot_C
    assert torch.cat(gathered)[slot_C][entries.valid_C].tolist() == entries.token_C[entries.valid_C].tolist()
    assert torch.cat(positions)[slot_C][entries.valid_C].tolist() == entries.position_C[entries.valid_C].tolist()
