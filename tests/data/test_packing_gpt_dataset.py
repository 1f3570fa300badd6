"""`pack` over samples as Megatron's own GPTDataset cuts them out of prepared data."""

import json
import types

import numpy as np
import pytest
import torch

from megatron_dsv41.data.check import open_tokens
from megatron_dsv41.data.packing import pack
from megatron_dsv41.data.prep import PrepOptions, prepare
from megatron_dsv41.data.sources import SourceOptions

EOD, SEQ = 1, 24


@pytest.fixture(scope="module")
def samples(tmp_path_factory, tokenizer_path):
    """(tokens of the data, document number of each token, the dataset's samples of one epoch)."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    folder = tmp_path_factory.mktemp("gpt")
    lines = (json.dumps({"text": f"{i} is odd or even " * (1 + i % 3)}) + "\n" for i in range(21))
    (folder / "in.jsonl").write_text("".join(lines))
    source = SourceOptions(inputs=[str(folder / "in.jsonl")])
    prepare(PrepOptions(source=source, tokenizer=str(tokenizer_path), output=str(folder / "data")))
    # Only what GPTDataset asks a tokenizer for.
    tokenizer = types.SimpleNamespace(eod=EOD, pad=-1, vocab_size=400, unique_identifiers={}, special_tokens_dict={})
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQ,
        blend=None,
        split="1,0,0",
        path_to_cache=str(folder / "cache"),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        drop_last_partial_validation_sequence=False,
    )
    prefix = str(folder / "data")
    dataset = GPTDataset(IndexedDataset(prefix), prefix, np.arange(21, dtype=np.int32), None, Split.valid, config)
    file = open_tokens(prefix)
    numbers = np.searchsorted(file.ends, np.arange(len(file.tokens)), "right")
    return np.asarray(file.tokens).astype(np.int64), numbers, [dataset[i] for i in range(len(dataset))]


def test_every_token_is_predicted_once_from_its_own_document(samples):
    tokens, numbers, dataset = samples
    batch = {key: torch.stack([sample[key] for sample in dataset]) for key in ("tokens", "labels", "loss_mask")}
    packed = pack(batch["tokens"], batch["labels"], eod_id=EOD, image_token_id=3, loss_mask_BS=batch["loss_mask"])
    alive = packed.documents.alive_T.reshape(-1, SEQ)
    assert alive.sum() == len(tokens) and not alive.all()  # the last sample is filled up
    # One epoch predicts every token that is not the first of its document.
    firsts = np.count_nonzero(np.diff(numbers, prepend=-1))
    assert packed.weight_BS.sum() == len(tokens) - firsts
    counted = packed.labels_BS[packed.weight_BS > 0]
    assert (counted == EOD).sum() == len(np.unique(numbers))


def test_documents_of_a_sample_are_those_of_the_data(samples):
    tokens, numbers, dataset = samples
    for sample in dataset:
        here = sample["tokens"][None]
        packed = pack(
            here, sample["labels"][None], eod_id=EOD, image_token_id=3, loss_mask_BS=sample["loss_mask"][None]
        )
        length = int(packed.documents.alive_T.sum())
        # One document order in an epoch is not the file's; a sample is found in it by its documents' own tokens.
        starts = packed.documents.start_T[:length]
        pieces = [sample["tokens"][:length][starts == s].tolist() for s in starts.unique()]
        whole = [tokens[numbers == n].tolist() for n in np.unique(numbers)]
        assert pieces[0] and any(pieces[0] == w[i : i + len(pieces[0])] for w in whole for i in range(len(w)))
        for middle in pieces[1:-1]:
            assert middle in whole
        assert len(pieces) == 1 or any(pieces[-1] == w[: len(pieces[-1])] for w in whole)
