"""The table of updates: complete, and right where public trainers were wrong."""

import dataclasses

import pytest
import torch

from megatron_dsv41 import presets
from megatron_dsv41.modules.transformer import Transformer
from megatron_dsv41.optim.groups import TABLE, Algorithm, decays, group_parameters, is_frozen, role_of
from megatron_dsv41.optim.settings import Optimizer
from megatron_dsv41.phase import Phase

PUBLISHED = Optimizer(name="published")
TRAINED = Phase(index_loss="sparse")


def shapes_of(config):
    token_map = torch.zeros(config.vocab_size, dtype=torch.int64)
    return {name: tuple(p.shape) for name, p in Transformer(config, token_map).named_parameters()}


@pytest.fixture(scope="module")
def tiny_shapes():
    return shapes_of(presets.tiny())


def groups(shapes, settings=PUBLISHED, phase=TRAINED):
    return {g.role: g for g in group_parameters(shapes, presets.tiny(), phase, settings)}


def test_every_parameter_is_in_exactly_one_group(tiny_shapes):
    found = [name for group in groups(tiny_shapes).values() for name in group.shapes]
    assert sorted(found) == sorted(tiny_shapes)
    assert len({row.role for row in TABLE}) == len(TABLE)
    assert set(groups(tiny_shapes)) == {row.role for row in TABLE}


def test_uncovered_names_are_listed(tiny_shapes):
    with pytest.raises(ValueError, match=r"1 parameters have no row .*: layers\.0\.attn\.extra"):
        groups(tiny_shapes | {"layers.0.attn.extra": (3,)})


def test_algorithms(tiny_shapes):
    found = groups(tiny_shapes)
    sinkhorn = {role for role, group in found.items() if group.algorithm is Algorithm.SINKHORN}
    assert sinkhorn == {"embed.weight", "head.weight", "engram.embed.weight"}
    adamw = {role for role, group in found.items() if group.algorithm is Algorithm.ADAMW}
    offsets = {f"{site}_hc.{part}" for site in ("attn", "ffn") for part in ("base", "scale")} | {"attn.attn_sink"}
    gains = {role for role in found if "norm" in role or role in ("engram.q_weight", "engram.k_weight")}
    assert adamw == offsets | gains
    assert {role for role in adamw if found[role].decay} == gains
    assert all(found[role].decay == 0.0 for role in sinkhorn)
    assert all(g.decay == 0.1 for g in found.values() if g.algorithm is Algorithm.MUON)
    assert {role: group.lr for role, group in found.items() if group.lr != 1} == {"engram.embed.weight": 5.0}


def test_logical_matrices(tiny_shapes):
    config, found = presets.tiny(), groups(tiny_shapes)
    assert found["attn.wq_b.weight"].matrix == (config.head_dim, config.q_lora_rank)
    assert found["attn.indexer.wq_b.weight"].matrix == (config.index_head_dim, config.q_lora_rank)
    assert found["attn.wo_a.weight"].matrix[0] == config.o_lora_rank
    assert found["ffn.experts.w13"].matrix == (config.moe_intermediate_size, config.hidden_size)
    assert found["ffn.experts.w2"].matrix == (config.hidden_size, config.moe_intermediate_size)
    assert found["engram.wkv.weight"].matrix[0] == config.hidden_size
    assert found["attn.wkv.weight"].matrices == 1


def test_open_questions_are_settings(tiny_shapes):
    whole = dataclasses.replace(
        PUBLISHED, query_heads=False, index_query_heads=False, output_groups=False, engram_projections=False
    )
    found = groups(tiny_shapes, whole)
    many = {role for role, group in found.items() if group.matrices > 1}
    assert many == {"ffn.experts.w13", "ffn.experts.w2"}
    found = groups(tiny_shapes, dataclasses.replace(PUBLISHED, mhc="adamw", router="adamw", engram_lr_projections=True))
    assert {found[role].algorithm for role in ("attn_hc.fn", "ffn_hc.fn", "ffn.gate.weight")} == {Algorithm.ADAMW}
    assert found["attn_hc.fn"].decay == 0.1
    assert found["engram.wkv.weight"].lr == 5.0


def test_adamw_alone(tiny_shapes):
    found = groups(tiny_shapes, Optimizer())
    assert {group.algorithm for group in found.values()} == {Algorithm.ADAMW}
    assert {group.lr for group in found.values()} == {1.0}
    assert {role for role, group in found.items() if group.decay == 0} == {
        role_of(name) for name in tiny_shapes if not decays(name)
    }


def test_muon_leaves_tables_to_adamw(tiny_shapes):
    found = groups(tiny_shapes, Optimizer(name="muon"))
    assert found["embed.weight"].algorithm is Algorithm.ADAMW
    assert found["attn.wkv.weight"].algorithm is Algorithm.MUON


def test_what_no_loss_trains_is_frozen(tiny_shapes):
    frozen = {g.role for g in group_parameters(tiny_shapes, presets.tiny(), Phase(), PUBLISHED) if g.frozen}
    assert frozen == {row.role for row in TABLE if ".indexer." in row.role}
    assert not is_frozen("layers.2.attn.indexer.wk.weight", TRAINED, PUBLISHED)


def test_frozen_patterns(tiny_shapes):
    settings = dataclasses.replace(PUBLISHED, frozen=("layers.1.*", "embed.weight"))
    split = group_parameters(tiny_shapes, presets.tiny(), TRAINED, settings)
    frozen = {name for group in split if group.frozen for name in group.shapes}
    assert frozen == {name for name in tiny_shapes if name.startswith("layers.1.") or name == "embed.weight"}
    with pytest.raises(ValueError, match=r"optimizer.frozen 'vision.\*' matches no parameter"):
        groups(tiny_shapes, dataclasses.replace(PUBLISHED, frozen=("vision.*",)))


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"optimizer.momentum must be in \[0, 1\), got 1.0"):
        Optimizer(momentum=1.0)
    with pytest.raises(ValueError, match="three numbers"):
        Optimizer(ns_coefficients=(1.0, 2.0))
    assert len(Optimizer().newton_schulz) == 10


def test_state_bytes(tiny_shapes):
    found = groups(tiny_shapes)
    assert found["attn.wkv.weight"].state_bytes(PUBLISHED, low_precision=True) == 8
    assert found["norm.weight"].state_bytes(PUBLISHED, low_precision=True) == 12
    short = dataclasses.replace(PUBLISHED, momentum_dtype="bfloat16")
    assert found["embed.weight"].state_bytes(short, low_precision=True) == 6
