"""FLOPs of whole runs."""

import pytest

from megatron_dsv41.experiments.run_flops import RunFlops, training_flops_per_token
from megatron_dsv41.testing.tiny_run import tiny_run


def test_flops_add_up_over_phases(tmp_path):
    """A phase of longer sequences costs more per token; what earlier phases cost stays."""
    tokens = 4 * 32
    phases = [
        {"name": "short", "tokens": 3 * tokens},
        {"name": "long", "tokens": 5 * tokens, "data": {"seq_length": 64}},
    ]
    run = tiny_run(tmp_path, batch={"tokens": tokens}, train={"precision": "fp32"}, phases=phases)
    short, long = (training_flops_per_token(leg.run) for leg in run.legs)
    flops = RunFlops.of(run)
    assert short < long
    assert flops.until(0) == 0
    assert flops.until(2) == pytest.approx(2 * tokens * short)
    assert flops.until(5) == pytest.approx(tokens * (3 * short + 2 * long))
    assert flops.until(8) == pytest.approx(tokens * (3 * short + 5 * long))


def test_flops_of_a_run_without_phases(tmp_path):
    run = tiny_run(tmp_path)
    assert RunFlops.of(run).until(4) == pytest.approx(4 * run.tokens_per_step * training_flops_per_token(run))
