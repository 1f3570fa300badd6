import pytest
import torch

from megatron_dsv41.data.packing import document_ids, pack, targets
from megatron_dsv41.ops.documents import documents_from_lengths

EOD, IMAGE = 1, 3


def samples(rows: int, seq: int, seed: int) -> torch.Tensor:
    """[b, s + 1] random ids, one in five an end of document."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 50, (rows, seq + 1), generator=generator)
    return torch.where(torch.rand(ids.shape, generator=generator) < 0.2, EOD, ids)


def cut(row: list[int]) -> list[list[int]]:
    """The documents of a row, each with the token that ends it."""
    documents = [[]]
    for token in row:
        documents[-1].append(token)
        if token == EOD:
            documents.append([])
    return [d for d in documents if d]


@pytest.mark.parametrize("seq", [*range(1, 20), 41])
def test_documents_follow_the_end_tokens(seq):
    text = samples(3, seq, seed=seq)
    packed = pack(text[:, :-1], text[:, 1:], eod_id=EOD, image_token_id=IMAGE)
    lengths = [[len(d) for d in cut(row.tolist())] for row in text[:, :-1]]
    expected = documents_from_lengths(lengths, seq)
    assert torch.equal(packed.documents.start_T, expected.start_T)
    assert torch.equal(packed.documents.position_T, expected.position_T)
    assert packed.documents.alive_T.all() and not packed.documents.image_T.any()
    for ratio in (1, 2):  # no group of entries holds tokens of two documents
        entries = packed.documents.entries(ratio)
        first = entries.token_C[entries.valid_C]
        assert torch.equal(packed.documents.start_T[first], packed.documents.start_T[first + ratio - 1])


@pytest.mark.parametrize("seq", [1, 2, 7, 32])
def test_loss_stays_in_the_document(seq):
    text = samples(4, seq, seed=100 + seq)
    inputs, labels = text[:, :-1], text[:, 1:]
    packed = pack(inputs, labels, eod_id=EOD, image_token_id=IMAGE)
    for row in range(4):
        for t in range(seq):
            trained = inputs[row, t] != EOD  # the end itself is predicted, what follows it is not
            assert packed.weight_BS[row, t] == float(trained)
            assert packed.labels_BS[row, t] == (labels[row, t] if trained else 0)
    assert packed.weight_BS.dtype == torch.float32


def test_document_ids_of_consecutive_ends():
    ids = torch.tensor([[5, EOD, EOD, 6, 7], [EOD, 8, 9, 9, EOD]])
    assert document_ids(ids, EOD).tolist() == [[0, 0, 1, 2, 2], [0, 1, 1, 1, 1]]


def test_padding_of_a_short_sample():
    # GPTDataset's padding: id 0, loss masked where the label is padding. The 0 inside the text is a real token.
    inputs = torch.tensor([[5, 0, EOD, 0, 0], [0, 5, 6, 7, 8], [7, 6, 5, 9, EOD]])
    labels = torch.tensor([[0, EOD, 0, 0, 0], [5, 6, 7, 8, 9], [6, 5, 9, EOD, 0]])
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]).float()
    packed = pack(inputs, labels, eod_id=EOD, image_token_id=IMAGE, loss_mask_BS=mask)
    alive = [[True] * 3 + [False] * 2, [True] * 5, [True] * 5]
    assert packed.documents.alive_T.reshape(3, 5).tolist() == alive
    assert packed.weight_BS.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert packed.documents.position_T.reshape(3, 5)[0].tolist() == [0, 1, 2, 0, 1]


def test_image_tokens_are_marked():
    inputs = torch.tensor([[5, IMAGE, IMAGE, 6]])
    packed = pack(inputs, inputs.roll(-1, 1), eod_id=EOD, image_token_id=IMAGE)
    assert packed.documents.image_T.tolist() == [False, True, True, False]


def test_pack_leaves_its_inputs_alone():
    text = samples(2, 9, seed=3)
    before = text.clone()
    pack(text[:, :-1], text[:, 1:], eod_id=EOD, image_token_id=IMAGE, loss_mask_BS=torch.ones(2, 9))
    targets(text, image_token_id=IMAGE)
    assert torch.equal(text, before)


@pytest.mark.parametrize("as_tensor", [True, False])
def test_targets_of_given_lengths(as_tensor):
    ids = torch.arange(10, 24).reshape(2, 7)
    lengths = [[3, 1, 2], [7, 0, 0]]
    packed = targets(ids, torch.tensor(lengths) if as_tensor else lengths, image_token_id=IMAGE)
    assert packed.documents.position_T.tolist() == [0, 1, 2, 0, 0, 1, 0, *range(7)]
    assert packed.documents.alive_T.tolist() == [True] * 6 + [False] + [True] * 7
    assert packed.weight_BS.tolist() == [[1, 1, 0, 0, 1, 0, 0], [1] * 6 + [0]]
    assert packed.labels_BS.tolist() == [[11, 12, 0, 0, 15, 0, 0], [18, 19, 20, 21, 22, 23, 0]]


@pytest.mark.parametrize("seq", range(1, 12))
def test_targets_equal_documents_from_lengths(seq):
    lengths = [[seq // 3, seq - seq // 3], [1, seq - 1]]
    lengths = [[n for n in row if n] for row in lengths]
    packed = targets(torch.arange(2 * seq).reshape(2, seq), lengths, image_token_id=-1)
    expected = documents_from_lengths(lengths, seq)
    assert torch.equal(packed.documents.start_T, expected.start_T)
    assert torch.equal(packed.documents.alive_T, expected.alive_T)
    assert packed.weight_BS.sum() == sum(n - 1 for row in lengths for n in row)


def test_targets_without_lengths_are_one_document():
    packed = targets(torch.arange(8).reshape(2, 4), image_token_id=3)
    assert packed.documents.position_T.tolist() == [0, 1, 2, 3] * 2
    assert packed.labels_BS.tolist() == [[1, 2, 3, 0], [5, 6, 7, 0]]


@pytest.mark.parametrize("lengths", [[[3, 3], [2, 2]], [[3, -1], [2, 2]]])
def test_lengths_that_do_not_fit_are_refused(lengths):
    with pytest.raises(ValueError, match="row 0: document lengths .* do not fit in 5 tokens"):
        targets(torch.zeros(2, 5, dtype=torch.int64), lengths, image_token_id=IMAGE)


def test_one_row_of_lengths_for_two_samples_is_refused():
    with pytest.raises(ValueError, match=r"have shape \[1, 2\], need \[2"):
        targets(torch.zeros(2, 5, dtype=torch.int64), [[3, 2]], image_token_id=IMAGE)
