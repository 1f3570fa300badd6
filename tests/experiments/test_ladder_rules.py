import dataclasses

import pytest

from megatron_dsv41 import presets
from megatron_dsv41.experiments import ladder_rules
from megatron_dsv41.experiments.flops import active_parameters, count_parameters
from megatron_dsv41.experiments.ladder_rules import Rules, architecture, layer_schedule
from megatron_dsv41.layer_plan import LayerKind, plan_layers

DEPTHS = range(8, 42, 2)
DRAFT = {"num_nextn_predict_layers": 3, "dspark_target_layer_ids": (37, 38, 39)}


def test_depth_40_is_the_release():
    flash = presets.flash()
    ours = architecture(flash, Rules(), 40)
    same = dataclasses.replace(ours, compress_ratios=(*ours.compress_ratios, 0, 0, 0), **DRAFT)
    assert same == flash


def test_the_default_recipe_is_the_release_too():
    rules = Rules()
    assert ladder_rules.learning_rate(rules, 40) == 2.6e-4
    assert ladder_rules.batch_tokens(rules, 45e12, 65536) == 100_663_296
    shape = ladder_rules.schedule(rules, 45_000, 2.6e-4)
    assert (shape["warmup"] + shape["stable"], shape["cosine"]) == (28_000, 12_000)
    assert shape["min_lr"] == pytest.approx(2.6e-5)


@pytest.mark.parametrize("depth", DEPTHS)
def test_every_depth_keeps_every_mechanism(depth):
    config = architecture(presets.tiny(), Rules(), depth)
    plans = plan_layers(config)
    kinds = {(plan.kind, plan.ratio, plan.in_decoder) for plan in plans}
    assert config.decoder_start == depth // 2  # CED: halves
    assert [plan.kind for plan in plans[:2]] == [LayerKind.SWA] * 2
    for kind, ratio, in_decoder in (
        (LayerKind.FULL, 2, False),
        (LayerKind.REUSE, 2, False),
        (LayerKind.FULL, 1, True),
        (LayerKind.REINDEX, 1, True),
        (LayerKind.REUSE, 1, True),
    ):
        assert (kind, ratio, in_decoder) in kinds
    assert [plan.layer for plan in plans if plan.is_candidate_source] == [depth // 2]
    assert any(plan.uses_candidates for plan in plans)
    engram = [plan.layer for plan in plans if plan.has_engram]
    assert len(engram) == 2 and engram[1] < depth // 2


def test_sizes_grow_with_depth():
    counts = [count_parameters(architecture(presets.tiny(), Rules(), d)) for d in DEPTHS]
    active = [active_parameters(architecture(presets.tiny(), Rules(), d)).decode for d in DEPTHS]
    for values in (active, [c.backbone for c in counts], [c.by_kind["engram tables"] for c in counts]):
        assert values == sorted(set(values))


@pytest.mark.parametrize("depth", [6, 9, 0])
def test_a_depth_without_halves_is_refused(depth):
    with pytest.raises(ValueError, match="even depth of 8 or more"):
        layer_schedule(Rules(), depth)


@pytest.mark.parametrize(
    ("csa2", "lost"),
    [("no-pool", "candidates"), ("no-reindex", "reindex"), ("window", "full")],
)
def test_arms_of_attention_lose_what_they_say(csa2, lost):
    plans = plan_layers(architecture(presets.tiny(), Rules(csa2=csa2), 12))
    found = {plan.kind.value for plan in plans} | {"candidates" for plan in plans if plan.is_candidate_source}
    assert lost not in found


def test_no_rows_means_no_engram():
    config = architecture(presets.tiny(), Rules(engram_rows=0), 8)
    assert "engram tables" not in count_parameters(config).by_kind


@pytest.mark.parametrize("wrong", [{"width_per_layer": 0}, {"warmup": 0.9}, {"decay_to": 1.5}, {"min_lr": 2}])
def test_constants_that_cannot_be_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Rules(**wrong)
