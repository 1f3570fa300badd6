import dataclasses

import pytest

from megatron_dsv41 import presets
from megatron_dsv41.experiments.engram_memory import owner_memory
from megatron_dsv41.experiments.memory import Layout, memory_per_rank


def test_flash_tables_over_all_ranks_of_a_pipeline():
    """128 ranks own 3 M rows of each table: 0.79 GB in FP8, 1.54 GB of bf16 momentum, 3.07 GB of fp32 master."""
    layout = Layout(data=32, pipeline=4, engram=128, num_micro_batches=8, seq_length=4096)
    one, two = owner_memory(presets.flash(), layout, table="float8", master="float32", state_bytes=2)
    assert (one.layer, two.layer, one.copies, two.copies) == (1, 14, 1, 1)
    assert one.rows == one.updated == 3_000_049 and one.served == 3_000_049 * 264
    assert one.master == one.rows * 1024 and one.state == one.rows * 512
    entries = 8 * 4096 * 24
    assert one.step == pytest.approx(entries * (264 + 2048 + 448), rel=1e-4)
    windowed = owner_memory(presets.flash(), layout, table="float8", master="float32", state_bytes=2, window=1)
    assert windowed[0].step == pytest.approx(entries * (66 + 2048 + 448), rel=1e-4)


def test_copies_share_the_state_and_stages_without_the_layer_have_none():
    layout = Layout(data=8, pipeline=2, engram=4)
    one, _ = owner_memory(presets.flash(), layout, table="bfloat16", master="bfloat16", state_bytes=4)
    assert one.copies == 2 and one.rows == 96_001_542 and one.updated == 48_000_771 and one.master == 0
    with pytest.raises(ValueError, match="parallel.engram 3 does not divide 16 ranks"):
        owner_memory(
            presets.flash(), dataclasses.replace(layout, engram=3), table="float8", master="float32", state_bytes=4
        )


def test_stages_do_not_count_owned_tables_again():
    plain, owned = (
        memory_per_rank(presets.flash(), Layout(data=8, owned_tables=owned))[0].parameters for owned in (False, True)
    )
    assert plain - owned == 196_613_849_600
