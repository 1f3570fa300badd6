"""Weights trained as they will be stored: a quantized export of the run moves no value."""

import pytest
import torch

from megatron_dsv41.experiments.tracking import read_metrics
from megatron_dsv41.ops.quant.codec import decode, encode
from megatron_dsv41.testing.distributed import Ranks, run_ranks
from megatron_dsv41.testing.tiny_run import tiny_run

PHASES = "phases=[{name: plain, steps: 2}, {name: rounded, steps: 4, phase: {quantized_weights: true}}]"


def train(folder, *overrides):
    """On a rank."""
    from megatron_dsv41.backends.megatron.train import train

    return train(tiny_run(folder, *overrides))


def settings(home, name, *overrides):
    there = f"checkpoint.folder={home / name}"
    return (home, PHASES, there, "train.steps=null", "train.precision=bf16", "checkpoint.interval=2", *overrides)


def losses(folder):
    return {row["step"]: row["loss"] for row in read_metrics(folder) if "loss" in row}


def weights(folder, step):
    from megatron_dsv41.backends.megatron.run_source import RunSource

    source = RunSource(folder, step)
    return source.config, {name: source.read(name) for name in source.names()}


def on_grid(folder, step):
    """Names of the rounded kinds -> whether every value of the weight is on its grid."""
    from megatron_dsv41.backends.megatron.weight_rounding import weight_formats

    config, tensors = weights(folder, step)
    return {
        name: torch.equal(decode(encode(tensors[name].flatten(0, -2), form)), tensors[name].flatten(0, -2))
        for name, form in weight_formats(config).items()
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounding")
    tiny_run(folder)
    assert run_ranks(train, 1, *settings(folder, "whole")) == [0]
    return folder


def test_export_holds_what_was_trained(home):
    kinds = on_grid(home / "whole", 6)
    assert all(kinds.values()) and {"layers.0.ffn.experts.w13", "layers.4.attn.wq_b.weight"} <= set(kinds)
    assert not any(name.startswith(("embed", "head")) or "compressor" in name for name in kinds)
    assert not any(on_grid(home / "whole", 2).values())  # not before the phase
    before, after = (weights(home / "whole", step)[1] for step in (4, 6))
    moved = [not torch.equal(before[name], after[name]) for name in kinds]
    assert sum(moved) > len(moved) / 2  # the fp32 copies below the grid go on moving


def test_killed_in_the_phase_it_goes_on_bitwise(home):
    work = settings(home, "killed")
    with Ranks(train, 1, *work) as ranks:
        ranks.wait_until(lambda: 5 in losses(home / "killed"))
        ranks.kill()
    assert run_ranks(train, 1, *work) == [0]
    assert losses(home / "killed") == losses(home / "whole")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.precision=fp32", "needs train.precision=bf16"),
        ("megatron.overlap_param_gather=true", "leave megatron.overlap_param_gather out"),
    ],
)
def test_what_cannot_be_is_refused(home, override, message):
    from megatron_dsv41.backends.megatron.settings import check_rounding

    run = tiny_run(*settings(home, "unused", override))
    check_rounding(run.legs[0].run)
    with pytest.raises(ValueError, match=message):
        check_rounding(run.legs[1].run)


def rounded_on_two(folder, *overrides):
    """On a rank: refused where a block would lie on two ranks."""
    with pytest.raises(ValueError, match=r"parallel\.tp 2 leaves \d+ of \d+ along dim \d of layers"):
        train(folder, *overrides)


def test_blocks_over_ranks_are_refused(home):
    one = "phases=[{name: rounded, steps: 1, phase: {quantized_weights: true}}]"
    run_ranks(rounded_on_two, 2, *settings(home, "tp", "parallel.tp=2"), one)
