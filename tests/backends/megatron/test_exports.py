"""Released weights in, trained in some layout, released weights out: the same bytes where nothing was learnt."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from megatron_dsv41 import presets
from megatron_dsv41.backends.megatron.run_export import export_run
from megatron_dsv41.backends.megatron.run_source import RunSource
from megatron_dsv41.checkpoint.convert import import_checkpoint, load_released
from megatron_dsv41.checkpoint.shares import Layout
from megatron_dsv41.experiments.tracking import read_metrics
from megatron_dsv41.run_config import Checkpoint
from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.released import folder_bytes, write_released
from megatron_dsv41.testing.tiny import tiny_config
from megatron_dsv41.testing.tiny_run import tiny_run

# Nothing moves: a learning rate that is zero in float32, no router bias.
STILL = (
    "optimizer.lr=1e-300",
    "optimizer.weight_decay=0",
    "phase.router_bias_speed=0",
    "train.steps=2",
    "batch.micro=1",
)
LAYOUTS = {
    "tp2": ("parallel.tp=2", "parallel.sp=true"),
    "pp2": ("parallel.pp=2",),
    "ep2": ("parallel.ep=2",),
}


def train(folder, *overrides):
    """On a rank."""
    from megatron_dsv41.backends.megatron.train import train

    return train(tiny_run(folder, *overrides))


def train_and_count(folder, *overrides):
    """On a rank: the bytes that it reads to start from a run."""
    from megatron_dsv41.backends.megatron import initial

    read: list[int] = []
    load_weights = initial.load_weights

    def load(stages, source):
        result = load_weights(stages, source)
        read.append(source.bytes_read)
        return result

    initial.load_weights = load
    assert train(folder, *overrides) == 0
    return sum(read)


def export_and_count(run, dst):
    """On a rank: how often it looks for the run."""
    from megatron_dsv41.backends.megatron import run_export
    from megatron_dsv41.checkpoint.team import Team

    looked = []

    class Counted(RunSource):
        def __init__(self, *place):
            looked.append(place)
            super().__init__(*place)

        def __reduce_ex__(self, protocol):
            return RunSource.__new__, (RunSource,), self.__dict__

    run_export.RunSource = Counted
    export_run(run, dst, storage="bf16", team=Team.of_world())
    return len(looked)


def drop_negative_zeros(tensors) -> None:
    """An update by zero makes them positive."""
    for tensor in tensors.values():
        bytes_ = tensor.view(torch.uint8) if tensor.dtype in (torch.int8, torch.float8_e4m3fn) else None
        if tensor.dtype == torch.int8:
            low, high = bytes_ & 15, bytes_ >> 4
            bytes_.copy_(torch.where(low == 8, 0, low) | (torch.where(high == 8, 0, high) << 4))
        elif bytes_ is not None:
            bytes_[bytes_ == 0x80] = 0


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A corpus, a released folder, and the same weights as a distributed checkpoint for another layout."""
    folder = tmp_path_factory.mktemp("exports")
    tiny_run(folder)
    config = dataclasses.replace(tiny_config(), dtype="bfloat16", quantization=presets.RELEASED_QUANTIZATION)
    write_released(folder / "released", config, change=drop_negative_zeros)
    layout = Layout(stages=tuple((layer,) for layer in range(config.num_hidden_layers)), ep=2, engram=3)
    import_checkpoint(folder / "released", folder / "divided", layout=layout)
    return folder


@pytest.mark.parametrize(("name", "start"), [("tp2", "released"), ("pp2", "divided"), ("ep2", "divided")])
def test_training_starts_from_and_exports_to_the_released_layout(home, name, start):
    run = home / name
    settings = ["checkpoint.interval=1", "checkpoint.export_interval=2", f"checkpoint.folder={run}"]
    assert run_ranks(train, 2, home, *STILL, *LAYOUTS[name], *settings, f"train.init_from={home / start}") == [0, 0]
    exports = [path.name for path in (run / "exports").iterdir()]
    assert exports == ["step_0000002"]
    assert folder_bytes(run / "exports" / exports[0]) == folder_bytes(home / "released")


def test_a_run_starts_from_another_as_from_its_export(home):
    """In another layout, with tables that groups own: the same bits, and no rank reads what it does not hold."""
    work = ("train.precision=bf16", "train.steps=2", "checkpoint.interval=1", "batch.micro=1")
    first, exported = home / "first", home / "exported"
    settings = (*work, "parallel.ep=2", "parallel.engram=2", f"checkpoint.folder={first}")
    assert run_ranks(train, 2, home, *settings) == [0, 0]
    assert export_run(first, exported, storage="bf16")[0] == 2
    assert run_ranks(export_and_count, 2, first, home / "together") == [1, 0]  # one rank looks for the run
    assert folder_bytes(home / "together") == folder_bytes(exported)
    bytes_read = {}
    for start in (first, exported):
        settings = (*work, "parallel.pp=2", f"checkpoint.folder={home / start.name}-on", f"train.init_from={start}")
        bytes_read[start.name] = run_ranks(train_and_count if start is first else train, 2, home, *settings)
    on, same, whole = (RunSource(home / name) for name in ("first-on", "exported-on", "first"))
    assert all(torch.equal(on.read(name), same.read(name)) for name in on.names())
    before, losses, expected = (
        [row["loss"] for row in read_metrics(source.path.parent)] for source in (whole, on, same)
    )
    assert losses == expected and losses[0] < before[1]
    stored = sum(whole.read(name).nbytes for name in whole.names())
    assert sum(bytes_read["first"]) == stored and max(bytes_read["first"]) < 0.7 * stored


def test_exports_of_a_run_that_started_from_a_run_lead_back_to_the_release(home):
    still, first, second = (*STILL, "checkpoint.interval=1"), home / "still", home / "still-on"
    settings = (f"checkpoint.folder={first}", f"train.init_from={home / 'released'}", *LAYOUTS["ep2"])
    assert run_ranks(train, 2, home, *still, *settings) == [0, 0]
    settings = (f"checkpoint.folder={second}", f"train.init_from={first}", "checkpoint.export_interval=2")
    assert run_ranks(train, 2, home, *still, *settings, "checkpoint.export_storage=source") == [0, 0]
    assert folder_bytes(second / "exports" / "step_0000002") == folder_bytes(home / "released")
    shutil.rmtree(first)
    export_run(second, home / "later")
    assert folder_bytes(home / "later") == folder_bytes(home / "released")


def load_with_megatron(path: Path):
    """On a rank: the tensors of a distributed folder, as Megatron's own loader finds them."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    from megatron_dsv41.checkpoint.distributed import DistributedSource

    source = DistributedSource(path)
    empty = {name: torch.empty(source.shape(name), dtype=source.read(name).dtype) for name in source.names()}
    wanted = {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in empty.items()}
    return dist_checkpointing.load(wanted, str(path))


def test_megatron_loads_what_was_divided_for_another_layout(home):
    (found,) = run_ranks(load_with_megatron, 1, home / "divided")
    expected = load_released(home / "released")
    assert set(expected) <= set(found)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_exports_need_saved_checkpoints():
    with pytest.raises(ValueError, match="export_interval 3 must be a multiple of checkpoint.interval"):
        Checkpoint(folder="x", interval=2, export_interval=3)
    with pytest.raises(ValueError, match=r"checkpoint.interval \(None\)"):
        Checkpoint(folder="x", export_interval=3)
