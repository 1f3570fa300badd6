import dataclasses

import pytest

from megatron_dsv41 import presets
from megatron_dsv41.experiments.engram_memory import Tables, owner_memory
from megatron_dsv41.experiments.memory import Layout, memory_per_rank
from megatron_dsv41.run_config import run_from_dict

FP8 = Tables(served="float8", master="float32", state_bytes=2)


def test_flash_tables_over_all_ranks_of_a_pipeline():
    """128 ranks own 3 M rows of each table: 0.79 GB in FP8, 1.54 GB of bf16 momentum, 3.07 GB of fp32 master."""
    layout = Layout(data=32, pipeline=4, engram=128, num_micro_batches=8, seq_length=4096, tables=FP8)
    one, two = owner_memory(presets.flash(), layout)
    assert (one.layer, two.layer, one.copies, two.copies) == (1, 14, 1, 1)
    assert one.rows == one.updated == 3_000_049 and one.served == 3_000_049 * 264
    assert one.master == one.rows * 1024 and one.state == one.rows * 512
    entries = 8 * 4096 * 24
    assert one.step == pytest.approx(entries * (264 + 2048 + 448), rel=1e-4)
    in_windows = dataclasses.replace(layout, tables=dataclasses.replace(FP8, window=1))
    windowed = owner_memory(presets.flash(), in_windows)
    assert windowed[0].step == pytest.approx(entries * (66 + 2048 + 448), rel=1e-4)


def test_copies_share_the_state_and_stages_without_the_layer_have_none():
    layout = Layout(data=8, pipeline=2, engram=4, tables=Tables(served="bfloat16", master="bfloat16", state_bytes=4))
    one, _ = owner_memory(presets.flash(), layout)
    assert one.copies == 2 and one.rows == 96_001_542 and one.updated == 48_000_771 and one.master == 0
    with pytest.raises(ValueError, match="parallel.engram 3 does not divide 16 ranks"):
        owner_memory(presets.flash(), dataclasses.replace(layout, engram=3))
    last = dataclasses.replace(layout, cut="E|" + 40 * "t" + "L")  # the first stage is the embedding alone
    first, second = (stage.engram for stage in memory_per_rank(presets.flash(), last))
    assert first.rows == first.exchange == 0 and second.rows > 0


def test_stages_do_not_count_owned_tables_again():
    plain, owned = (
        memory_per_rank(presets.flash(), Layout(data=8, tables=tables))[0].parameters for tables in (None, FP8)
    )
    assert plain - owned == 196_613_849_600


def test_the_total_of_a_stage_has_the_rows_its_ranks_own_and_what_they_exchange():
    """Groups of 16 lie over both of two stages of eight ranks; layer 1 runs in the first, layer 14 in the second."""
    layout = Layout(data=8, pipeline=2, engram=16, num_micro_batches=8, cut="E" + 14 * "t" + "|" + 26 * "t" + "L")
    layout = dataclasses.replace(layout, tables=FP8)
    tables = owner_memory(presets.flash(), layout)
    one, two = tables
    assert (one.stage, two.stage, one.groups, two.groups) == (0, 1, (0,), (0,))
    without = [stage.total for stage in memory_per_rank(presets.flash(), dataclasses.replace(layout, engram=1))]
    for stage, (here, there) in enumerate(((one, two), (two, one))):
        memory = memory_per_rank(presets.flash(), layout)[stage]
        owned = memory.engram
        assert owned.rows == sum(table.served + table.master + table.state for table in tables)
        assert owned.exchange == here.step + there.step_elsewhere
        model = memory.weights + memory.gradients + memory.optimizer + memory.activations
        assert memory.total == model + owned.rows + owned.exchange < without[stage]
        assert memory.host == 0
    # Half of the rows that the eight ranks of the other stage read and return lie here: as many as one of them does.
    entries = 8 * 4096 * 24
    assert one.step_elsewhere == pytest.approx(entries / 2 * (264 + 2048 + 384), rel=1e-4)


def test_tensor_ranks_fetch_alike_and_return_once():
    shape = {"data": 4, "pipeline": 2, "engram": 16, "num_micro_batches": 1, "tables": FP8}
    alone, sequence = (Layout(tensor=2, sequence=sequence, **shape) for sequence in (False, True))
    one, _ = owner_memory(presets.flash(), alone)
    entries = 4096 * 24
    assert one.step_elsewhere == pytest.approx(entries / 2 * (264 + 384) + entries / 4 * 2048, rel=1e-3)
    assert owner_memory(presets.flash(), sequence)[0].step_elsewhere == pytest.approx(
        entries / 4 * (264 + 384 + 2048), rel=1e-3
    )


def test_a_stage_counts_its_fullest_rank():
    """Groups of two in stages of four: both run the layer, and own its rows; of the stage behind them nobody does."""
    layout = Layout(data=4, pipeline=2, engram=2, tables=FP8)
    tables = owner_memory(presets.flash(), layout)
    assert [table.groups for table in tables] == [(0, 1), (0, 1)]
    first, second = (stage.engram for stage in memory_per_rank(presets.flash(), layout))
    assert first.served == sum(table.served for table in tables) and second.served == 0


def test_rows_in_host_memory_are_not_on_the_device():
    values = {
        "model": {"preset": "flash"},
        "data": {"train": "x", "seq_length": 4096},
        "batch": {"sequences": 8},
        "train": {"steps": 1},
        "checkpoint": {"folder": "x"},
        "optimizer": {"name": "published", "momentum_dtype": "bfloat16"},
        "parallel": {"engram": 4},
    }
    device, host = (
        memory_per_rank(presets.flash(), Layout.of(run_from_dict(values, changes), 8))[0]
        for changes in ((), ("engram.memory=host",))
    )
    assert Layout.of(run_from_dict(values), 8).tables == Tables(served="bfloat16", state_bytes=2)
    assert host.host == device.engram.rows > 0 and host.total == device.total - host.host
    assert device.engram.state == 2 * device.engram.master / 4
