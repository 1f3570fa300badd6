"""A run that walks through phases: what changes, what stands still, and resuming on either side of a switch."""

import pytest
import torch

from megatron_dsv41.backends.megatron import checkpoints
from megatron_dsv41.cli.evaluate import open_checkpoint
from megatron_dsv41.experiments.tracking import read_metrics
from megatron_dsv41.testing.distributed import Ranks, run_ranks
from megatron_dsv41.testing.tiny_run import smooth, tiny_run

PHASES = """phases=[
  {name: short, steps: 3},
  {name: long, tokens: 512, data: {seq_length: 64}, batch: {micro: 1}, lr: {end: 2.0e-4, shape: cosine},
   phase: {index_loss: sparse, hsi: false, main_kv_fp4: false}, optimizer: {frozen: [embed.weight, "layers.3.*"]}},
  {name: last, steps: 2, data: {seq_length: 64}, lr: {start: 1.0e-3, end: 0.0}, phase: {yarn: false}}]"""
STEPS, SWITCHES = 9, (3, 7)
# Adam's eps is above what is rounding alone.
SMOOTH = ("optimizer.eps=1e-6", *smooth(64))


def train(folder, *overrides):
    """On a rank."""
    from megatron_dsv41.backends.megatron.train import train

    return train(tiny_run(folder, *overrides))


def refusals(folder, *overrides):
    """What the start of the last phase says on a rank."""
    from megatron_dsv41.backends.megatron import launch, run_checks

    launch.prepare_process()
    with pytest.raises(ValueError) as error:
        run_checks.check(tiny_run(folder, *overrides).legs[-1])
    return str(error.value)


def settings(home, name, *overrides):
    return (
        home,
        PHASES.replace("\n", " "),
        f"checkpoint.folder={home / name}",
        "train.steps=null",
        "batch.sequences=null",
        "batch.tokens=128",
        "batch.micro=2",
        "checkpoint.interval=2",
        "schedule.warmup=2",
        "eval.interval=4",
        *overrides,
    )


def losses(folder):
    return {row["step"]: row["loss"] for row in read_metrics(folder) if "loss" in row}


def weights(folder, step):
    from megatron_dsv41.backends.megatron.run_source import RunSource

    source = RunSource(folder, step)
    return {name: source.read(name) for name in source.names()}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phases")
    tiny_run(folder)
    return folder


@pytest.fixture(scope="module", params=["adamw", pytest.param("published", marks=pytest.mark.slow)])
def whole(request, home):
    """(name of the optimizer, folder of the uninterrupted run)."""
    name = request.param
    assert run_ranks(train, 1, *settings(home, name, f"optimizer.name={name}")) == [0]
    return name, home / name


def test_the_run_walks_through(home, whole):
    run, (_, folder) = tiny_run(*settings(home, "unused")), whole
    rows = [row for row in read_metrics(folder) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)) and run.steps == STEPS
    assert [row["tokens"] for row in rows] == [128 * step for step in range(1, STEPS + 1)]
    assert [row["lr"] for row in rows] == pytest.approx([run.learning_rate(step) for step in range(STEPS)], rel=1e-12)
    assert [any(key.startswith("index_kl") for key in row) for row in rows] == [False] * 3 + [True] * 4 + [False] * 2
    assert {3, 7, 9} <= set(checkpoints.complete_steps(folder))  # the end of every phase is saved


def test_a_checkpoint_is_evaluated_as_its_phase_trained(whole):
    _, folder = whole
    found = [open_checkpoint(folder, step)[2] for step in (3, 4, 7, 9)]
    assert [run.data.seq_length for run in found] == [32, 64, 64, 64]
    assert [run.phase.hsi for run in found] == [True, False, False, True]
    assert [run.phase.yarn for run in found] == [True, True, True, False]


def test_finished_phases_say_what_to_raise(home, whole):
    name, _ = whole
    (messages,) = run_ranks(refusals, 1, *settings(home, name, f"optimizer.name={name}"))
    assert "already holds step 9 of 9: raise the steps or tokens of the last phase" in messages


def test_frozen_parts_stand_still_in_their_phase_only(whole):
    name, folder = whole
    first, middle, end = (weights(folder, step) for step in (2, 7, 9))
    before = weights(folder, 3)
    for tensor in before:
        frozen = tensor == "embed.weight" or tensor.startswith("layers.3.")
        if tensor.endswith(("gate.bias", "gate.bias_vl")):  # moved by the load, not by the optimizer
            continue
        assert torch.equal(before[tensor], middle[tensor]) is frozen, tensor
        untrained = ".indexer." in tensor
        assert torch.equal(first[tensor], before[tensor]) is untrained, tensor
        assert torch.equal(middle[tensor], end[tensor]) is untrained, tensor


@pytest.mark.parametrize("killed_after", [3, 5, pytest.param(8, marks=pytest.mark.slow)])
def test_resumed_in_any_phase_it_goes_on_bitwise(home, whole, killed_after):
    optimizer, folder = whole
    if optimizer == "published" and killed_after != 5:
        pytest.skip("its state is taken up in the same way in every phase")
    name = f"{optimizer}-{killed_after}"
    work = settings(home, name, f"optimizer.name={optimizer}")
    with Ranks(train, 1, *work) as ranks:
        ranks.wait_until(lambda: killed_after in losses(home / name))
        ranks.kill()
    assert len(checkpoints.complete_steps(home / name)) < len(checkpoints.complete_steps(folder))
    assert run_ranks(train, 1, *work) == [0]
    assert losses(home / name) == losses(folder)
    valid = [[row for row in read_metrics(path) if "valid_loss" in row] for path in (home / name, folder)]
    assert valid[0] == valid[1] and valid[0]
    again, expected = weights(home / name, STEPS), weights(folder, STEPS)
    assert all(torch.equal(again[tensor], expected[tensor]) for tensor in expected)


def test_another_layout_after_the_switch(home):
    """A phase may bring its own layout: the checkpoint at the switch is resharded."""
    changed = PHASES.replace("batch: {micro: 1}", "batch: {micro: 1}, parallel: {cp: 2}").replace("\n", " ")
    for name, ranks, phases in (("plain", 1, ()), ("layout", 2, (changed,))):
        assert run_ranks(train, ranks, *settings(home, name, "batch.micro=1", *SMOOTH, *phases)) == [0] * ranks
    plain, layout = (list(losses(home / name).values()) for name in ("plain", "layout"))
    assert len(layout) == STEPS and layout == pytest.approx(plain, rel=1e-5)


def test_gradients_that_never_come_are_not_waited_for(home):
    from megatron_dsv41.backends.megatron.schedule import check_thawing

    run = tiny_run(*settings(home, "unused", "megatron.overlap_grad_reduce=true"))
    with pytest.raises(ValueError, match="phases without index_loss give the indexers none"):
        check_thawing(run)
    check_thawing(tiny_run(*settings(home, "unused")))


def test_a_wrong_phase_stops_the_run_before_its_first_step(home):
    bad = PHASES.replace("phase: {yarn: false}", "parallel: {cp: 3}").replace("\n", " ")
    with pytest.raises(AssertionError, match="data.seq_length 64 is not a multiple of the 3 pieces that parallel.cp"):
        run_ranks(train, 1, *settings(home, "bad", bad))
    assert not (home / "bad").exists()
