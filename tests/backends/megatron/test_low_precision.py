"""Low precision in training: the same names and shapes in checkpoints, every linear reached in every layout."""

import pytest

from megatron_dsv41.backends.megatron import checkpoints
from megatron_dsv41.experiments.tracking import read_metrics
from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.tiny_run import tiny_run

BF16 = (
    "train.precision=bf16",
    "schedule.min_lr=1e-3",
    "model.overrides.q_lora_rank=32",
    "batch.micro=2",
    "checkpoint.interval=2",
)
# Widths whose halves are multiples of 16.
WIDE = ("model.overrides.moe_intermediate_size=32", "model.overrides.o_lora_rank=16")


def train(folder, *overrides):
    """On a rank."""
    from megatron_dsv41.backends.megatron.train import train

    return train(tiny_run(folder, *BF16, *WIDE, *overrides))


def train_as_if(folder, *overrides):
    """On a rank, where linears multiply as plain ones in the name of Transformer Engine: how often they did."""
    # Megatron looks for the real package while it is imported: that comes before the other one is there.
    from megatron_dsv41.backends.megatron import launch

    launch.prepare_process()
    from megatron_dsv41.backends.megatron import trainer  # noqa: F401
    from megatron_dsv41.testing import stand_in_te

    with stand_in_te.installed():
        assert train(folder, *overrides) == 0
        return stand_in_te.Autocast.entered


def losses(folder):
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


def folder_of(home, name):
    return f"checkpoint.folder={home / name}"


@pytest.mark.parametrize(
    "layout", [(), ("parallel.tp=2", "parallel.sp=true"), ("parallel.pp=2",), ("train.recompute=full",)], ids=" ".join
)
def test_every_linear_is_reached_in_every_layout(tmp_path, layout):
    ranks = 1 + any("parallel" in setting for setting in layout)
    tiny_run(tmp_path, *BF16)
    steps = (*layout, "train.steps=2")
    assert run_ranks(train, ranks, tmp_path, folder_of(tmp_path, "plain"), *steps) == [0] * ranks
    entered = run_ranks(train_as_if, ranks, tmp_path, folder_of(tmp_path, "low"), "precision.fp8=block", *steps)
    # Seven linears of eight layers and two of Engram, two steps of two micro-batches; again in a recomputation.
    copies = ranks if "parallel.tp=2" in layout else 1
    assert sum(entered) == 58 * 2 * 2 * copies * (1 + ("train.recompute=full" in layout))
    assert losses(tmp_path / "low") == losses(tmp_path / "plain")
    shapes = [checkpoints.stored_shapes(tmp_path / name / "iter_0000002") for name in ("plain", "low")]
    assert shapes[0] == shapes[1] and not [name for name in shapes[1] if "extra_state" in name]


def train_all(folder, *runs):
    """On a rank: one training after the other."""
    from megatron_dsv41.backends.megatron import launch

    for overrides in runs:
        assert train(folder, *overrides) == 0
        launch.release()


@pytest.mark.gpu
@pytest.mark.te
def test_a_run_changes_its_recipe_between_checkpoints(tmp_path):
    tiny_run(tmp_path, *BF16)
    run, bf16 = (folder_of(tmp_path, name) for name in ("run", "bf16"))
    recipes = ("off", "delayed", "current", "block", "off")
    changing = [(run, f"train.steps={2 * i + 2}", f"precision.fp8={recipe}") for i, recipe in enumerate(recipes)]
    run_ranks(train_all, 1, tmp_path, *changing, (bf16, "train.steps=10"), device="cuda", backend="nccl")
    changed, kept = losses(tmp_path / "run"), losses(tmp_path / "bf16")
    assert len(changed) == len(kept) == 10
    assert changed[:2] == kept[:2] and changed[2:] != kept[2:]
    assert max(abs(a - b) for a, b in zip(changed, kept, strict=True)) < 0.1, (changed, kept)
    shapes = [checkpoints.stored_shapes(tmp_path / "run" / f"iter_000000{step}") for step in (2, 4, 6, 8)]
    assert all(shape == shapes[0] for shape in shapes)
    assert not [name for name in shapes[1] if "extra_state" in name]
