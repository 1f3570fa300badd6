"""Router biases: moved by the sign of the load, text and image apart, in fp32 whatever the model's dtype."""

import math

import pytest
import torch
import torch.distributed as dist

from megatron_dsv41.backends.megatron.run_source import RunSource
from megatron_dsv41.optim.groups import ROLES
from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.tiny_run import tiny_run

SPEED = 1e-3


def check_rule(folder):
    """On a rank: loads of layer 2 that only the sum over ranks makes unequal in the expected way."""
    from megatron_dsv41.backends.megatron import trainer as trainers
    from megatron_dsv41.backends.megatron.builder import DSV41ModelBuilder
    from megatron_dsv41.backends.megatron.layer_metrics import load_metrics
    from megatron_dsv41.backends.megatron.router_bias import update_router_biases

    trainer = trainers.create(tiny_run(folder, "train.precision=bf16", "batch.micro=1"))
    stage = DSV41ModelBuilder(trainer.model_config).build_model(trainer.groups)
    gates = [block.ffn.gate for block in stage.layers.values()]
    assert all(gate.weight.dtype is torch.bfloat16 for gate in gates)
    assert all(bias.dtype is torch.float32 for gate in gates for bias in (gate.bias, gate.bias_vl))
    rank = dist.get_rank()
    own = torch.tensor([[8.0, 0, 2, 0], [0, 0, 0, 6]]) if rank == 0 else torch.tensor([[0.0, 4, 2, 0], [2, 0, 0, 0]])
    for _ in range(2):
        stage.expert_load[2] = own
        load, _ = update_router_biases([stage], SPEED, trainer.groups.dp_cp, trainer.groups.pp)
        assert not stage.expert_load.any()
    # Summed over ranks: text 8 4 4 0 (mean 4), image 2 0 0 6 (mean 2). Two steps of one speed.
    torch.testing.assert_close(gates[2].bias, 2 * SPEED * torch.tensor([-1.0, 0, 0, 1]), rtol=1e-6, atol=0)
    torch.testing.assert_close(gates[2].bias_vl, 2 * SPEED * torch.tensor([0.0, 1, 1, -1]), rtol=1e-6, atol=0)
    assert not any(gate.bias.any() or gate.bias_vl.any() for index, gate in enumerate(gates) if index != 2)
    metrics = load_metrics(load)
    assert metrics["router/max_violation/2"].item() == pytest.approx(10 / 6 - 1)
    shares = [10 / 24, 4 / 24, 4 / 24, 6 / 24]
    entropy = -sum(share * math.log(share) for share in shares) / math.log(4)
    assert metrics["router/entropy/2"].item() == pytest.approx(entropy)
    kept = stage.sharded_state_dict()
    for name in ("bias", "bias_vl"):
        assert kept[f"layers.2.ffn.gate.{name}"].dtype is torch.float32
    return [gates[2].bias, gates[2].bias_vl]


@pytest.mark.ranks(2)
def test_the_rule_over_ranks_and_modalities(tmp_path):
    tiny_run(tmp_path)
    one, two = run_ranks(check_rule, 2, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def train(folder, *overrides):
    """On a rank."""
    from megatron_dsv41.backends.megatron.train import train

    return train(tiny_run(folder, *overrides))


@pytest.mark.ranks(4)
def test_they_cross_to_another_layout(tmp_path):
    """Trained in one process, resumed with stages, chunks and experts apart, not moved there."""
    work = (f"checkpoint.folder={tmp_path / 'run'}", "batch.micro=1", "checkpoint.interval=2")
    assert run_ranks(train, 1, tmp_path, *work, "train.steps=2") == [0]
    still = ("train.steps=3", "phase.router_bias_speed=0", "parallel.pp=2", "parallel.vpp=2", "parallel.ep=2")
    assert run_ranks(train, 4, tmp_path, *work, *still) == [0] * 4
    before, after = (RunSource(tmp_path / "run", step) for step in (2, 3))
    names = [name for name in before.names() if name.endswith(".gate.bias")]
    assert len(names) == 8
    for name in names:
        assert before.read(name).any() and torch.equal(before.read(name), after.read(name)), name


def test_no_optimizer_has_a_row_for_them():
    assert "ffn.gate.bias" not in ROLES and "ffn.gate.bias_vl" not in ROLES
