"""Whole training runs in other layouts than one process: same curve, and checkpoints that cross between them."""

import shutil

import pytest

from megatron_dsv41.backends.megatron import checkpoints
from megatron_dsv41.experiments.tracking import read_metrics
from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.tiny_run import tiny_run

# Without step functions, and with an epsilon that keeps Adam from turning rounding noise into whole steps.
SMOOTH = (
    "phase.window_kv_fp8=false",
    "phase.main_kv_fp4=false",
    "phase.index_mxfp4=false",
    "phase.index_loss=sparse",
    "model.overrides.index_topk=32",
    "model.overrides.candidate_topk_blocks=8",
    "model.overrides.num_experts_per_tok=4",
    "optimizer.eps=1e-8",
    "batch.micro=1",
    "train.steps=5",
    "checkpoint.interval=2",
)
LAYOUTS = {
    "pp2": ("parallel.pp=2",),
    "vpp2": ("parallel.pp=2", "parallel.vpp=2", "train.recompute=block"),
    "tp2": ("parallel.tp=2", "parallel.sp=true"),
    "cp2": ("parallel.cp=2",),
    "ep2": ("parallel.ep=2",),
}


def train(folder, *overrides):
    """On a rank."""
    from megatron_dsv41.backends.megatron.train import train

    return train(tiny_run(folder, *overrides))


def losses(folder):
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the corpus and a run of one process."""
    folder = tmp_path_factory.mktemp("layouts")
    tiny_run(folder)
    assert run_ranks(train, 1, folder, *SMOOTH, f"checkpoint.folder={folder / 'one'}") == [0]
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_same_curve_and_checkpoints_both_ways(home, name):
    there = f"checkpoint.folder={home / name}"
    assert run_ranks(train, 2, home, *SMOOTH, *LAYOUTS[name], there) == [0, 0]
    expected = losses(home / "one")
    assert losses(home / name) == pytest.approx(expected, rel=1e-5)

    # Continue the third step on, here what was saved there and there what was saved here.
    for source, world, layout in (("one", 2, LAYOUTS[name]), (name, 1, ())):
        target = home / f"{source}-to-{world}-{name}"
        shutil.copytree(home / source, target)
        for step in checkpoints.complete_steps(target)[1:]:
            shutil.rmtree(checkpoints.checkpoint_path(target, step))
        assert run_ranks(train, world, home, *SMOOTH, *layout, f"checkpoint.folder={target}") == [0] * world
        assert losses(target) == pytest.approx(expected, rel=1e-5)
