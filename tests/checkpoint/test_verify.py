"""Verify says what is wrong or missing; compare finds every difference between two checkpoints."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from megatron_dsv41.checkpoint.convert import export_checkpoint, import_checkpoint
from megatron_dsv41.checkpoint.safetensors_io import INDEX, SafetensorsFolder
from megatron_dsv41.checkpoint.shares import Layout
from megatron_dsv41.checkpoint.verify import compare, verify


def flip(folder, name: str, position: int, value: int) -> None:
    """Overwrite one byte of a stored tensor."""
    info = SafetensorsFolder(folder, partial=True).info(name)
    with (folder / info.file).open("r+b") as file:
        file.seek(info.offset + position)
        file.write(bytes([value]))


def test_whole_checkpoints_are_ok(full_released, full_native):
    for folder in (full_released, full_native):
        report = verify(folder)
        assert report.ok, str(report)
        assert report.kind == ("native" if folder == full_native else "released")


@pytest.mark.parametrize(
    ("name", "position", "byte"),
    [
        ("layers.2.attn.wq_b.scale", 3, 255),  # E8M0 NaN
        ("layers.2.attn.wq_b.weight", 7, 0xFF),  # E4M3 NaN
        ("layers.0.attn_norm.weight", 1, 0x7F),  # a bfloat16 of exponent 255, with the byte below
        ("mtp.0.attn.wkv.scale", 0, 255),
    ],
)
def test_non_finite_values_are_found(tmp_path, full_released, name, position, byte):
    shutil.copytree(full_released, tmp_path / "src")
    flip(tmp_path / "src", name, position, byte)
    if "norm" in name:
        flip(tmp_path / "src", name, position - 1, 0x80)
    report = verify(tmp_path / "src")
    assert not report.ok
    assert [(p.kind, p.name) for p in report.problems] == [("non-finite", name)]
    assert verify(tmp_path / "src", data=False).ok


def test_partial_folder_says_what_is_missing(tmp_path, full_released):
    shutil.copytree(full_released, tmp_path / "src")
    file = SafetensorsFolder(full_released).info("layers.1.engram.wkv.weight").file
    (tmp_path / "src" / file).unlink()
    report = verify(tmp_path / "src")
    assert report.missing_files == (file,) and not report.problems and not report.ok
    assert file in str(report)
    comparison = compare(tmp_path / "src", full_released)
    assert not comparison.differences and not comparison.only_in_a
    assert "layers.1.engram.wkv.weight" in comparison.only_in_b


def test_shards_cut_off_are_all_named_and_the_others_checked(tmp_path, full_released):
    """As an interrupted download leaves them."""
    shutil.copytree(full_released, tmp_path / "src")
    files = sorted({info.file for info in SafetensorsFolder(full_released).tensors.values()})[2:5]
    for file, size in zip(files, (0, 300, 30_000), strict=True):
        os.truncate(tmp_path / "src" / file, size)
    flip(tmp_path / "src", "mtp.0.attn.wkv.scale", 0, 255)
    report = verify(tmp_path / "src")
    found = [(problem.kind, problem.name) for problem in report.problems]
    assert found == [*(("damaged", file) for file in files), ("non-finite", "mtp.0.attn.wkv.scale")]
    assert not report.ok and "truncated: 30000 bytes, the header describes" in str(report)


def test_tensors_of_another_shape_are_said_to_be(tmp_path, full_released):
    import_checkpoint(full_released, tmp_path / "cut", experts=2)
    found = {str(difference) for difference in compare(tmp_path / "cut", full_released).differences}
    assert "layers.0.ffn.gate.bias: another shape or dtype" in found


def test_names_and_pairing_are_checked(tmp_path, full_released):
    shutil.copytree(full_released, tmp_path / "src")
    config = json.loads((tmp_path / "src" / "config.json").read_text())
    config["text_config"]["q_lora_rank"] = 48
    (tmp_path / "src" / "config.json").write_text(json.dumps(config))
    report = verify(tmp_path / "src", data=False)
    assert {p.kind for p in report.problems} == {"misshapen"}
    assert any(p.name == "layers.0.attn.q_norm.weight" for p in report.problems)


def test_hash_digest_of_another_tokenizer_is_reported(tmp_path, full_released):
    import_checkpoint(full_released, tmp_path / "native", hash_digest="one")
    assert verify(tmp_path / "native", hash_digest="one").ok
    report = verify(tmp_path / "native", hash_digest="two")
    assert [p.kind for p in report.problems] == ["hash"]


def test_checksum_covers_content_and_not_the_division_into_files(tmp_path, full_released, full_native):
    export_checkpoint(full_native, tmp_path / "one", shards=10**9)
    one, two = (verify(path, checksums=True).checksum for path in (full_released, tmp_path / "one"))
    assert one == two and one is not None
    flip(tmp_path / "one", "image_end", 0, 1)
    assert verify(tmp_path / "one", checksums=True).checksum != one


def test_layouts_and_storages_compare_equal(tmp_path, full_released, full_native):
    assert compare(full_released, full_native).ok
    export_checkpoint(full_native, tmp_path / "bf16", storage="bf16")
    comparison = compare(full_native, tmp_path / "bf16")
    # Values agree; the drafts are stored otherwise, and their scales are gone.
    assert not [d for d in comparison.differences if not d.name.startswith(("mtp.", "vision."))]


def test_differences_are_listed_largest_first(tmp_path, full_released, full_native):
    shutil.copytree(full_native, tmp_path / "other")
    native = SafetensorsFolder(full_native)
    for name, value in (("layers.0.attn_norm.weight", 3.0), ("layers.7.attn_norm.weight", 100.0)):
        assert native.info(name).dtype == "BF16"
        changed = torch.tensor([value]).bfloat16().view(torch.uint8)
        for i in range(2):
            flip(tmp_path / "other", name, i, int(changed[i]))
    flip(tmp_path / "other", "mtp.0.norm.weight" if native.has("mtp.0.norm.weight") else "image_end", 0, 77)
    comparison = compare(full_released, tmp_path / "other")
    assert [d.name for d in comparison.differences[:2]] == ["layers.7.attn_norm.weight", "layers.0.attn_norm.weight"]
    assert [d.num_different for d in comparison.differences[:2]] == [1, 1]
    assert comparison.differences[2].name == "image_end (bytes)" and not comparison.ok


def test_unreadable_files_are_named(tmp_path, full_released):
    shutil.copytree(full_released, tmp_path / "src")
    (tmp_path / "src" / INDEX).write_text("{")
    with pytest.raises(ValueError, match="corrupt index"):
        verify(tmp_path / "src")


def test_distributed_folders_are_verified_and_compared(tmp_path, full_released, full_native):
    layout = Layout(stages=(tuple(range(4)), tuple(range(4, 8))), ep=3, engram=2)
    import_checkpoint(full_released, tmp_path / "there", layout=layout)
    report = verify(tmp_path / "there", checksums=True)
    assert report.ok and report.kind == "distributed", str(report)
    assert report.checksum == verify(full_native, checksums=True).checksum
    assert compare(tmp_path / "there", full_released).ok
    part = sorted((tmp_path / "there").glob("*.distcp"))[0]
    part.unlink()
    report = verify(tmp_path / "there")
    assert not report.ok and report.missing_files == (f"{part.name} is missing",)
