"""What is planned to cross each cut, and when a selection is made again instead of sent."""

import dataclasses

import pytest

from megatron_dsv41 import presets
from megatron_dsv41.layer_plan import live_at, plan_layers
from megatron_dsv41.parallel.payload import CrossingPlanner, Lengths, kept_for, query_field
from megatron_dsv41.phase import Phase
from megatron_dsv41.testing.tiny import tiny_config


def planner(config, seq, phase=None, **lengths):
    return CrossingPlanner(config, phase or Phase(), Lengths(1, seq, **lengths))


def test_bytes_decide():
    flash = presets.flash()
    long = planner(flash, 65536).choose([21, 24, 30, 37], "bytes")
    # The pool of 2048 blocks costs 8192 B per token; what makes it and the top-k 2 x (1280 + 64).
    assert [crossing.shadows for crossing in long] == [(20,), (20,), (20,), ()]
    names = [{field.name for field in crossing.fields} for crossing in long]
    assert names[0] == {"streams", "pre_mix", "compressed_kv", "index_keys", "pool_query"}
    assert names[2] == names[0] | {"topk_indices"}
    assert [crossing.forward_bytes / 65536 for crossing in long] == [45904, 45904, 47952, 45072]
    # At 4 K the pool has no more than 512 blocks.
    assert [crossing.shadows for crossing in planner(flash, 4096).choose([24], "bytes")] == [()]


def test_a_setting_decides():
    tiny = planner(tiny_config(), 32)
    assert [c.shadows for c in tiny.choose([1, 3, 5, 7], "always")] == [(), (2,), (4,), (4, 6)]
    assert all(c.shadows == () for c in planner(presets.flash(), 65536).choose(range(1, 40), "never"))


def test_a_stage_passes_on_only_what_it_received():
    tiny = planner(tiny_config(), 32)
    shipped = tiny.choose([5], "never")[0]
    assert [c.shadows for c in tiny.alternatives(6, 5, shipped.shadows)] == [()]
    assert [c.shadows for c in tiny.alternatives(6, 5, (4,))] == [(), (4,)]


@pytest.mark.parametrize("hsi", [True, False])
@pytest.mark.parametrize("boundary", range(1, 8))
def test_every_alternative_gives_what_is_read(boundary, hsi):
    """Simulate a shadow's reads and writes: afterwards exactly what is alive must be there."""
    plans, phase = plan_layers(tiny_config()), Phase(hsi=hsi)
    for crossing in planner(tiny_config(), 32, phase).alternatives(boundary):
        there = {field.name for field in crossing.fields}
        assert there - {"streams", "pre_mix"} <= kept_for(crossing, plans, boundary - 1)
        for source in crossing.shadows:
            reads = {"index_keys", query_field(plans[source])}
            reads |= {"candidates"} if plans[source].uses_candidates and hsi else set()
            assert reads <= there
            there |= {"topk_indices"} | ({"candidates"} if plans[source].is_candidate_source else set())
        assert live_at(plans, boundary) <= there


def test_gradients_of_keys_only_where_a_loss_reads_them():
    taught = planner(tiny_config(), 32, Phase(index_loss="sparse"))
    grads = {f.name: f.has_gradient for f in taught.crossing(5).fields}
    assert grads["index_keys"] and grads["compressed_kv"] and not grads["candidates"]
    # Before the last layer no loss reads keys: they cross for the shadow alone.
    assert not {f.name: f.has_gradient for f in taught.crossing(7, (4, 6)).fields}["index_keys"]


def test_dtypes_follow_the_model():
    config = dataclasses.replace(tiny_config(), dtype="bfloat16")
    fields = {field.name: field.dtype for field in planner(config, 32).crossing(5).fields}
    assert fields["streams"] == "bfloat16" and fields["compressed_kv"] == fields["pre_mix"] == "float32"
