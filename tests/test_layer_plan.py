"""The layer schedule of the release, and lifetimes as data."""

import pytest

from megatron_dsv41.layer_plan import LayerKind, live_at, plan_layers
from megatron_dsv41.presets import PRESETS, flash

PLANS = plan_layers(flash())


def test_released_kinds():
    kinds = {kind: [p.layer for p in PLANS if p.kind is kind] for kind in LayerKind}
    assert kinds[LayerKind.SWA] == [0, 1]
    assert kinds[LayerKind.FULL] == [2, 8, 14, 20]
    assert kinds[LayerKind.REINDEX] == [24, 28, 32, 36]
    assert len(kinds[LayerKind.REUSE]) == 30


def test_released_sources():
    assert [PLANS[i].kv_source for i in (3, 7, 9, 19, 21, 39)] == [2, 2, 8, 14, 20, 20]
    assert [PLANS[i].topk_source for i in (3, 21, 23, 25, 31, 39)] == [2, 20, 20, 24, 28, 36]
    assert [p.layer for p in PLANS if p.uses_candidates] == [24, 28, 32, 36]
    assert [p.layer for p in PLANS if p.is_candidate_source] == [20]
    assert [p.layer for p in PLANS if p.has_gate] == [2, 8, 14]
    assert [p.layer for p in PLANS if p.has_engram] == [1, 14]
    assert [p.layer for p in PLANS if p.in_decoder] == list(range(20, 40))


@pytest.mark.parametrize(
    ("boundary", "fields"),
    [
        (1, set()),
        (2, set()),
        (8, set()),
        (14, set()),
        (20, set()),
        (10, {"compressed_kv", "topk_indices"}),
        (24, {"candidates", "compressed_kv", "index_keys"}),
        (28, {"candidates", "compressed_kv", "index_keys"}),
        (30, {"candidates", "compressed_kv", "index_keys", "topk_indices"}),
        (38, {"compressed_kv", "topk_indices"}),
        (40, set()),
    ],
)
def test_what_crosses_released_boundaries(boundary, fields):
    assert live_at(PLANS, boundary) == fields


@pytest.mark.parametrize("preset", PRESETS)
def test_every_reader_finds_what_it_reads(preset):
    plans = plan_layers(PRESETS[preset]())
    for plan in plans:
        assert plan.consumes <= live_at(plans, plan.layer)
