"""Where a run starts from: found by one rank, told to the others."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from megatron_dsv41 import presets
from megatron_dsv41.backends.megatron.run_source import RunSource
from megatron_dsv41.checkpoint.convert import import_checkpoint, load_released
from megatron_dsv41.checkpoint.shares import Layout
from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.released import write_released
from megatron_dsv41.testing.tiny import tiny_config
from megatron_dsv41.testing.tiny_run import tiny_run

READ = "layers.1.attn.wkv.weight"


def train(folder, *overrides):
    """On a rank."""
    from megatron_dsv41.backends.megatron.train import train

    return train(tiny_run(folder, *overrides))


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A finished run of one step, and a released, a native and a distributed folder."""
    folder = tmp_path_factory.mktemp("initial")
    assert run_ranks(train, 1, folder, "train.steps=1", "checkpoint.interval=1", "batch.micro=4") == [0]
    config = dataclasses.replace(tiny_config(), dtype="bfloat16", quantization=presets.RELEASED_QUANTIZATION)
    write_released(folder / "released", config)
    layout = Layout(stages=tuple((layer,) for layer in range(config.num_hidden_layers)), ep=2, engram=3)
    import_checkpoint(folder / "released", folder / "native")
    import_checkpoint(folder / "released", folder / "divided", layout=layout)
    return folder


@contextmanager
def touched(folder: Path) -> Iterator[set[str]]:
    """The names of files and folders in `folder` that this process looks at or opens meanwhile."""
    names: set[str] = set()
    stock = {(module, name): getattr(module, name) for module, name in ((os, "stat"), (os, "open"), (io, "open"))}

    def watched(function):
        def call(path, *args, **kwargs):
            if isinstance(path, str | Path) and Path(path).absolute().is_relative_to(folder):
                names.add(Path(path).name)
            return function(path, *args, **kwargs)

        return call

    try:
        for (module, name), function in stock.items():
            setattr(module, name, watched(function))
        yield names
    finally:
        for (module, name), function in stock.items():
            setattr(module, name, function)


def found_start(home, source):
    """On a rank: what it looks at in the folder while it checks, and when it reads; what it reads and where."""
    from megatron_dsv41.backends.megatron import launch, run_checks

    launch.prepare_process()
    run = tiny_run(home, f"train.init_from={source}", f"checkpoint.folder={home / f'from {source.name}'}")
    with touched(source) as checking:
        start = run_checks.check(run.legs[0]).start
    with touched(source) as reading:
        value = start.weights.read(READ)
    return checking, reading, start.folder, value


@pytest.mark.parametrize("name", ["run", "released", "native", "divided"])
def test_one_rank_looks_at_the_files_and_the_other_at_what_it_reads(home, name):
    found = run_ranks(found_start, 2, home, home / name)
    expected = RunSource(home / name).read(READ) if name == "run" else load_released(home / "released")[READ]
    for rank, (checking, reading, folder, value) in enumerate(found):
        assert bool(checking) == (rank == 0) and len(reading) == 1
        assert folder == (home / "run" / "iter_0000001" if name == "run" else home / name)
        assert torch.equal(value, expected)


def start_from_what_vanishes(home, source, opened):
    """On a rank: what it is told when a checkpoint vanishes after it was found; rank 0 has opened its file if asked."""
    from megatron_dsv41.backends.megatron import launch, run_checks
    from megatron_dsv41.backends.megatron.trainer import Trainer

    launch.prepare_process()
    leg = tiny_run(home, f"train.init_from={source}", f"checkpoint.folder={home / f'after {opened}'}").legs[0]
    checked = run_checks.check(leg)
    launch.create_groups(leg.run.parallel)
    rank = torch.distributed.get_rank()
    if rank == 0 and opened:
        checked.start.weights.read(READ)
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(checked.start.folder)
    torch.distributed.barrier()
    try:
        Trainer(leg, checked).pretrain()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("opened", [False, True])
def test_a_checkpoint_that_vanishes_is_named_on_every_rank(home, tmp_path, opened):
    source = tmp_path / "source"
    shutil.copytree(home / "run", source)
    messages = run_ranks(start_from_what_vanishes, 2, home, source, opened)
    gone = f"ValueError: checkpoint {source / 'iter_0000001'} is gone: start again from {source}"
    for message in messages:
        assert message.startswith(gone) and "train.init_from" in message and "checkpoint.keep" in message
