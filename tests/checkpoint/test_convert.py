"""Import and export: the same bytes back, nothing lost on the way, clear refusals, nothing half-written."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from megatron_dsv41.checkpoint import safetensors_io
from megatron_dsv41.checkpoint.convert import (
    export_checkpoint,
    import_checkpoint,
    load_released,
    native_to_released,
    released_to_native,
    save_released,
)
from megatron_dsv41.checkpoint.mapping import bind, is_carried
from megatron_dsv41.checkpoint.native_record import NATIVE
from megatron_dsv41.checkpoint.pieces import Effort
from megatron_dsv41.checkpoint.safetensors_io import INDEX, SafetensorsFolder
from megatron_dsv41.checkpoint.sources import DictSource, NativeSource, ReleasedSource
from megatron_dsv41.config import DSV41Config
from megatron_dsv41.testing.released import folder_bytes, full_config, write_released, write_tensors

PARITY = Path(__file__).parents[1] / "data" / "parity"
PARITY_CHECKPOINTS = ["text_fp32", "released_layout"]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))


def checkpoint_files(folder) -> dict[str, bytes]:
    """What belongs to the checkpoint of a parity folder."""
    return {name: data for name, data in folder_bytes(folder).items() if name != "expected.safetensors"}


@pytest.mark.parametrize("storage", ["config", "source"])
@pytest.mark.parametrize("case", PARITY_CHECKPOINTS)
def test_parity_folders_round_trip_byte_for_byte(tmp_path, case, storage):
    import_checkpoint(PARITY / case, tmp_path / "native", storage=storage)
    export_checkpoint(tmp_path / "native", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == checkpoint_files(PARITY / case)


@pytest.mark.parametrize("storage", ["config", "source"])
def test_every_kind_of_tensor_round_trips_byte_for_byte(tmp_path, full_released, storage):
    """Odd tails, zero blocks, scales that re-derivation would change, drafts, vision, side files, 18 shards."""
    import_checkpoint(full_released, tmp_path / "native", storage=storage, effort=Effort(workers=3))
    export_checkpoint(tmp_path / "native", tmp_path / "back", effort=Effort(workers=3))
    assert folder_bytes(tmp_path / "back") == folder_bytes(full_released)


def test_side_files_are_copied_in_pieces_and_need_their_space(tmp_path, full_released, monkeypatch):
    monkeypatch.setattr(safetensors_io, "COPY_BYTES", 7)
    shutil.copytree(full_released, tmp_path / "source")
    side = tmp_path / "source" / "more" / "notes.bin"
    side.parent.mkdir()
    side.write_bytes(bytes(range(250)))
    import_checkpoint(tmp_path / "source", tmp_path / "native")
    export_checkpoint(tmp_path / "native", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(tmp_path / "source")
    with side.open("wb") as file:
        file.truncate(shutil.disk_usage(tmp_path).free + 2**20)  # a hole: it takes no room
    os.truncate(tmp_path / "native" / "more" / "notes.bin", side.stat().st_size)
    for command, source in ((import_checkpoint, "source"), (export_checkpoint, "native")):
        with pytest.raises(OSError, match="GB are to be written and the disk has"):
            command(tmp_path / source, tmp_path / "never")
        assert not list(tmp_path.glob("never*"))


def test_import_decodes_without_rounding(full_released, full_native):
    """The native folder equals an independent float64 reading of the released bytes."""
    native, folder = NativeSource(full_native), SafetensorsFolder(full_released)

    def values(name: str) -> torch.Tensor:
        data, scale = folder.read(name), folder.read(name.replace("weight", "scale")).view(torch.uint8).double() - 127
        if data.dtype == torch.int8:
            grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
            byte = data.view(torch.uint8).long()
            code = torch.stack([byte & 15, byte >> 4], dim=-1).flatten(1)
            data, height = grid[code & 7] * (1 - 2 * (code >> 3)), 1
        else:
            height = 1 if "engram.embed" in name else 32
        scale = scale.exp2().repeat_interleave(height, 0).repeat_interleave(32, 1)
        return data.double() * scale[: data.shape[0], : data.shape[1]]

    for binding in bind(full_config()):
        if binding.storage.format:
            want = binding.via.to_native([values(name) for name in binding.released])
            assert torch.equal(native.read(binding.native).double(), want), binding.native


@pytest.mark.parametrize("storage", ["bf16", "fp32"])
def test_plain_export_holds_the_same_values(tmp_path, full_released, full_native, storage):
    export_checkpoint(full_native, tmp_path / "plain", storage=storage)
    config = DSV41Config.load(tmp_path / "plain")
    assert config.quantization is None and config.dtype == {"bf16": "bfloat16", "fp32": "float32"}[storage]
    before, after = load_released(full_released, dtype="F32"), load_released(tmp_path / "plain", dtype="F32")
    assert all(same_bits(before[name], after[name]) for name in before)
    folder = SafetensorsFolder(tmp_path / "plain")
    assert not [name for name in folder.tensors if name.endswith(".scale")]
    assert {info.dtype for info in folder.tensors.values()} <= {"F32", "BF16"}
    assert "mtp.0.ffn.experts.1.w2.weight" in folder.tensors and "image_end" in folder.tensors


def test_released_folder_exports_directly(tmp_path, full_released):
    export_checkpoint(full_released, tmp_path / "plain", storage="bf16")
    export_checkpoint(full_released, tmp_path / "same", storage="source")
    assert folder_bytes(tmp_path / "same") == folder_bytes(full_released)
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def test_plain_checkpoint_quantizes_to_the_released_layout(tmp_path):
    export_checkpoint(PARITY / "text_fp32", tmp_path / "quantized", storage="released", shards="release")
    config = DSV41Config.load(tmp_path / "quantized")
    assert config.quantization is not None
    infos = SafetensorsFolder(tmp_path / "quantized").tensors
    assert infos["layers.2.ffn.experts.0.w1.weight"].dtype == "I8"
    assert infos["layers.1.engram.embed.scale"].shape == (837, 1)
    assert infos["layers.2.attn.wkv.weight"].file != infos["layers.3.attn.wkv.weight"].file
    plain, coarse = load_released(PARITY / "text_fp32"), load_released(tmp_path / "quantized", dtype="F32")
    for name in plain:
        error = (plain[name] - coarse[name]).norm() / plain[name].norm()
        assert error < (0.15 if "experts.w" in name else 0.03), name


@pytest.mark.parametrize("storage", ["source", "released"])
def test_quantization_can_leave_tensors_out(tmp_path, full_released, full_native, storage):
    plain = ["layers.*.attn.wq_?.weight", "mtp.0.ffn.experts.*"]
    export_checkpoint(full_native, tmp_path / "out", storage=storage, plain=plain)
    old, new = SafetensorsFolder(full_released), SafetensorsFolder(tmp_path / "out")
    assert new.info("layers.3.attn.wq_a.weight").dtype == new.info("mtp.0.ffn.experts.1.w2.weight").dtype == "BF16"
    assert new.info("mtp.1.ffn.experts.1.w2.weight").dtype == "I8" and "layers.3.attn.wq_a.scale" not in new.tensors
    assert all(same_bits(old.read(n), new.read(n)) for n in new.tensors if new.info(n).dtype == old.info(n).dtype)
    before, after = load_released(full_released), load_released(tmp_path / "out")
    assert all(same_bits(before[name], after[name]) for name in before)
    assert DSV41Config.load(tmp_path / "out").quantization["modules_to_not_convert"] == plain


@pytest.mark.parametrize(
    ("storage", "plain"), [("released", "layer.*"), ("released", "norm.weight"), ("bf16", "layers.*")]
)
def test_useless_patterns_are_refused(tmp_path, full_native, storage, plain):
    with pytest.raises(ValueError, match="plain"):
        export_checkpoint(full_native, tmp_path / "out", storage=storage, plain=[plain])


def test_trained_tensors_are_quantized_anew_and_the_rest_keeps_its_bytes(tmp_path, full_released):
    state = load_released(full_released)
    state["layers.2.attn.wq_b.weight"] = state["layers.2.attn.wq_b.weight"].clone()
    state["layers.2.attn.wq_b.weight"][40:50] *= 1.7
    save_released(tmp_path / "out", state, full_config(), like=full_released)
    old, new = SafetensorsFolder(full_released), SafetensorsFolder(tmp_path / "out")
    changed = [n for n in old.tensors if not same_bits(old.read(n), new.read(n))]
    assert set(changed) <= {"layers.2.attn.wq_b.weight", "layers.2.attn.wq_b.scale"} and changed
    rows = old.read("layers.2.attn.wq_b.weight").view(torch.uint8) != new.read("layers.2.attn.wq_b.weight").view(
        torch.uint8
    )
    assert set(rows.any(1).nonzero().flatten().tolist()) <= set(range(32, 64))  # one row of tiles
    again = load_released(tmp_path / "out")["layers.2.attn.wq_b.weight"].float()
    want = state["layers.2.attn.wq_b.weight"].float()
    assert float((again - want).norm() / want.norm()) < 0.04


def test_a_model_trained_from_scratch_exports_by_its_config(tmp_path):
    config = dataclasses.replace(full_config(), num_nextn_predict_layers=0, vision={})
    state = {b.native: torch.randn(b.shape).to(torch.float32 if b.is_float32 else torch.bfloat16) for b in bind(config)}
    save_released(tmp_path / "out", state, config)
    assert DSV41Config.load(tmp_path / "out").quantization is not None
    import_checkpoint(tmp_path / "out", tmp_path / "native")
    export_checkpoint(tmp_path / "native", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(tmp_path / "out")
    save_released(tmp_path / "plain", state, dataclasses.replace(config, quantization=None))
    after = load_released(tmp_path / "plain")
    assert all(same_bits(state[name], after[name]) for name in state)


def test_requantized_export_is_a_fixed_point(tmp_path, full_released, full_native):
    """storage "released" with kept scales repeats the bytes; exporting what was re-quantized repeats itself."""
    export_checkpoint(full_native, tmp_path / "released", storage="released", shards="source")
    before, after = SafetensorsFolder(full_released), SafetensorsFolder(tmp_path / "released")
    assert set(before.tensors) == set(after.tensors)
    assert all(same_bits(before.read(name), after.read(name)) for name in before.tensors)


def test_a_config_wider_than_bf16_keeps_float32(tmp_path):
    """Import never rounds: float32 weights under a bfloat16 config stay float32."""
    shutil.copytree(PARITY / "text_fp32", tmp_path / "src")
    config = json.loads((tmp_path / "src" / "config.json").read_text())
    config["dtype"] = config["text_config"]["dtype"] = "bfloat16"
    (tmp_path / "src" / "config.json").write_text(json.dumps(config))
    import_checkpoint(tmp_path / "src", tmp_path / "native")
    assert NativeSource(tmp_path / "native").dtype("embed.weight") == "F32"
    export_checkpoint(tmp_path / "native", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == checkpoint_files(tmp_path / "src")


def test_rows_of_sources_are_rows_of_tensors(tmp_path, full_released, full_native):
    """What a rank reads for itself equals a slice of the whole, in every source and storage."""
    import_checkpoint(full_released, tmp_path / "kept", storage="source")
    whole = load_released(full_released)
    sources = [
        ReleasedSource(full_released, full_config()),
        NativeSource(full_native),
        NativeSource(tmp_path / "kept"),
        DictSource(whole),
    ]
    names = ["layers.2.attn.wq_b.weight", "layers.1.engram.embed.weight", "layers.0.ffn.experts.w13", "norm.weight"]
    for source in sources:
        assert set(source.names()) == set(whole)
        for name in names:
            size = source.shape(name)[0]
            assert source.shape(name) == tuple(whole[name].shape)
            assert same_bits(source.read(name), whole[name])
            for rows in (slice(0, 1), slice(1, size), slice(size // 2, size - 1)):
                assert same_bits(source.read(name, rows), whole[name][rows].contiguous())
    with pytest.raises(ValueError, match="rows"):
        sources[0].read("norm.weight", slice(0, 10**6))


def test_state_dict_conversion_is_a_bijection(full_released):
    state = load_released(full_released)
    released = native_to_released(state, full_config())
    assert set(released) == {
        n for n in SafetensorsFolder(full_released).tensors if ".scale" not in n and not is_carried(n)
    }
    back = released_to_native(released, full_config())
    assert all(same_bits(back[name], state[name]) for name in state)


def test_persistent_buffers_and_constants_survive(tmp_path, full_released):
    """Router biases of both modalities, and the digest of the Engram hash constants."""
    import_checkpoint(full_released, tmp_path / "native", hash_digest="abc")
    native, source = NativeSource(tmp_path / "native"), SafetensorsFolder(full_released)
    for name in ("layers.3.ffn.gate.bias", "layers.3.ffn.gate.bias_vl"):
        assert same_bits(native.read(name), source.read(name)) and native.dtype(name) == "F32"
    assert native.record.hash_digest == "abc"


@pytest.mark.parametrize("dtype", ["U8", "F8_E8M0", "F32"])
def test_scale_dtype_matrix(tmp_path, full_released, dtype):
    """Scales as bytes, E8M0 or float32 mean the same, and come back in their own dtype."""
    from megatron_dsv41.checkpoint.storage import TORCH_DTYPES
    from megatron_dsv41.ops.quant.codec import scale_as

    def change(tensors):
        for name in tensors:
            if name.endswith(".scale"):
                tensors[name] = scale_as(tensors[name].view(torch.uint8), TORCH_DTYPES[dtype])

    write_released(tmp_path / "src", full_config(), change=change)
    one, two = load_released(tmp_path / "src"), load_released(full_released)
    assert all(same_bits(one[name], two[name]) for name in one)
    import_checkpoint(tmp_path / "src", tmp_path / "native")
    export_checkpoint(tmp_path / "native", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(tmp_path / "src")


def rewrite(folder, change) -> None:
    """Edit the tensors of a released folder in one shard."""
    source = SafetensorsFolder(folder)
    tensors = {name: source.read(name) for name in source.tensors}
    change(tensors)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    write_tensors(folder, tensors, dict.fromkeys(tensors, "model-00001-of-00001.safetensors"))


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, make):
    return lambda tensors: tensors.update({name: make(tensors)})


WKV = "layers.1.engram.wkv"
BAD = {
    "missing weight": (drop("layers.3.attn_norm.weight"), r"1 missing.*\n.*layers\.3\.attn_norm\.weight"),
    "missing scale": (drop(f"{WKV}.scale"), r"scale: layers\.1\.engram\.wkv\.weight is F8_E4M3 and has no"),
    "missing carried scale": (drop("mtp.1.attn.wkv.scale"), r"mtp\.1\.attn\.wkv\.weight is F8_E4M3 and has no"),
    "missing carried tensor": (drop("mtp.1.attn_norm.weight"), r"missing: mtp\.1\.attn_norm\.weight"),
    "scale without weight": (drop(f"{WKV}.weight"), r"scale: layers\.1\.engram\.wkv\.scale has no"),
    "scale of a plain weight": (
        put("layers.0.attn_norm.scale", lambda t: torch.ones(1, dtype=torch.uint8)),
        r"belongs to layers\.0\.attn_norm\.weight, which is BF16",
    ),
    "unknown tensor": (
        put("layers.0.attn.wq_c.weight", lambda t: torch.ones(2)),
        r"1 extra.*\n.*wq_c\.weight F32 \[2\]",
    ),
    "tensor of another layer kind": (
        put("layers.5.attn.compressor.wgate.weight", lambda t: torch.ones(64, 80)),
        r"extra: layers\.5\.attn\.compressor\.wgate\.weight",
    ),
    "transposed": (
        put("layers.2.attn.compressor.wkv.weight", lambda t: t["layers.2.attn.compressor.wkv.weight"].T.contiguous()),
        r"misshapen: layers\.2\.attn\.compressor\.wkv\.weight is \[80, 64\], the config says \[64, 80\]",
    ),
    "unpacked experts": (
        put("layers.0.ffn.experts.0.w1.weight", lambda t: torch.zeros(36, 80, dtype=torch.int8)),
        r"misshapen: layers\.0\.ffn\.experts\.0\.w1\.weight is \[36, 80\], the config says \[36, 40\]",
    ),
    "scale by rows": (
        put(f"{WKV}.scale", lambda t: torch.ones(t[f"{WKV}.weight"].shape[0], 8, dtype=torch.uint8)),
        r"misshapen: layers\.1\.engram\.wkv\.scale",
    ),
    "integer weight": (
        put("norm.weight", lambda t: torch.ones(80, dtype=torch.int64)),
        r"dtype: norm\.weight is I64",
    ),
    "bfloat16 scale": (
        put(f"{WKV}.scale", lambda t: torch.ones(t[f"{WKV}.scale"].shape, dtype=torch.bfloat16)),
        r"scale: layers\.1\.engram\.wkv\.scale is BF16",
    ),
    "NaN scale": (
        put(f"{WKV}.scale", lambda t: torch.full(t[f"{WKV}.scale"].shape, 255, dtype=torch.uint8)),
        r"model-00001-of-00001\.safetensors: layers\.1\.engram\.wkv\.scale: .* NaN",
    ),
    "bytes as numbers": (
        put(f"{WKV}.scale", lambda t: t[f"{WKV}.scale"].view(torch.uint8).float()),
        r"layers\.1\.engram\.wkv\.weight: .* not powers of two",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_checkpoints_are_refused_and_nothing_is_written(tmp_path, full_released, kind):
    change, message = BAD[kind]
    shutil.copytree(full_released, tmp_path / "src")
    rewrite(tmp_path / "src", change)
    with pytest.raises(ValueError, match=message):
        import_checkpoint(tmp_path / "src", tmp_path / "native")
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


def test_first_ten_of_many_deviations_are_listed(tmp_path, full_released):
    shutil.copytree(full_released, tmp_path / "src")
    rewrite(tmp_path / "src", lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith("layers.7.ffn.")])
    with pytest.raises(ValueError) as error:
        import_checkpoint(tmp_path / "src", tmp_path / "native")
    lines = str(error.value).split("\n")
    assert len(lines) == 12 and "missing" in lines[0] and "more" in lines[-1]


def test_carried_parts_may_be_absent_as_a_whole(tmp_path, full_released):
    shutil.copytree(full_released, tmp_path / "src")
    rewrite(tmp_path / "src", lambda tensors: [tensors.pop(n) for n in list(tensors) if is_carried(n)])
    import_checkpoint(tmp_path / "src", tmp_path / "native")
    export_checkpoint(tmp_path / "native", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(tmp_path / "src")


def test_wrong_state_is_refused(tmp_path, full_released):
    state = load_released(full_released)
    state["layers.0.attn.wkv.weight"] = state["layers.0.attn.wkv.weight"].T
    del state["norm.weight"]
    with pytest.raises(ValueError, match="1 misshapen") as error:
        save_released(tmp_path / "out", state, full_config())
    assert "missing: norm.weight" in str(error.value) and not (tmp_path / "out").exists()


def test_non_finite_weights_are_not_quantized(tmp_path, full_released):
    state = load_released(full_released)
    state["layers.0.attn.wkv.weight"][3, 3] = float("nan")
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.wkv\.weight .*non-finite"):
        save_released(tmp_path / "out", state, full_config())
    assert list(tmp_path.iterdir()) == []


def test_output_folder_must_be_empty(tmp_path, full_released):
    (tmp_path / "out").mkdir()
    import_checkpoint(full_released, tmp_path / "out")
    with pytest.raises(ValueError, match="is not empty"):
        import_checkpoint(full_released, tmp_path / "out")
    with pytest.raises(ValueError, match="is not empty"):
        export_checkpoint(tmp_path / "out", full_released)


def test_disk_too_small_is_refused_before_writing(tmp_path, full_released):
    """Engram tables as large as the free space, sparse on disk."""
    config = full_config()
    rows = shutil.disk_usage(tmp_path).free // config.engram_head_dim  # in bf16 each table alone fills the disk twice
    config = dataclasses.replace(config, engram_num_embeddings=(rows, rows))
    shutil.copytree(full_released, tmp_path / "src")
    try:
        for layer in config.engram_layer_ids:
            name = f"layers.{layer}.engram.embed"
            grow(tmp_path / "src" / SafetensorsFolder(full_released).info(f"{name}.weight").file, name, rows)
    except OSError as error:
        pytest.skip(f"this file system holds no such sparse file: {error}")
    (tmp_path / "src" / "config.json").write_text(json.dumps(config.to_hf()))
    with pytest.raises(OSError, match="GB free"):
        import_checkpoint(tmp_path / "src", tmp_path / "native")
    assert not list(tmp_path.glob("native*"))


def grow(path, prefix: str, rows: int) -> None:
    """Give the table of a shard more rows, without writing them."""
    from megatron_dsv41.checkpoint.safetensors_io import Shard, TensorSpec, read_header

    header = read_header(path)
    specs = [TensorSpec(t.name, t.dtype, (rows, *t.shape[1:]) if prefix in t.name else t.shape) for t in header.tensors]
    with path.open("wb") as file:
        text = Shard(path.name, tuple(specs), header.metadata).header()
        file.write(text)
        os.truncate(path, len(text) + sum(spec.num_bytes for spec in specs))


def test_memory_that_cannot_hold_one_piece_is_refused(tmp_path, full_released):
    with pytest.raises(ValueError, match="max_memory"):
        import_checkpoint(full_released, tmp_path / "native", effort=Effort(max_memory=1000))


def test_unfinished_native_folder_is_not_a_checkpoint(tmp_path, full_native):
    shutil.copytree(full_native, tmp_path / "native")
    (tmp_path / "native" / NATIVE).unlink()
    with pytest.raises(ValueError, match="tensors do not fit"):
        export_checkpoint(tmp_path / "native", tmp_path / "out")
    assert (tmp_path / "native" / INDEX).exists() or (tmp_path / "native" / "model.safetensors").exists()
