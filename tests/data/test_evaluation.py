"""Evaluation predicts every token once, whatever the rows, and counts bytes of what it predicted."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_dsv41.data.check import open_tokens
from megatron_dsv41.data.evaluation import evaluate
from megatron_dsv41.data.prepared import mask_prefix
from megatron_dsv41.data.writer import TokenWriter
from megatron_dsv41.testing.tiny import tiny_config, tiny_model
from megatron_dsv41.testing.tiny_run import EOD, VOCABULARY, write_corpus

BYTES = np.arange(VOCABULARY) % 5


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "data", documents=12)


@pytest.fixture(scope="module")
def model():
    return tiny_model(tiny_config()).double().eval()


def by_hand(model, tokens, seq_length):
    nats, labels = 0.0, []
    for first in range(0, len(tokens) - 1, seq_length):
        row = torch.tensor(np.asarray(tokens[first : first + seq_length + 1], dtype=np.int64))
        for document in torch.tensor_split(row, (row[:-1] == EOD).nonzero()[:, 0] + 1):
            if len(document) > 1:
                with torch.no_grad():
                    logits = model(document[None, :-1]).logits[0]
                nats += float(F.cross_entropy(logits, document[1:], reduction="sum"))
                labels += document[1:].tolist()
    return nats, labels


@pytest.mark.parametrize("seq_length", [7, 32, 10_000])
def test_every_token_once(model, prefix, seq_length):
    score = evaluate(model, prefix, BYTES, seq_length=seq_length, rows=3)
    nats, labels = by_hand(model, open_tokens(prefix).tokens, seq_length)
    assert score.predicted == len(labels) and score.text_bytes == BYTES[labels].sum()
    assert score.nats == pytest.approx(nats, rel=1e-9)
    assert score.nats_per_token == pytest.approx(nats / len(labels))
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / BYTES[labels].sum())


def test_limit_and_progress(model, prefix):
    seen = []
    score = evaluate(model, prefix, BYTES, seq_length=16, rows=2, limit=40, advance=seen.append)
    assert seen == [32, 8]
    nats, labels = by_hand(model, open_tokens(prefix).tokens[:41], 16)
    assert (score.nats, score.predicted) == (pytest.approx(nats, rel=1e-9), len(labels))


def write_mask(prefix, trained):
    with TokenWriter(mask_prefix(prefix), "uint8") as writer:
        for document in trained:
            writer.add(document)
        writer.finish()


def test_a_loss_mask_says_which_tokens_count(model, tmp_path):
    prefix = write_corpus(tmp_path / "data", documents=5)
    found = open_tokens(prefix)
    trained = [np.arange(len(part)) % 3 == 1 for part in np.split(found.tokens, found.ends[:-1])]
    write_mask(prefix, [part.astype(np.uint8) for part in trained])
    score = evaluate(model, prefix, BYTES, seq_length=16, rows=3)
    flags, losses, labels = np.concatenate(trained), [], []
    for first in range(0, len(found.tokens) - 1, 16):
        row = torch.tensor(np.asarray(found.tokens[first : first + 17], dtype=np.int64))
        counted = torch.tensor(flags[first : first + 17])
        cuts = (row[:-1] == EOD).nonzero()[:, 0] + 1
        for document, counts in zip(torch.tensor_split(row, cuts), torch.tensor_split(counted, cuts), strict=True):
            if len(document) > 1:
                with torch.no_grad():
                    loss = F.cross_entropy(model(document[None, :-1]).logits[0], document[1:], reduction="none")
                losses.append(loss[counts[1:]].sum().item())
                labels += document[1:][counts[1:]].tolist()
    assert 0 < score.predicted == len(labels) < len(found.tokens) / 2
    assert score.nats == pytest.approx(sum(losses), rel=1e-9) and score.text_bytes == BYTES[labels].sum()


def test_masks_that_leave_nothing_or_are_short_are_errors(model, tmp_path):
    prefix = write_corpus(tmp_path / "data", documents=2)
    tokens = len(open_tokens(prefix).tokens)
    write_mask(prefix, [np.zeros(tokens, dtype=np.uint8)])
    with pytest.raises(ValueError, match="or their loss mask is empty"):
        evaluate(model, prefix, BYTES, seq_length=8)
    write_mask(prefix, [np.ones(tokens - 1, dtype=np.uint8)])
    with pytest.raises(ValueError, match=f"mask.bin is of {tokens - 1} tokens"):
        evaluate(model, prefix, BYTES, seq_length=8)


def test_nothing_to_predict_is_an_error(model, tmp_path):
    from megatron_dsv41.data import check

    prefix = write_corpus(tmp_path / "data", documents=2)
    tokens = np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r")
    assert check.open_tokens(prefix).ends[0] < len(tokens)
    with pytest.raises(ValueError, match="has no token to predict"):
        evaluate(model, prefix, np.zeros(VOCABULARY, dtype=np.int64), seq_length=8, limit=4)
