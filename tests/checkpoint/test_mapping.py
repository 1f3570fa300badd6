"""The one table: a bijection, equal to the published list, equal to the model's state dict."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import pytest
import torch

from megatron_dsv41 import presets
from megatron_dsv41.checkpoint.mapping import (
    Split,
    bind,
    carried_tensors,
    is_carried,
    release_shards,
    released_inventory,
)
from megatron_dsv41.checkpoint.storage import num_bytes
from megatron_dsv41.config import DSV41Config
from megatron_dsv41.layer_plan import plan_layers
from megatron_dsv41.modules.transformer import Transformer

DATA = Path(__file__).parents[1] / "data"
CONFIGS = [*presets.PRESETS.values(), lambda: DSV41Config.load(DATA / "parity" / "released_layout")]


def published() -> dict[str, tuple[str, tuple[int, ...]]]:
    with gzip.open(DATA / "released_tensors.json.gz", "rt") as file:
        return {name: (dtype, tuple(shape)) for name, (dtype, shape) in json.load(file).items()}


def test_flash_inventory_is_the_published_list():
    inventory = released_inventory(presets.flash())
    assert len(inventory) == 96085
    assert inventory == published()
    assert sum(num_bytes(*stored) for stored in inventory.values()) == 510_286_023_000


@pytest.mark.parametrize("make", CONFIGS)
def test_table_is_a_bijection(make):
    bindings = bind(make())
    natives = [b.native for b in bindings]
    released = [name for b in bindings for name in b.released]
    assert len(set(natives)) == len(natives) and len(set(released)) == len(released)
    assert not any(map(is_carried, released))
    assert all(b.via.num_parts == len(b.released) for b in bindings)


@pytest.mark.parametrize("make", [presets.tiny, presets.proxy])
def test_native_names_shapes_and_dtypes_are_the_models(make):
    config = dataclasses.replace(make(), dtype="bfloat16")
    token_map = torch.zeros(config.vocab_size, dtype=torch.int64)
    with torch.device("meta"):
        model = Transformer(config, token_map)
    state = model.state_dict()
    bindings = {b.native: b for b in bind(config)}
    assert set(state) == set(bindings)
    assert {n: tuple(t.shape) for n, t in state.items()} == {n: b.shape for n, b in bindings.items()}
    want = {n: torch.float32 if b.is_float32 else torch.bfloat16 for n, b in bindings.items()}
    assert {n: t.dtype for n, t in state.items()} == want


def test_parts_exist_only_where_the_plan_owns_them():
    config = presets.flash()
    names = {b.native for b in bind(config)}
    for plan in plan_layers(config):
        attn = f"layers.{plan.layer}.attn"
        assert (f"{attn}.compressor.wkv.weight" in names) == plan.owns_kv
        assert (f"{attn}.compressor.wgate.weight" in names) == (plan.owns_kv and plan.ratio == 2)
        assert (f"{attn}.indexer.wk.weight" in names) == plan.owns_kv
        assert (f"{attn}.indexer.wq_b.weight" in names) == plan.owns_selection
        assert (f"layers.{plan.layer}.engram.wkv.weight" in names) == (plan.layer in (1, 14))


def test_engram_shapes_follow_the_config_not_the_primes():
    config = DSV41Config.load(DATA / "parity" / "text_fp32")
    tables = [b for b in bind(config) if b.split is Split.ENGRAM_ROWS]
    assert [b.shape[0] for b in tables] == list(config.engram_num_embeddings)


def test_gate_comes_before_up_in_stacked_experts():
    (w13,) = [b for b in bind(presets.tiny()) if b.native == "layers.3.ffn.experts.w13"]
    assert w13.released[:3] == tuple(f"layers.3.ffn.experts.{n}.weight" for n in ("0.w1", "0.w3", "1.w1"))
    assert w13.shape == (8, 2, 64, 128) and w13.split is Split.EXPERTS


def test_unquantized_inventory_is_plain():
    config = presets.tiny()
    assert {dtype for dtype, _ in released_inventory(config).values()} == {"F32"}
    config = dataclasses.replace(config, dtype="bfloat16")
    inventory = released_inventory(config)
    assert {dtype for dtype, _ in inventory.values()} == {"F32", "BF16"}
    assert inventory["layers.0.hc_attn_fn"][0] == "F32" and inventory["layers.0.ffn.gate.bias_vl"][0] == "F32"


def test_carried_parts_follow_the_config():
    assert not carried_tensors(presets.tiny())
    flash = carried_tensors(presets.flash())
    assert {name.split(".")[0] for name in flash} >= {"mtp", "vision", "aligner", "image_start"}
    assert flash["mtp.0.main_proj.weight"][0] == (5120, 15360)


def test_release_shards_follow_the_published_roles():
    config = presets.flash()
    shards = release_shards(config, released_inventory(config))
    number = {name: int(file.split("-")[1]) for name, file in shards.items()}
    assert set(number.values()) == set(range(1, 49))
    assert number["vision.norm.weight"] == number["image_end"] == 1
    assert number["embed.weight"] == 2 and number["norm.weight"] == number["head.weight"] == 43
    assert number["layers.0.attn.attn_sink"] == 3 and number["layers.39.attn.attn_sink"] == 42
    assert number["layers.1.engram.q_weight"] == 47 and number["layers.14.engram.embed.scale"] == 48
    assert number["mtp.2.norm.weight"] == 46
