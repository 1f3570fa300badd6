"""Sequences grow from 1 Ki to 8 Ki tokens within a run, on documents that need them; the batch in tokens stays."""

import pytest

from megatron_dsv41.experiments.tracking import read_metrics
from megatron_dsv41.testing.distributed import Ranks, run_ranks
from megatron_dsv41.testing.tiny_run import tiny_run, write_corpus

PHASES = """phases=[{name: short, steps: 3, phase: {yarn: false}},
  {name: long, steps: 3, data: {seq_length: 8192, packing: best_fit}, batch: {micro: 1}, phase: {hsi: true}}]"""


def train(folder, *overrides):
    """On a rank."""
    from megatron_dsv41.backends.megatron.train import train

    return train(tiny_run(folder, *overrides))


def rows(folder):
    return [row for row in read_metrics(folder) if "loss" in row]


@pytest.mark.slow
def test_from_one_to_eight_kibi(tmp_path):
    for seed, part in enumerate(("train", "valid")):
        write_corpus(tmp_path / "data" / part, documents=16, seed=seed, lengths=(3000, 9000))
    work = (
        *(tmp_path, PHASES.replace("\n", " "), "train.steps=null", "batch.sequences=null", "batch.tokens=8192"),
        *("data.seq_length=1024", "batch.micro=2", "phase.index_loss=sparse", "phase.hsi=false", "logging.interval=1"),
        "checkpoint.interval=3",
    )
    whole, killed = (f"checkpoint.folder={tmp_path / name}" for name in ("whole", "killed"))
    assert run_ranks(train, 1, *work, whole, timeout=900) == [0]
    found = rows(tmp_path / "whole")
    assert [row["tokens"] for row in found] == [8192 * step for step in range(1, 7)]
    assert all(row["loss"] < 5.5 and row["index_kl/4"] > 0 for row in found)

    with Ranks(train, 1, *work, killed) as ranks:
        ranks.wait_until(lambda: len(rows(tmp_path / "killed")) >= 4, timeout=900)
        ranks.kill()
    assert run_ranks(train, 1, *work, killed, timeout=900) == [0]
    assert [row["loss"] for row in rows(tmp_path / "killed")] == [row["loss"] for row in found]
