"""Samples of a run through Megatron's builder: what follows from the seed, and what does not."""

import torch

from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.tiny_run import EOD, tiny_run


def first_samples(folder):
    """On a rank: of seeds 1 and 2, the first training and validation samples, [samples, seq_length] each."""
    from megatron_dsv41.backends.megatron.data import TokenizerIdentity, build_datasets

    found = []
    for seed in (1, 2):
        run = tiny_run(folder, f"train.seed={seed}", "eval.interval=2", "eval.batches=1", "data.seq_length=16")
        sources = build_datasets(run, 60, TokenizerIdentity(EOD, "none"), str(folder / "cache"))
        found.append([torch.stack([source[i]["tokens"] for i in range(4)]) for source in sources])
    return found


def test_runs_of_two_seeds_train_on_other_samples_and_are_validated_on_the_same(tmp_path):
    ((first, second),) = run_ranks(first_samples, 1, tmp_path)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[0], first[1])
