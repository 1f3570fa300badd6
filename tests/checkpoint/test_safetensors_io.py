"""Folders: the index is the authority, every inconsistency names its file, writing is exact."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dsv41.checkpoint.safetensors_io import (
    INDEX,
    SINGLE,
    SafetensorsFolder,
    Shard,
    ShardWriter,
    TensorSpec,
    read_header,
    shards_by_size,
    write_at,
)

TENSORS = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.arange(6).to(torch.bfloat16), "c": torch.zeros(0, 5)}


@pytest.fixture
def folder(tmp_path):
    """Two shards and an index."""
    save_file({"a": TENSORS["a"]}, tmp_path / "x-1.safetensors")
    save_file({"b": TENSORS["b"], "c": TENSORS["c"]}, tmp_path / "x-2.safetensors")
    weight_map = {"a": "x-1.safetensors", "b": "x-2.safetensors", "c": "x-2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def edit_index(folder, **changes):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changes
    (folder / INDEX).write_text(json.dumps(index))


def test_reads_tensors_and_rows(folder):
    opened = SafetensorsFolder(folder)
    for name, tensor in TENSORS.items():
        assert torch.equal(opened.read(name), tensor)
    assert torch.equal(opened.read("a", range(1, 3)), TENSORS["a"][1:3])
    assert opened.read("a", range(2, 2)).shape == (0, 4)


def test_reads_what_the_package_cannot(tmp_path):
    """E8M0 scales and packed FP4."""
    specs = (TensorSpec("s", "F8_E8M0", (2, 3)), TensorSpec("w", "I8", (2, 4)), TensorSpec("e", "F8_E4M3", (3,)))
    writer = ShardWriter(tmp_path, [Shard(SINGLE, specs)])
    scales = torch.arange(120, 126, dtype=torch.uint8).reshape(2, 3).view(torch.float8_e8m0fnu)
    writer.write_rows("s", 0, scales)
    writer.write_rows("w", 0, torch.arange(-4, 4, dtype=torch.int8).reshape(2, 4))
    writer.write_rows("e", 0, torch.tensor([1.0, 448, -0.5]).to(torch.float8_e4m3fn))
    writer.close()
    opened = SafetensorsFolder(tmp_path)
    assert torch.equal(opened.read("s").view(torch.uint8), scales.view(torch.uint8))
    assert opened.read("w").tolist() == [[-4, -3, -2, -1], [0, 1, 2, 3]]
    assert opened.read("e").float().tolist() == [1.0, 448.0, -0.5]


def test_writes_what_the_package_writes(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs.safetensors"
    ours.mkdir()
    save_file(TENSORS, theirs, metadata={"format": "pt"})
    header = read_header(theirs)
    shard = Shard(SINGLE, tuple(TensorSpec(t.name, t.dtype, t.shape) for t in header.tensors), header.metadata)
    writer = ShardWriter(ours, [shard])
    writer.write_rows("a", 1, TENSORS["a"][1:])  # any order
    writer.write_rows("b", 0, TENSORS["b"])
    writer.write_rows("a", 0, TENSORS["a"][:1])
    writer.close()
    assert (ours / SINGLE).read_bytes() == theirs.read_bytes()
    assert torch.equal(load_file(ours / SINGLE)["a"], TENSORS["a"])


def test_shards_by_size():
    specs = [TensorSpec(name, "F32", (n,)) for name, n in (("a", 10), ("b", 10), ("c", 100), ("d", 1))]
    files = [[spec.name for spec in shard.tensors] for shard in shards_by_size(specs, 100)]
    assert files == [["a", "b"], ["c"], ["d"]]
    assert [s.file for s in shards_by_size(specs[:2], 100)] == [SINGLE]


def test_writer_refuses_other_shapes_and_dtypes(tmp_path):
    writer = ShardWriter(tmp_path, [Shard(SINGLE, (TensorSpec("a", "F32", (3, 4)),))])
    for rows in (torch.zeros(1, 5), torch.zeros(1, 4, dtype=torch.bfloat16), torch.zeros(4, 4)):
        with pytest.raises(ValueError, match="a"):
            writer.write_rows("a", 0, rows)


def test_truncated_file_is_named(folder):
    os.truncate(folder / "x-1.safetensors", (folder / "x-1.safetensors").stat().st_size - 1)
    with pytest.raises(ValueError, match=r"x-1\.safetensors: truncated"):
        SafetensorsFolder(folder)


@pytest.mark.parametrize("size", [0, 5, 20])
def test_file_truncated_inside_its_header(folder, size):
    os.truncate(folder / "x-2.safetensors", size)
    with pytest.raises(ValueError, match=r"x-2\.safetensors: not a safetensors file or truncated"):
        SafetensorsFolder(folder)


def test_trailing_bytes_are_refused(folder):
    with (folder / "x-1.safetensors").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ValueError, match="longer than its header says"):
        SafetensorsFolder(folder)


def test_every_flipped_header_byte_is_an_error_or_changes_only_names(tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / SINGLE)
    original = (tmp_path / SINGLE).read_bytes()
    length = 8 + int.from_bytes(original[:8], "little")
    refused = 0
    for position in range(length):
        broken = bytearray(original)
        broken[position] ^= 0x15
        (tmp_path / SINGLE).write_bytes(broken)
        try:
            tensors = SafetensorsFolder(tmp_path).tensors
        except ValueError as error:
            assert SINGLE in str(error)
            refused += 1
        else:
            (info,) = tensors.values()
            assert info.num_bytes == 48
    assert refused > length * 0.6


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../x"}}'])
def test_corrupt_index_is_named(folder, text):
    (folder / INDEX).write_text(text)
    with pytest.raises(ValueError, match="corrupt index"):
        SafetensorsFolder(folder)


def test_index_pointing_nowhere(folder):
    edit_index(folder, d="x-3.safetensors")
    with pytest.raises(ValueError, match=r"missing: x-3\.safetensors \(1 tensors\)"):
        SafetensorsFolder(folder)
    partial = SafetensorsFolder(folder, partial=True)
    assert partial.missing_files == ("x-3.safetensors",) and partial.missing_names == {"d"}
    with pytest.raises(ValueError, match="d .its shard is missing"):
        partial.read("d")


def test_index_names_a_tensor_that_its_shard_has_not(folder):
    edit_index(folder, d="x-2.safetensors")
    with pytest.raises(ValueError, match=r"not in their shards: d \(x-2\.safetensors\)"):
        SafetensorsFolder(folder)


def test_shard_holds_a_tensor_that_the_index_has_not(folder):
    save_file({"a": TENSORS["a"], "extra": TENSORS["b"]}, folder / "x-1.safetensors")
    with pytest.raises(ValueError, match=r"x-1\.safetensors: holds extra, but the index does not list it"):
        SafetensorsFolder(folder)


def test_name_in_two_shards(folder):
    save_file({"a": TENSORS["a"], "b": TENSORS["b"]}, folder / "x-1.safetensors")
    with pytest.raises(ValueError, match="b"):
        SafetensorsFolder(folder)


def test_shards_without_index_are_not_a_checkpoint(folder):
    (folder / INDEX).unlink()
    with pytest.raises(ValueError, match=r"has neither .* x-1\.safetensors, x-2\.safetensors but no index"):
        SafetensorsFolder(folder)


def test_full_disk_says_what_to_do(tmp_path):
    with open("/dev/full", "wb", buffering=0) as file, pytest.raises(OSError, match="no space left .* run the same"):
        write_at(file.fileno(), memoryview(b"x"), 0, tmp_path / "f")
