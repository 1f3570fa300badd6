import os

import numpy as np
import pytest

from megatron_dsv41.data.encode import Encoder, Encoding, encode_in_order, split_at_ends
from megatron_dsv41.data.sources import Document

EOD = 1


def encoding(path, **changes) -> Encoding:
    return Encoding(tokenizer=str(path), eod_id=EOD, dtype="uint16", **changes)


@pytest.mark.parametrize(
    ("ids", "documents"),
    [
        ([], []),
        ([5, 6], [[5, 6, EOD]]),
        ([5, 6, EOD], [[5, 6, EOD]]),
        ([5, EOD, EOD], [[5, EOD]]),
        ([EOD], []),
        ([EOD, 5, EOD, EOD, 6, 7], [[5, EOD], [6, 7, EOD]]),
    ],
)
def test_one_end_per_document(ids, documents):
    assert [d.tolist() for d in split_at_ends(np.array(ids, dtype=np.int64), EOD)] == documents


def test_texts_without_content_are_counted(tokenizer_path):
    texts = ["ab", "", None, " \n\t", "<eos>", "cd<eos>", "e<eos>f"]
    encoded = Encoder(encoding(tokenizer_path))([Document(text, "x", 2.0) for text in texts])
    assert encoded.skipped == 4 and encoded.weight == 14
    assert len(encoded.lengths) == 4 and sum(encoded.lengths) == len(encoded.ids)
    assert encoded.ids.dtype == np.uint16
    documents = encoded.documents()
    assert [len(d) for d in documents] == encoded.lengths
    assert all(d[-1] == EOD and (d == EOD).sum() == 1 for d in documents)


def test_special_tokens_can_be_plain_text(tokenizer_path):
    chunk = [Document("cd<eos>", "x", 1.0)]
    (parsed,) = Encoder(encoding(tokenizer_path))(chunk).documents()
    (plain,) = Encoder(encoding(tokenizer_path, special_tokens="text"))(chunk).documents()
    backend = Encoder(encoding(tokenizer_path)).tokenizer.backend
    assert backend.decode(parsed[:-1].tolist()) == "cd"
    assert backend.decode(plain[:-1].tolist()) == "cd<eos>"
    assert (plain == EOD).sum() == 1


def test_output_order_is_input_order_for_any_number_of_workers(tokenizer_path):
    documents = [Document(f"document {i} " * (1 + i % 7), "x", 1.0) for i in range(1500)]
    one = list(encode_in_order(documents, encoding(tokenizer_path), 1))
    two = list(encode_in_order(documents, encoding(tokenizer_path), 2))
    assert len(one) == len(two) == 3
    for a, b in zip(one, two, strict=True):
        assert np.array_equal(a.ids, b.ids) and a.lengths == b.lengths and a.skipped == b.skipped


class Killer(str):
    """Ends the process that receives it."""

    def __reduce__(self):
        return os._exit, (9,)


def test_a_dead_worker_is_named(tokenizer_path):
    documents = [Document(Killer("text"), "x", 1.0)]
    with pytest.raises(ChildProcessError, match="a worker process died"):
        list(encode_in_order(documents, encoding(tokenizer_path), 2))
