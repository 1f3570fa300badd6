"""Whole training runs in other layouts than one process: same curve, and checkpoints that cross between them."""

import shutil

import numpy as np
import pytest

from megatron_dsv41.backends.megatron import checkpoints
from megatron_dsv41.backends.megatron.run_source import RunSource
from megatron_dsv41.checkpoint.convert import export_checkpoint
from megatron_dsv41.experiments.tracking import read_metrics
from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.layouts import CURVES, SHORT_CURVES
from megatron_dsv41.testing.noise import noise_band, nudge
from megatron_dsv41.testing.tiny_run import smooth, tiny_run

# With an epsilon that keeps Adam from turning rounding noise into whole steps.
SMOOTH = (
    *smooth(),
    "phase.index_loss=sparse",
    "optimizer.eps=1e-8",
    "batch.micro=1",
    "checkpoint.interval=2",
)
SHORT, LONG, BAND_STEPS = 5, 10, 50


def train(folder, *overrides):
    """On a rank."""
    from megatron_dsv41.backends.megatron.train import train

    return train(tiny_run(folder, *overrides))


def losses(folder):
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the corpus."""
    folder = tmp_path_factory.mktemp("layouts")
    tiny_run(folder)
    return folder


def curve(home, name, world, steps, *overrides):
    """Losses of a new run."""
    there = home / name
    work = (*SMOOTH, f"train.steps={steps}", *overrides, f"checkpoint.folder={there}")
    assert run_ranks(train, world, home, *work) == [0] * world
    return losses(there)


@pytest.fixture(scope="module")
def one(home):
    """Losses of one process."""
    return curve(home, "one", 1, SHORT)


@pytest.mark.parametrize("name", SHORT_CURVES)
def test_same_curve_and_checkpoints_both_ways(home, one, name, record_property):
    world, layout = CURVES[name]
    assert curve(home, name, world, SHORT, *layout) == pytest.approx(one, rel=1e-5)
    # Continue the third step on, here what was saved there and there what was saved here.
    continue_as(home, "one", name, world, *layout)
    continue_as(home, name, "one", 1)
    assert losses(home / f"one-to-{name}") == pytest.approx(one, rel=1e-5)
    assert losses(home / f"{name}-to-one") == pytest.approx(one, rel=1e-5)
    record_property("checkpoints", name)


def continue_as(home, source, target, world, *layout):
    """Go on from the second step of a run in another layout."""
    folder = home / f"{source}-to-{target}"
    shutil.copytree(home / source, folder)
    for step in checkpoints.complete_steps(folder)[1:]:
        shutil.rmtree(checkpoints.checkpoint_path(folder, step))
    work = (*SMOOTH, f"train.steps={SHORT}", *layout, f"checkpoint.folder={folder}")
    assert run_ranks(train, world, home, *work) == [0] * world


@pytest.mark.slow
def test_checkpoints_between_layouts(home, one):
    """Neither side is one process: stages to experts, experts to chunks, chunks to tensor parts."""
    chain = ["pp=2", "ep=2", "pp=2,vpp=2,recompute", "tp=2,sp", "pp=2"]
    for source in set(chain):
        if not (home / source).exists():
            curve(home, source, *CURVES[source][:1], SHORT, *CURVES[source][1])
    for source, target in zip(chain, chain[1:], strict=False):
        world, layout = CURVES[target]
        continue_as(home, source, target, world, *layout)
        assert losses(home / f"{source}-to-{target}") == pytest.approx(one, rel=1e-5), (source, target)


@pytest.mark.slow
def test_ten_steps_in_eight_layouts(tmp_path, record_property):
    tiny_run(tmp_path)
    expected = curve(tmp_path, "one", 1, LONG)
    assert len(CURVES) == 8
    for name, (world, layout) in CURVES.items():
        found = curve(tmp_path, name, world, LONG, *layout)
        worst = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
        print(f"{name}: largest relative deviation of {LONG} losses {worst:.1e}")
        assert found == pytest.approx(expected, rel=1e-5), name
        record_property("curve", name)


def train_nudged(folder, seed, *overrides):
    """On a rank: train from weights that are one ulp away, up or down at random."""
    from megatron_dsv41.backends.megatron import launch, trainer
    from megatron_dsv41.backends.megatron.train import quiet

    def move(stages):
        nudge((p for stage in stages for p in stage.parameters()), seed)
        return stages

    launch.prepare_process()
    with quiet(False):
        run = trainer.create(tiny_run(folder, *overrides))
        run.model_config.pre_wrap_hooks.append(move)
        return run.pretrain()


@pytest.mark.slow
def test_fifty_steps_stay_in_the_band_of_rounding(tmp_path, record_property):
    """With every step function on, layouts part by no more than twice what one ulp in the weights does.

    The band is that of four runs of one process: the weights as they are, and with three seeds of nudges.
    """
    tiny_run(tmp_path)
    # Adam's epsilon stands above the rounding of a gradient, or first steps are signs of what is zero but for rounding.
    work = ("phase.index_loss=sparse", "batch.micro=1", "optimizer.eps=1e-6", f"train.steps={BAND_STEPS}")

    def run(name, world, *overrides, function=train, before=()):
        there = tmp_path / name
        given = (*before, *work, *overrides, f"checkpoint.folder={there}")
        found = run_ranks(function, world, tmp_path, *given, timeout=900.0)
        assert found == [0] * world
        return np.array(losses(there))

    one = run("one", 1)
    runs = [one, *(run(f"seed{seed}", 1, function=train_nudged, before=(seed,)) for seed in range(3))]
    band = noise_band(runs)
    print("band of one ulp at steps 1, 2, 5, 10, 20, 50:", band[[0, 1, 4, 9, 19, 49]])
    for name in ("tp=2,sp", "pp=2", "cp=2", "ep=2", "cp=2,pp=2,shadows=always"):
        world, layout = CURVES[name]
        apart = np.abs(run(name, world, *layout) - one)
        print(f"{name}: {apart[[0, 1, 4, 9, 19, 49]]}, largest share of the band {(apart / band).max():.2f}")
        assert apart[0] <= 1e-5 * one[0], name
        assert (apart <= 2 * band).all(), name
        record_property("band", name)


def test_released_weights_start_a_run_in_any_layout(home, one):
    """A run's export, taken up by other stages, tensor parts and experts, gives the loss that one process finds."""
    source = RunSource(home / "one", step=4)
    export_checkpoint(source, home / "released", config=source.config)
    start = ("optimizer.lr=1e-30", f"train.init_from={home / 'released'}")
    expected = curve(home, "one-again", 1, 1, *start)
    for name in ("tp=2,sp,ep=2,dp=2", "pp=2,vpp=2,recompute"):
        world, layout = CURVES[name]
        assert curve(home, f"again-{name}", world, 1, *start, *layout) == pytest.approx(expected, rel=1e-6), name
