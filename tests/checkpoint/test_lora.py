"""A LoRA adapter merged on export: the sum in float32, everything else untouched, clear refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_dsv41.checkpoint.convert import export_checkpoint, import_checkpoint, load_released
from megatron_dsv41.checkpoint.lora import CONFIG, WEIGHTS
from megatron_dsv41.checkpoint.safetensors_io import SafetensorsFolder

RANK = 4
# One of each storage: FP8 tiles, an expert's FP4, plain.
MODULES = ("layers.2.attn.wq_b", "layers.3.ffn.experts.1.w3", "layers.2.attn.compressor.wkv")
TARGETS = ["wq_b", "w3", "compressor.wkv"]


def write_adapter(folder: Path, shapes: dict[str, tuple[int, int]], **settings: Any) -> dict[str, torch.Tensor]:
    """PEFT's files with random factors. Returns B @ A by module name."""
    generator = torch.Generator().manual_seed(1)
    tensors, products = {}, {}
    for module, (rows, columns) in shapes.items():
        a, b = (torch.randn(shape, generator=generator) / 8 for shape in ((RANK, columns), (rows, RANK)))
        tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
        products[module] = b @ a
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": TARGETS, "bias": "none", **settings}
    (folder / CONFIG).write_text(json.dumps(config))
    return products


def shapes_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Logical shapes of the adapted weights."""
    return {name: (values.shape[0], values.shape[1]) for name, values in merged_values(folder).items()}


def merged_values(folder: Path, dtype: str = "F32") -> dict[str, torch.Tensor]:
    weights = load_released(folder, dtype=dtype)
    values = {name: weights[f"{name}.weight"] for name in MODULES if "experts" not in name}
    return values | {"layers.3.ffn.experts.1.w3": weights["layers.3.ffn.experts.w13"][1, 1]}


@pytest.mark.parametrize(
    ("settings", "scaling"),
    [
        ({}, 6 / RANK),
        ({"use_rslora": True}, 6 / math.sqrt(RANK)),
        ({"alpha_pattern": {"attn.wq_b": 12}, "target_modules": r".*\.(wq_b|w3|wkv)"}, None),
    ],
)
def test_the_sum_is_exact_in_float32(tmp_path, full_released, settings, scaling):
    products = write_adapter(tmp_path / "adapter", shapes_of(full_released), **settings)
    export_checkpoint(full_released, tmp_path / "out", storage="fp32", merge=tmp_path / "adapter")
    before, after = merged_values(full_released), merged_values(tmp_path / "out")
    for module, product in products.items():
        factor = scaling or (12 if "wq_b" in module else 6) / RANK
        torch.testing.assert_close(after[module], before[module] + factor * product, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("native", [False, True])
def test_only_adapted_tensors_change_in_the_kept_storage(tmp_path, full_released, native):
    products = write_adapter(tmp_path / "adapter", shapes_of(full_released))
    source = tmp_path / "native" if native else full_released
    if native:
        import_checkpoint(full_released, source, storage="source")
    export_checkpoint(source, tmp_path / "out", merge=tmp_path / "adapter")
    old, new = SafetensorsFolder(full_released), SafetensorsFolder(tmp_path / "out")
    assert old.shards() == new.shards()
    changed = [n for n in old.tensors if not torch.equal(old.read(n).view(torch.uint8), new.read(n).view(torch.uint8))]
    assert {name.rsplit(".", 1)[0] for name in changed} == set(products)
    before, after = merged_values(full_released), merged_values(tmp_path / "out")
    for module, product in products.items():
        want = before[module] + 6 / RANK * product
        assert float((after[module] - want).norm() / want.norm()) < (0.2 if "experts" in module else 0.04), module


BAD = {
    "unknown weight": (
        {"layers.2.attn.wq_z": (8, 8)},
        {"target_modules": ["wq_z"]},
        r"no layers\.2\.attn\.wq_z\.weigh",
    ),
    "carried weight": ({"mtp.0.attn.wkv": (64, 80)}, {"target_modules": ["wkv"]}, r"no mtp\.0\.attn\.wkv\.weight"),
    "transposed": ({"layers.2.attn.compressor.wkv": (80, 64)}, {"target_modules": ["wkv"]}, r"make \[80, 64\].*wkv"),
    "no target": (
        {"layers.2.attn.wkv": (64, 80)},
        {"target_modules": ["wq_a"]},
        r"layers\.2\.attn\.wkv is none of the",
    ),
    "idle target": (
        {"layers.2.attn.wkv": (64, 80)},
        {"target_modules": ["wkv", "wo_a"]},
        "belongs to the target 'wo_a'",
    ),
    "rank": ({"layers.2.attn.wkv": (64, 80)}, {"target_modules": ["wkv"], "r": 8}, r"wkv\.lora_A.*says rank 8"),
    "DoRA": ({}, {"use_dora": True}, "use_dora=True cannot be merged"),
    "bias": ({}, {"bias": "all"}, "bias='all' cannot be merged"),
    "PiSSA": ({}, {"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' cannot"),
    "other method": ({}, {"peft_type": "IA3"}, "peft_type is 'IA3'"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_merged_is_named_and_nothing_is_written(tmp_path, full_released, kind):
    shapes, settings, message = BAD[kind]
    write_adapter(tmp_path / "adapter", shapes or {"layers.2.attn.wkv": (64, 80)}, **settings)
    with pytest.raises(ValueError, match=message):
        export_checkpoint(full_released, tmp_path / "out", merge=tmp_path / "adapter")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_an_unpaired_and_a_foreign_tensor_are_named(tmp_path, full_released):
    write_adapter(tmp_path / "adapter", {"layers.2.attn.wkv": (64, 80)}, target_modules=["wkv"])
    half = {"base_model.model.layers.2.attn.wkv.lora_A.weight": torch.ones(RANK, 80)}
    for tensors, message in ((half, "has no lora_B beside it"), (half | {"x.y": torch.ones(1)}, "x.y is not a LoRA")):
        save_file(tensors, tmp_path / "adapter" / WEIGHTS)
        with pytest.raises(ValueError, match=message):
            export_checkpoint(full_released, tmp_path / "out", merge=tmp_path / "adapter")
