import dataclasses

import pytest

from megatron_dsv41 import presets
from megatron_dsv41.experiments.flops import (
    active_parameters,
    count_parameters,
    flops_per_token,
    kv_bytes_per_token,
    mean_visible,
)
from megatron_dsv41.phase import Phase

FULL_RANGE = Phase(hsi=False)


def test_flash_has_the_released_parameter_counts():
    count = count_parameters(presets.flash())
    assert count.by_kind == {
        "routed experts": 543_581_798_400,
        "attention": 5_064_696_320,
        "shared experts": 1_415_577_600,
        "embedding": 661_913_600,
        "head": 661_913_600,
        "vision": 485_268_480,
        "engram projections": 314_654_720,
        "routers": 78_673_920,
        "indexers": 43_516_416,
        "compressors": 18_352_128,
        "mhc": 39_323_760,
        "norms": 414_720,
        "engram tables": 196_613_849_600,
        "dspark": 14_225_362_530,
    }
    assert count.backbone == 552_366_103_664
    assert count.total == 763_205_315_794


def test_flash_activates_8_and_16_billion():
    active = active_parameters(presets.flash())
    assert (active.prefill, active.decode) == (7_894_958_080, 16_129_720_320)


def test_flash_keeps_890_bytes_of_global_kv_per_token():
    assert kv_bytes_per_token(presets.flash()) == 890.0


def test_proxy_fits_one_gpu():
    assert count_parameters(presets.proxy()).total == 6_967_021_488


@pytest.mark.parametrize(
    ("preset", "seq_length", "gigaflops"),
    [
        ("flash", 4096, 105.6),
        ("flash", 16384, 106.5),
        ("flash", 65536, 108.0),
        ("proxy", 4096, 21.6),
        ("proxy", 16384, 21.8),
        ("proxy", 65536, 22.3),
    ],
)
def test_training_flops_per_token(preset, seq_length, gigaflops):
    flops = flops_per_token(presets.PRESETS[preset](), seq_length, FULL_RANGE)
    assert round(flops.training_total / 1e9, 1) == gigaflops


@pytest.mark.parametrize(
    ("seq_length", "ratio", "limit"), [(1, 1, 128), (7, 2, None), (7, 2, 2), (41, 1, 16), (3, 2, 0)]
)
def test_mean_visible_is_the_mean_over_queries(seq_length, ratio, limit):
    bound = seq_length if limit is None else limit
    seen = [min((t + 1) // ratio, bound) for t in range(seq_length)]
    assert mean_visible(seq_length, ratio, limit) == pytest.approx(sum(seen) / seq_length)


def test_backward_counts_the_indexer_only_with_its_objective():
    config = presets.tiny()
    off, sparse, dense = (flops_per_token(config, 256, Phase(index_loss=m)) for m in ("off", "sparse", "dense"))
    assert off.forward == sparse.forward == dense.forward
    assert off.training["indexer scores"] == off.forward["indexer scores"]
    assert off.training["experts"] == 3 * off.forward["experts"]
    assert dense.training["indexer scores"] == 3 * dense.forward["indexer scores"]
    assert off.training_total < sparse.training_total < dense.training_total


def test_the_candidate_pool_bounds_the_scores_of_reindex_layers():
    config = dataclasses.replace(presets.flash(), candidate_topk_blocks=64)
    pooled = flops_per_token(config, 4096).forward["indexer scores"]
    assert pooled < flops_per_token(config, 4096, FULL_RANGE).forward["indexer scores"]


def test_text_only_configs_have_no_vision_or_draft():
    kinds = count_parameters(presets.tiny()).by_kind
    assert "vision" not in kinds
    assert "dspark" not in kinds
