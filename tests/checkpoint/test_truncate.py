"""Small models cut from a checkpoint: same weights under the same ids, a valid config, exportable."""

from __future__ import annotations

import pytest
import torch

from megatron_dsv41 import presets
from megatron_dsv41.checkpoint.convert import export_checkpoint, import_checkpoint, load_released
from megatron_dsv41.checkpoint.mapping import bind
from megatron_dsv41.checkpoint.safetensors_io import SafetensorsFolder
from megatron_dsv41.checkpoint.sources import NativeSource
from megatron_dsv41.checkpoint.truncate import truncate
from megatron_dsv41.checkpoint.verify import verify
from megatron_dsv41.config import DSV41Config


@pytest.mark.parametrize("layers", [1, 2, 3, 14, 15, 20, 21, 25, 39, 40])
def test_every_depth_of_the_release_is_a_valid_model(layers):
    config = truncate(presets.flash(), layers, 8)
    assert config.num_hidden_layers == layers and config.n_routed_experts == 8
    assert {b.layer for b in bind(config)} == {None, *range(layers)}
    assert config.engram_layer_ids == tuple(i for i in (1, 14) if i < layers)


@pytest.mark.parametrize("storage", ["config", "source"])
def test_first_layers_and_experts_are_the_same_weights(tmp_path, full_released, storage):
    import_checkpoint(full_released, tmp_path / "cut", storage=storage, layers=5, experts=2)
    whole, cut = load_released(full_released), NativeSource(tmp_path / "cut")
    assert cut.config.num_hidden_layers == 5 and cut.config.candidate_source_layer_id == 4
    assert verify(tmp_path / "cut").ok
    for name in cut.names():
        want = whole[name][: cut.shape(name)[0]]
        assert torch.equal(cut.read(name), want), name
    assert cut.shape("layers.4.ffn.gate.bias_vl") == (2,) and cut.shape("layers.4.ffn.experts.w13")[0] == 2


@pytest.mark.parametrize("storage", ["config", "source"])
def test_cut_model_exports_in_the_storage_it_came_in(tmp_path, full_released, storage):
    import_checkpoint(full_released, tmp_path / "cut", storage=storage, layers=3, experts=2)
    export_checkpoint(tmp_path / "cut", tmp_path / "out")
    old, new = SafetensorsFolder(full_released), SafetensorsFolder(tmp_path / "out")
    assert verify(tmp_path / "out").ok
    assert DSV41Config.load(tmp_path / "out").num_nextn_predict_layers == 0
    for name, info in new.tensors.items():
        rows = range(info.shape[0])
        assert torch.equal(new.read(name).view(torch.uint8), old.read(name, rows).view(torch.uint8)), name
    assert not any(name.startswith("mtp.") for name in new.tensors) and "image_end" in new.tensors


@pytest.mark.parametrize(("layers", "experts"), [(0, None), (9, None), (None, 1), (None, 4)])
def test_impossible_cuts_are_refused(tmp_path, full_released, layers, experts):
    with pytest.raises(ValueError, match="must be"):
        import_checkpoint(full_released, tmp_path / "cut", layers=layers, experts=experts)
    assert list(tmp_path.iterdir()) == []
