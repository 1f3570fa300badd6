"""The roles of linears, which of them multiply in low precision, and what is refused before anything is built."""

import dataclasses

import pytest

from megatron_dsv41 import presets
from megatron_dsv41.backends.megatron.settings import check_settings
from megatron_dsv41.modules.primitives import TorchPrimitives
from megatron_dsv41.modules.transformer import Transformer
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.precision import (
    KEPT,
    RECIPES,
    Machine,
    Precision,
    check_machine,
    linear_roles,
    low_roles,
)
from megatron_dsv41.run_config import run_from_dict
from megatron_dsv41.testing.tiny import identity_map, tiny_config

RUN = {
    "model": {"preset": "flash"},
    "data": {"train": "none", "seq_length": 4096},
    "batch": {"sequences": 8},
    "train": {"steps": 1},
    "checkpoint": {"folder": "none"},
}


class Recording(TorchPrimitives):
    """Keeps the sizes of every linear that a model asks for."""

    def __init__(self, config):
        super().__init__(config, Ops())
        self.asked = {}

    def linear(self, role, d_in, d_out, fp32=False):
        self.asked[role] = (d_in, d_out)
        return super().linear(role, d_in, d_out, fp32)


def test_the_table_holds_the_linears_of_the_model():
    config = tiny_config()
    primitives = Recording(config)
    Transformer(config, identity_map(config), primitives=primitives)
    table = {role: (linear.d_in, linear.d_out) for role, linear in linear_roles(config).items()}
    for role, sizes in primitives.asked.items():
        if role.startswith(("attn.compressor.", "attn.indexer.")):
            assert role not in table
        else:
            assert table.pop(role) == sizes
    assert not table


def test_nothing_is_rounded_unless_asked_for():
    assert low_roles(presets.flash(), Precision()) == {}
    assert run_from_dict(RUN).precision == Precision()


def test_a_phase_may_have_another_recipe():
    phases = [{"name": "long", "steps": 8, "precision": {"fp8": "block"}}, {"name": "end", "steps": 2}]
    legs = run_from_dict(RUN | {"train": {}, "phases": phases}).legs
    assert [leg.run.precision.name for leg in legs] == ["block", None]


def test_patterns_choose_among_the_linears_that_may():
    config = presets.flash()
    assert list(low_roles(config, Precision(fp8="block"))) == list(linear_roles(config))
    chosen = low_roles(config, Precision(fp8="block", roles=("attn.wq_*", "engram.wkv")))
    assert list(chosen) == ["attn.wq_a", "attn.wq_b", "engram.wkv"]
    # "attn.*" reaches none of those that are kept.
    assert not [role for role in low_roles(config, Precision(fp8="block", roles=("attn.*",))) if "indexer" in role]
    no_engram = dataclasses.replace(config, engram_layer_ids=(), engram_num_embeddings=())
    assert "engram.wkv" not in linear_roles(no_engram)


REFUSED = {
    ("precision.fp8=block", "precision.roles=[attn.wq_c]"): "precision.roles: 'attn.wq_c' names no linear; there are",
    ("precision.fp8=block", "precision.roles=[head]"): "'head' keeps the run's precision: logits are fp32",
    ("precision.fp8=block", "precision.roles=[attn.indexer.wk]"): "'attn.indexer.wk' keeps the run's precision: decid",
    ("precision.fp8=block", "precision.fp4=nvfp4"): "fp8=block and precision.fp4=nvfp4 exclude each other: set one",
    ("precision.fp8=fast",): "precision.fp8",
    ("precision.fp8=block", "train.precision=fp32"): "precision.fp8=block rounds bf16 operands: it needs train.precis",
    ("precision.fp8=delayed", "train.recompute=selective"): "train.recompute=selective twice: set train.recompute=none",
    (
        "precision.fp8=current",
        "model.overrides.q_lora_rank=1288",
    ): "precision.fp8=current: attn.wq_a has 1288 outputs, not a multiple of 16: leave attn.wq_a out of preci",
    (
        "precision.fp4=nvfp4",
        "model.overrides.moe_intermediate_size=2320",
    ): "precision.fp4=nvfp4: ffn.shared_experts.w1 has 2320 outputs, not a multiple of 32",
    (
        "precision.fp8=current",
        "parallel.tp=2",
        "model.overrides.moe_intermediate_size=2320",
    ): "ffn.shared_experts.w1 has 1160 outputs (2320 split by parallel.tp 2), not a multiple of 16",
    (
        "precision.fp8=current",
        "data.seq_length=4088",
    ): "attn.wq_a has 4088 tokens, not a multiple of 16: change data.seq_length or batch.micro, or set preci",
    (
        "precision.fp8=current",
        "data.seq_length=4112",
        "parallel.tp=2",
        "parallel.sp=true",
    ): "engram.wkv has 2056 tokens, not a multiple of 16",
    (
        "ops.routing.experts=grouped_fp8",
        "model.overrides.moe_intermediate_size=2312",
    ): "ops.routing.experts=grouped_fp8 multiplies multiples of 16, moe_intermediate_size is 2312 on a rank",
}


@pytest.mark.parametrize("overrides", REFUSED, ids=" ".join)
def test_settings_that_cannot_be(overrides):
    with pytest.raises(ValueError) as refusal:
        check_settings(run_from_dict(RUN, overrides), 2)
    assert REFUSED[overrides] in str(refusal.value)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "nvfp4"])
def test_the_release_fits_every_recipe(recipe):
    for layout in ((), ("parallel.tp=8", "parallel.sp=true"), ("parallel.cp=2",)):
        assert check_settings(run_from_dict(RUN, (f"precision.fp8={recipe}", *layout)), 8)


HOPPER, BLACKWELL, ADA = (Machine(capability, True) for capability in ((9, 0), (10, 0), (8, 9)))


@pytest.mark.parametrize(
    ("precision", "machine", "message"),
    [
        ({"fp8": "block"}, Machine(None, True), "a CUDA device of compute capability 9.0 or higher, and there is none"),
        ({"fp8": "block"}, ADA, "9.0 or higher, this GPU has 8.9: set precision.fp8=delayed or precision.fp8"),
        ({"fp8": "mxfp8"}, HOPPER, "precision.fp8=mxfp8 needs compute capability 10.0 or higher, below 12.0"),
        ({"fp8": "mxfp8"}, Machine((12, 0), True), "below 12.0, this GPU has 12.0: set precision.fp8=delayed or"),
        ({"fp4": "nvfp4"}, HOPPER, "precision.fp4=nvfp4 needs compute capability 10.0 or higher, this GPU has"),
        ({"fp8": "current"}, Machine((8, 0), True), "8.9 or higher, this GPU has 8.0: set precision.fp8=off"),
        ({"fp8": "current"}, Machine((9, 0), False), "package transformer-engine, which is not installed: pip"),
    ],
)  # fmt: skip
def test_machines_that_cannot(precision, machine, message):
    with pytest.raises(ValueError) as refusal:
        check_machine(Precision(**precision), machine)
    assert message in str(refusal.value)


def test_machines_that_can():
    for recipe in ("delayed", "current", "block"):
        check_machine(Precision(fp8=recipe), HOPPER)
    for precision in (Precision(fp8="mxfp8"), Precision(fp4="nvfp4")):
        check_machine(precision, BLACKWELL)
    check_machine(Precision(), Machine(None, False))


def test_kept_roles_are_not_in_the_table():
    assert not set(KEPT) & set(linear_roles(presets.flash()))
