"""The released config: lossless both ways, and impossible ones refused with the key, the value and the limit."""

import json
from pathlib import Path

import pytest

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.presets import PRESETS, flash

PARITY = Path(__file__).parent / "data" / "parity"


@pytest.mark.parametrize("case", ["text_fp32", "released_layout", "packed_fp32"])
def test_file_round_trip_is_equal(case):
    hf = json.loads((PARITY / case / "config.json").read_text())
    assert json.dumps(DSV41Config.from_hf(hf).to_hf()) == json.dumps(hf)


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_round_trip(preset):
    config = PRESETS[preset]()
    again = DSV41Config.from_hf(config.to_hf())
    assert again.to_hf() == config.to_hf()
    assert {**vars(again), "source": None} == {**vars(config), "source": None}


def test_unknown_keys_are_kept():
    hf = flash().to_hf()
    hf["text_config"]["invented"] = {"a": [1]}
    hf["top_level_invention"] = 3
    again = DSV41Config.from_hf(hf).to_hf()
    assert again == hf


def test_both_rope_forms_mean_the_same():
    hf = flash().to_hf()
    scaling = hf["text_config"].pop("rope_scaling")
    modern = json.loads(json.dumps(hf))
    modern["text_config"]["rope_parameters"] = {**scaling, "rope_theta": 10000.0, "factor": 8}
    hf["text_config"]["rope_scaling"] = {**scaling, "factor": 8}
    a, b = DSV41Config.from_hf(hf), DSV41Config.from_hf(modern)
    assert a.rope_factor == b.rope_factor == 8.0
    assert b.to_hf() == modern and a.to_hf() == hf


def test_changed_value_reaches_the_file():
    hf = json.loads((PARITY / "text_fp32" / "config.json").read_text())
    config = DSV41Config.from_hf(hf).with_overrides({"dtype": "bfloat16", "rope_factor": 4.0, "index_topk": 8})
    out = config.to_hf()
    assert out["dtype"] == out["text_config"]["dtype"] == "bfloat16"
    assert out["text_config"]["rope_parameters"]["factor"] == 4 and out["text_config"]["index_topk"] == 8


def test_unknown_override_names_the_nearest():
    with pytest.raises(ValueError, match=r"hiden_size is not a model setting; did you mean hidden_size\?"):
        flash().with_overrides({"hiden_size": 1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be positive, got 0"),
        ({"hidden_size": "5120"}, "hidden_size must be int, got '5120'"),
        ({"rope_theta": float("inf")}, "rope_theta must be a finite number, got inf"),
        ({"rope_scaling": {"factor": 8}}, "rope_scaling is set by its parts: rope_factor, "),
        ({"num_key_value_heads": 2}, "num_key_value_heads must be 1"),
        ({"o_groups": 7}, "num_attention_heads 64 must be a multiple of o_groups 7"),
        ({"num_experts_per_tok": 400}, "num_experts_per_tok 400 exceeds n_routed_experts 384"),
        ({"scoring_func": "sigmoid"}, "scoring_func must be 'sqrtsoftplus'"),
        ({"qk_rope_head_dim": 256}, "qk_rope_head_dim must be even and at most"),
        ({"num_hidden_layers": 50}, "compress_ratios has 43 entries, needs at least num_hidden_layers = 50"),
        ({"compress_ratios": (0, 3) + (1,) * 41}, "compress_ratios must hold 0, 1 or 2 only"),
        ({"kv_source_layer_ids": (2, 8, 14, 40)}, "kv_source_layer_ids names layer 40, outside 0..39"),
        ({"kv_source_layer_ids": (2, 8, 14, 19)}, "are not in index_source_layer_ids"),
        ({"kv_source_layer_ids": (8, 2, 14, 20)}, "must be strictly ascending"),
        ({"kv_source_layer_ids": (2, 8, 14)}, "layer 20 has compress ratio 1 but reads layer 14: ratio 2"),
        ({"kv_source_layer_ids": (8, 14, 20)}, "layer 2 has compress ratio 2 but no kv source at or before it"),
        ({"index_source_layer_ids": (0, 2, 8, 14, 20)}, "layer 0 is an index source but compress_ratios"),
        ({"candidate_source_layer_id": 24}, "candidate_source_layer_id 24 must be -1 or one of"),
        ({"candidate_source_layer_id": 14}, "follows candidate source 14"),
        ({"engram_num_embeddings": (1,)}, "engram_num_embeddings has 1 entries, engram_layer_ids 2"),
    ],
)
def test_impossible_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        flash().with_overrides(change)


def test_null_rope_parameters_do_not_hide_rope_scaling():
    hf = flash().to_hf()
    hf["text_config"]["rope_parameters"] = None
    hf["text_config"]["rope_scaling"]["original_max_position_embeddings"] = 64
    config = DSV41Config.from_hf(hf)
    assert config.rope_original_max_position_embeddings == 64 and config.to_hf() == hf


def test_contradicting_rope_settings_are_refused():
    hf = flash().to_hf()
    hf["text_config"]["rope_parameters"] = {**hf["text_config"]["rope_scaling"], "factor": 2}
    with pytest.raises(ValueError, match="both given and differ"):
        DSV41Config.from_hf(hf)


def test_gate_temperature_that_nobody_implements_is_refused():
    hf = flash().to_hf()
    hf["text_config"]["gate_temp"] = 2.0
    with pytest.raises(ValueError, match="gate_temp must be 1.0"):
        DSV41Config.from_hf(hf)


def test_older_dtype_key_is_understood():
    hf = flash().to_hf()
    hf["text_config"].pop("dtype", None)
    hf.pop("dtype", None)
    hf["torch_dtype"] = "float32"
    config = DSV41Config.from_hf(hf)
    assert config.dtype == "float32" and config.to_hf() == hf
    assert config.with_overrides({"dtype": "bfloat16"}).to_hf()["torch_dtype"] == "bfloat16"
    hf["torch_dtype"] = "float16"
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, got 'float16'"):
        DSV41Config.from_hf(hf)


def test_rope_type_other_than_yarn_is_refused():
    hf = flash().to_hf()
    hf["text_config"]["rope_scaling"]["rope_type"] = "linear"
    with pytest.raises(ValueError, match="only 'yarn'"):
        DSV41Config.from_hf(hf)


def test_every_setting_is_read_somewhere():
    # Keys that nobody reads look like support that is not there.
    import dataclasses
    import re

    package = Path(__file__).parents[1] / "megatron_dsv41"
    text = "\n".join(p.read_text() for p in package.rglob("*.py") if p.name not in ("config.py", "presets.py"))
    # Checked against one legal value at construction, or carried for the file's other readers.
    fixed = {"num_key_value_heads", "hidden_act", "attention_bias", "tie_word_embeddings", "scoring_func"}
    fixed |= {"topk_method", "norm_topk_prob", "n_shared_experts", "rope_key", "source", "quantization"}
    fixed |= {"compress_ratios", "engram_num_embeddings"}  # read through properties of the config
    fixed |= {"max_position_embeddings", "bos_token_id", "pad_token_id"}  # for readers of the exported file
    fixed |= {"dspark_block_size", "dspark_noise_token_id", "dspark_num_experts_per_tok"}  # drafts are not trained yet
    for field in dataclasses.fields(DSV41Config):
        if field.name not in fixed:
            assert re.search(rf"\.{field.name}\b|\"{field.name}\"", text), f"no code reads config.{field.name}"
