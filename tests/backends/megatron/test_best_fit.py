"""Best-fit samples through Megatron's builder and through a run: every token once, no leak, resumable."""

import numpy as np
import pytest
import torch

from megatron_dsv41.data.packing import pack_numbered
from megatron_dsv41.experiments.tracking import read_metrics
from megatron_dsv41.testing.distributed import Ranks, run_ranks
from megatron_dsv41.testing.tiny_run import EOD, tiny_run

SEQ = 48


def read_epochs(folder, epochs):
    """On a rank: the corpus as (document, tokens) and the samples of the first epochs."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    from megatron_dsv41.backends.megatron.best_fit import BestFitDataset
    from megatron_dsv41.backends.megatron.data import TokenizerIdentity, build_datasets

    run = tiny_run(folder, f"data.seq_length={SEQ}", "data.packing=best_fit")
    train, valid = build_datasets(run, 60, TokenizerIdentity(EOD, "none"), str(folder / "cache"))
    assert valid is None
    inner = next(d for d in (train, *getattr(train, "datasets", [])) if isinstance(d, BestFitDataset))
    samples = [inner[i] for i in range(epochs * inner.bins.total)]
    blended = [train[i] for i in range(3)]
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(blended, samples, strict=False))
    corpus = IndexedDataset(str(next(iter(run.data.train))))
    return [corpus[i].astype(np.int64) for i in range(len(corpus))], samples, inner.bins.padding(SEQ)


@pytest.fixture(scope="module")
def epochs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("best-fit")
    tiny_run(folder)
    return run_ranks(read_epochs, 1, folder, 2)[0]


def pieces(sample):
    """The documents or parts of documents of one sample, with labels and weights."""
    for number in range(int(sample["document"].max()) + 1):
        here = sample["document"] == number
        yield tuple(sample[key][here] for key in ("tokens", "labels", "loss_mask"))


def test_every_token_once_per_epoch(epochs):
    corpus, samples, padding = epochs
    half = len(samples) // 2
    for epoch in (samples[:half], samples[half:]):
        seen = sum((torch.bincount(s["tokens"][s["document"] >= 0], minlength=100) for s in epoch), torch.zeros(100))
        assert torch.equal(seen.long(), torch.bincount(torch.from_numpy(np.concatenate(corpus)), minlength=100))
        held = sum(int((s["document"] >= 0).sum()) for s in epoch)
        assert 1 - held / (SEQ * half) == pytest.approx(padding)
        whole = sorted(tuple(t.tolist()) for s in epoch for t, *_ in pieces(s) if t[-1] == EOD and len(t) > 1)
        short = sorted(tuple(d.tolist()) for d in corpus if len(d) <= SEQ)
        assert set(short) <= set(whole)  # what fits is never cut
    assert [s["tokens"].tolist() for s in samples[:half]] != [s["tokens"].tolist() for s in samples[half:]]


def test_labels_follow_the_document_and_nothing_else(epochs):
    corpus, samples, _ = epochs
    text = ["".join(map(chr, document)) for document in corpus]
    for sample in samples[:20]:
        for tokens, labels, weight in pieces(sample):
            assert torch.equal(labels[:-1], tokens[1:]) and (weight[:-1] == 1).all()
            ends = int(tokens[-1]) == EOD
            assert weight[-1] == (0 if ends else 1)
            if not ends:  # cut out of a longer document: its next token is still predicted
                continued = "".join(map(chr, [*tokens.tolist(), int(labels[-1])]))
                assert any(continued in document for document in text)
        padding = sample["document"] < 0
        assert not sample["loss_mask"][padding].any() and not sample["tokens"][padding].any()


def test_documents_of_a_sample_do_not_meet(epochs):
    _, samples, _ = epochs
    sample = next(s for s in samples if len(list(pieces(s))) > 2 and (s["document"] < 0).any())
    rows = (sample[key][None] for key in ("tokens", "labels", "loss_mask", "document"))
    packed = pack_numbered(*rows, image_token_id=95)
    expected = []
    for tokens, *_ in pieces(sample):
        expected += list(range(len(tokens)))
    assert packed.documents.position_T[: len(expected)].tolist() == expected
    assert torch.equal(packed.documents.alive_T, sample["document"] >= 0)


def masked_sample(folder):
    """On a rank: a sample of a corpus with a loss mask that trains every second token of a document."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    from megatron_dsv41.backends.megatron.data import TokenizerIdentity, build_datasets
    from megatron_dsv41.data.prepared import mask_prefix
    from megatron_dsv41.data.writer import TokenWriter

    run = tiny_run(folder, f"data.seq_length={SEQ}", "data.packing=best_fit")
    prefix = next(iter(run.data.train))
    with TokenWriter(mask_prefix(prefix), "uint8") as writer:
        corpus = IndexedDataset(prefix)  # its lengths are a view of a file that it holds open
        for length in corpus.sequence_lengths:
            writer.add(np.arange(length) % 2)
        writer.finish()
    train, _ = build_datasets(run, 60, TokenizerIdentity(EOD, "none"), str(folder / "cache"))
    return train[0]


def refused(folder):
    """On a rank: what the start of a run without best-fit packing says of the masked corpus."""
    from megatron_dsv41.backends.megatron.run_checks import open_corpus

    with pytest.raises(ValueError) as error:
        open_corpus(tiny_run(folder, f"data.seq_length={SEQ}"))
    return str(error.value)


def test_a_loss_mask_says_what_is_trained(tmp_path):
    (sample,) = run_ranks(masked_sample, 1, tmp_path)
    assert "has a loss mask, which data.packing=concat does not read" in run_ranks(refused, 1, tmp_path)[0]
    whole = [p for p in pieces(sample) if p[0][-1] == EOD and len(p[0]) > 3]
    assert whole
    for tokens, _, weight in whole:
        label_place = torch.arange(1, len(tokens))  # in the document, of the token that a position predicts
        assert torch.equal(weight[:-1], (label_place % 2).float()) or len(tokens) == SEQ
        assert weight[-1] == 0


def train(folder, *overrides):
    """On a rank."""
    from megatron_dsv41.backends.megatron.train import train

    return train(tiny_run(folder, *overrides))


def losses(folder):
    return {row["step"]: row["loss"] for row in read_metrics(folder) if "loss" in row}


def test_a_run_with_replays_and_packing_resumes_bitwise(tmp_path):
    work = ("data.packing=best_fit", "phase.replay=0.5", "train.steps=6", "checkpoint.interval=2")
    for name in ("whole", "killed"):
        tiny_run(tmp_path)
        there = f"checkpoint.folder={tmp_path / name}"
        if name == "killed":
            with Ranks(train, 1, tmp_path, *work, there) as ranks:
                ranks.wait_until(lambda: 3 in losses(tmp_path / "killed"))
                ranks.kill()
        assert run_ranks(train, 1, tmp_path, *work, there) == [0]
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == 6
    assert run_ranks(train, 2, tmp_path, *work, "parallel.cp=2", f"checkpoint.folder={tmp_path / 'cp2'}") == [0, 0]
    first = (losses(tmp_path / name)[1] for name in ("cp2", "whole"))
    assert next(first) == pytest.approx(next(first), rel=1e-5)
