"""Shadow indexers: the same function, and one parameter wherever it is kept."""

import pytest
import torch

from megatron_dsv41.backends.megatron import checkpoints
from megatron_dsv41.backends.megatron.run_source import RunSource
from megatron_dsv41.checkpoint.convert import export_checkpoint, load_released
from megatron_dsv41.experiments.tracking import read_metrics
from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.tiny_run import tiny_run

STEPS = 20
# Stages that hold shadows of two layers, one that passes inputs on, and a shadow beside its owner's other half.
LAYOUT = ("parallel.pp=2", "parallel.vpp=2", "parallel.layout=Etttt|t|tt|tL", "parallel.shadows=always")
WORK = ("batch.micro=1", "phase.index_loss=sparse", "optimizer.lr=1e-2", *LAYOUT)


def train(folder, *overrides):
    """On a rank."""
    from megatron_dsv41.backends.megatron.train import train

    return train(tiny_run(folder, *overrides))


def train_and_compare(folder, *overrides):
    """Train; of every shadow of the world, (layer, equal to its owner, moved since the start)."""
    import torch

    from megatron_dsv41.backends.megatron import patches
    from megatron_dsv41.backends.megatron.train import train

    seen = []

    def keep(stock, *args, **kwargs):
        found = stock(*args, **kwargs)
        seen.extend(chunk.module for chunk in found[0])
        return found

    patches.HOOKS["setup_model_and_optimizer"] = "shows the test the model"
    with patches.hooked({"setup_model_and_optimizer": keep}):
        assert train(tiny_run(folder, *overrides)) == 0
    own = {name: p.detach().clone() for stage in seen for name, p in stage.named_parameters() if ".wq_b" in name}
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    return everyone


def shadows_and_owners(everyone):
    owners = {name: p for part in everyone for name, p in part.items() if name.startswith("layers.")}
    for part in everyone:
        for name, shadow in part.items():
            if name.startswith("shadows."):
                layer = int(name.split(".")[1])
                yield layer, shadow, owners[f"layers.{layer}.attn.indexer.wq_b.weight"]


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("published", marks=pytest.mark.slow)])
def test_a_shadow_is_its_owner(tmp_path, optimizer):
    folder = tmp_path / "run"
    work = (tmp_path, *WORK, f"optimizer.name={optimizer}", f"checkpoint.folder={folder}", "checkpoint.interval=10")
    start = run_ranks(train_and_compare, 2, *work, "train.steps=10")[0]
    end = run_ranks(train_and_compare, 2, *work, f"train.steps={STEPS}")[0]  # resumes
    assert checkpoints.complete_steps(folder) == [10, STEPS]
    for found in (start, end):
        pairs = list(shadows_and_owners(found))
        assert sorted(layer for layer, _, _ in pairs) == [4, 4, 6]
        assert all(torch.equal(shadow, owner) for _, shadow, owner in pairs)
    trained = {layer: owner for layer, _, owner in shadows_and_owners(end)}
    assert not any(torch.equal(owner, trained[layer]) for layer, _, owner in shadows_and_owners(start))

    # One copy in checkpoints and exports, and it is the owner's.
    names = checkpoints.stored_shapes(checkpoints.checkpoint_path(folder, STEPS))
    assert not any("shadow" in name for name in names)
    export_checkpoint(RunSource(folder), tmp_path / "hf", config=RunSource(folder).config)
    exported = load_released(tmp_path / "hf")
    for layer, owner in trained.items():
        assert torch.equal(exported[f"layers.{layer}.attn.indexer.wq_b.weight"], owner)


def test_shadows_do_not_change_training(tmp_path):
    losses = {}
    for rule in ("never", "always"):
        folder = tmp_path / rule
        work = (*WORK, f"parallel.shadows={rule}", f"checkpoint.folder={folder}", "train.steps=2")
        assert run_ranks(train, 2, tmp_path, *work) == [0, 0]
        losses[rule] = [row["loss"] for row in read_metrics(folder) if "loss" in row]
    assert losses["never"] == losses["always"]  # the same operations on the same values


def refusal(folder, *overrides):
    from megatron_dsv41.backends.megatron import settings

    try:
        settings.refuse_unsupported(tiny_run(folder, *overrides))
    except ValueError as error:
        return str(error)


def test_late_gathers_are_refused(tmp_path):
    late = ("megatron.overlap_param_gather=true", "megatron.overlap_grad_reduce=true")
    (message,) = run_ranks(refusal, 1, tmp_path, *WORK, *late)
    assert "set parallel.shadows=never" in message
    assert run_ranks(refusal, 1, tmp_path, *WORK, *late, "parallel.shadows=never") == [None]
