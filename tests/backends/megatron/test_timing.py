"""What the timed trainer changes, and nothing else: where weights are drawn, and that nothing is updated."""

import gc

import pytest
import torch

from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.tiny_run import tiny_run


def drawn(folder):
    """On a rank: shape, dtype and deviation of stock weights and of the others; devices of a third model."""
    from megatron_dsv41.backends.megatron import launch, timed_trainer, trainer
    from megatron_dsv41.backends.megatron.builder import DSV41ModelBuilder

    created = trainer.create(tiny_run(folder))
    stock = DSV41ModelBuilder(created.model_config).build_model(created.groups)
    quick = timed_trainer.BuilderOnDevice(created.model_config).build_model(created.groups)
    launch.device = lambda: torch.device("meta")
    elsewhere = timed_trainer.BuilderOnDevice(created.model_config).build_model(created.groups)
    both, devices = dict(quick.named_parameters()), {str(p.device) for p in elsewhere.parameters()}
    assert list(both) == [name for name, _ in stock.named_parameters()]
    rows = {name: (p.shape, p.dtype, p.std().item()) for name, p in stock.named_parameters() if p.numel() > 100}
    return rows, {name: (both[name].shape, both[name].dtype, both[name].std().item()) for name in rows}, devices


@pytest.mark.ranks(1)
def test_weights_are_drawn_on_the_device_from_the_same_distribution(tmp_path):
    """Also on a device whose values no code can read: building a model looks at none."""
    stock, quick, devices = run_ranks(drawn, 1, tmp_path)[0]
    assert len(stock) > 50 and devices == {"meta"}
    for name, (*kind, deviation) in stock.items():
        assert list(quick[name][:2]) == kind and quick[name][2] == pytest.approx(deviation, rel=0.25), name


def timed(folder, updates, *overrides):
    """On a rank: what timing found, with and without the optimizer's step."""
    from megatron_dsv41.backends.megatron import launch
    from megatron_dsv41.backends.megatron.model import DSV41Model
    from megatron_dsv41.backends.megatron.timing import Steps, time_run

    steps = Steps(warm=1, timed=2, updates=updates)
    settings = (f"checkpoint.folder={folder}/{updates}", f"train.steps={steps.total}", *overrides)
    run = tiny_run(folder, *settings, "checkpoint.optimizer=false", f"logging.interval={steps.total}")
    found = time_run(run, steps, folder / f"{updates}.{torch.distributed.get_rank()}.json", True)
    launch.destroy_groups()
    launch.release()
    return found, sum(isinstance(thing, DSV41Model) for thing in gc.get_objects())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("setting", "updates"),
    [
        ("megatron.overlap_grad_reduce=true", False),
        ("megatron.overlap_grad_reduce=true", True),
        ("parallel.engram=2", False),
        ("parallel.engram=2", True),
    ],
)
def test_steps_are_timed_and_nothing_is_updated_unless_asked(tmp_path, setting, updates):
    ranks, left = run_ranks(timed, 2, tmp_path, updates, setting)[0]
    assert not left  # the next run needs the memory
    assert len(ranks) == 2 and all(len(rank["seconds"]) == 2 and min(rank["seconds"]) > 0 for rank in ranks)
    assert [len(rank["losses"]) for rank in ranks] == [6, 6]
    assert ("engram_fetch_exposed_ms" in ranks[0]["engram"]) == (setting == "parallel.engram=2")
    assert not list((tmp_path / str(updates)).glob("iter_*"))
    losses = ranks[0]["losses"]
    # Steps differ in their data: without updates by less than six of them teach.
    assert losses[0] - losses[-1] > 0.05 if updates else abs(losses[0] - losses[-1]) < 0.05
