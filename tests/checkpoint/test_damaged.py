"""Damaged input: an error that names file and tensor, nothing written, whatever the storage asked for."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from megatron_dsv41.checkpoint.convert import export_checkpoint, import_checkpoint
from megatron_dsv41.checkpoint.finite import num_non_finite
from megatron_dsv41.checkpoint.safetensors_io import INDEX, SafetensorsFolder
from megatron_dsv41.testing.released import folder_bytes, full_config, write_tensors

WEIGHT = "layers.2.attn.wq_b.weight"


def put_bytes(folder: Path, name: str, position: int, data: bytes) -> None:
    info = SafetensorsFolder(folder).info(name)
    with (folder / info.file).open("r+b") as file:
        file.seek(info.offset + position)
        file.write(data)


def edit_index(folder: Path, **changes: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changes
    (folder / INDEX).write_text(json.dumps(index))


def add_tensor(folder: Path, file: str, name: str) -> None:
    """Write a shard anew with one tensor more."""
    source = SafetensorsFolder(folder)
    tensors = {info.name: source.read(info.name) for info in source.headers[file].tensors}
    text = (folder / INDEX).read_text()
    write_tensors(folder, tensors | {name: torch.ones(3)}, dict.fromkeys([*tensors, name], file))
    (folder / INDEX).write_text(text)


def truncate(folder: Path, file: str) -> None:
    os.truncate(folder / file, (folder / file).stat().st_size - 1)


def flip_header(folder: Path, file: str) -> None:
    with (folder / file).open("r+b") as stream:
        stream.seek(8 + (folder / file).read_bytes()[8:].index(b"data_offsets") + 15)
        byte = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte[0] ^ 1]))


def same_name_twice(folder: Path, file: str) -> None:
    add_tensor(folder, file, "layers.7.attn_norm.weight")


DAMAGE = {
    "truncated shard": (truncate, "{file}: truncated"),
    "flipped header byte": (flip_header, "{file}: corrupt header: layers.2."),
    "name in two shards": (same_name_twice, "layers.7.attn_norm.weight is in two shards, {file} and "),
    "tensor that no index lists": (
        lambda folder, file: add_tensor(folder, file, "layers.2.extra"),
        "{file}: holds layers.2.extra, but the index does not list it",
    ),
    "index pointing nowhere": (lambda folder, file: edit_index(folder, **{WEIGHT: "gone.safetensors"}), "gone.safeten"),
    "index naming another shard": (
        lambda folder, file: edit_index(folder, **{WEIGHT: "model-00001-of-00018.safetensors"}),
        "{file}: holds " + WEIGHT + ", but the index says",
    ),
    "shard lost": (lambda folder, file: (folder / file).unlink(), "missing: {file}"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_files_are_named_and_nothing_is_written(tmp_path, full_released, kind):
    damage, message = DAMAGE[kind]
    shutil.copytree(full_released, tmp_path / "src")
    file = SafetensorsFolder(full_released).info(WEIGHT).file
    damage(tmp_path / "src", file)
    for convert in (import_checkpoint, export_checkpoint):
        with pytest.raises(ValueError) as error:
            convert(tmp_path / "src", tmp_path / "out")
        assert message.format(file=file) in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


NOT_FINITE = {
    "bfloat16 NaN": ("layers.2.attn_norm.weight", b"\xc0\x7f"),
    "bfloat16 infinity": ("layers.2.attn_norm.weight", b"\x80\xff"),
    "float32 infinity": ("layers.2.hc_attn_base", b"\x00\x00\x80\x7f"),
    "E4M3 NaN": (WEIGHT, b"\xff"),
    "NaN scale": (WEIGHT.replace("weight", "scale"), b"\xff"),
    "NaN scale of an expert": ("layers.2.ffn.experts.1.w2.scale", b"\xff"),
    "NaN scale of a draft": ("mtp.0.attn.wkv.scale", b"\xff"),
    "NaN in the vision tower": ("vision.norm.weight", b"\xc0\x7f"),
}


@pytest.mark.parametrize("kind", NOT_FINITE)
def test_values_that_are_not_finite_are_named_and_nothing_is_written(tmp_path, full_released, kind):
    name, value = NOT_FINITE[kind]
    shutil.copytree(full_released, tmp_path / "src")
    put_bytes(tmp_path / "src", name, 0, value)
    file = SafetensorsFolder(full_released).info(name).file
    for convert, storage in (
        (import_checkpoint, "config"),
        (import_checkpoint, "source"),
        (export_checkpoint, "source"),
        (export_checkpoint, "bf16"),
    ):
        with pytest.raises(ValueError) as error:
            convert(tmp_path / "src", tmp_path / "out", storage=storage)
        assert f"{file}: {name}: 1 of" in str(error.value), storage
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_they_can_be_let_through(tmp_path, full_released):
    shutil.copytree(full_released, tmp_path / "src")
    for name in ("layers.2.attn_norm.weight", "vision.norm.weight"):
        put_bytes(tmp_path / "src", name, 0, b"\xc0\x7f")
    import_checkpoint(tmp_path / "src", tmp_path / "native", finite=False)
    with pytest.raises(ValueError, match=r"layers\.2\.attn_norm\.weight: 1 of 80 values are NaN"):
        export_checkpoint(tmp_path / "native", tmp_path / "back")
    export_checkpoint(tmp_path / "native", tmp_path / "back", finite=False)
    assert folder_bytes(tmp_path / "back") == folder_bytes(tmp_path / "src")


def test_a_trained_value_that_is_not_finite_is_not_exported(tmp_path, full_released):
    from megatron_dsv41.checkpoint.convert import load_released, save_released

    state = load_released(full_released)
    state["layers.3.attn_norm.weight"][5] = float("inf")
    for storage in ("bf16", "released"):
        with pytest.raises(ValueError, match=r"layers\.3\.attn_norm\.weight .*NaN or infinite"):
            save_released(tmp_path / "out", state, full_config(), storage=storage)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_counts_agree_with_torch(dtype):
    count = 256 if dtype is torch.float8_e4m3fn else 70_000
    bits = torch.arange(count * dtype.itemsize, dtype=torch.int64) * 2_654_435_761 >> 11
    values = bits.to(torch.uint8).view(dtype)
    assert num_non_finite(values) == int((~values.double().isfinite()).sum())


def test_integers_are_finite_and_scale_bytes_of_255_are_not():
    assert num_non_finite(torch.full((5,), -1, dtype=torch.int8)) == 0
    assert num_non_finite(torch.full((5,), 255, dtype=torch.uint8)) == 0
    assert num_non_finite(torch.full((5,), 255, dtype=torch.uint8), is_scale=True) == 5
