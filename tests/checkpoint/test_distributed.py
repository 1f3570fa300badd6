"""Distributed checkpoints: any layout in, any layout out, every rank reading what it owns and nothing else."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_dsv41.checkpoint.convert import export_checkpoint, import_checkpoint, load_released, open_source
from megatron_dsv41.checkpoint.distributed import DistributedSource, DistributedTensors, lost_files
from megatron_dsv41.checkpoint.distributed_writer import DistributedWriter
from megatron_dsv41.checkpoint.mapping import bind
from megatron_dsv41.checkpoint.regions import shape_of
from megatron_dsv41.checkpoint.shares import Layout
from megatron_dsv41.checkpoint.sources import ReleasedSource
from megatron_dsv41.checkpoint.storage import num_bytes
from megatron_dsv41.config import DSV41Config
from megatron_dsv41.testing.released import folder_bytes, full_config, write_released

LAYERS = tuple(range(8))
LAYOUTS = {
    "tp2": Layout(stages=(LAYERS,), tp=2),
    "pp4": Layout(stages=(LAYERS[:2], LAYERS[2:3], LAYERS[3:7], LAYERS[7:])),
    "vpp2": Layout(stages=((0, 1, 4, 5), (2, 3, 6, 7))),
    "ep4": Layout(stages=(LAYERS,), ep=4),
    "etp2": Layout(stages=(LAYERS,), tp=2, ep=2, etp=2),
    "engram3": Layout(stages=(LAYERS,), engram=3),
    "all": Layout(stages=(LAYERS[:5], LAYERS[5:]), tp=2, ep=4, engram=3),
}


def even_config() -> DSV41Config:
    """`full_config` with as many experts as layouts here divide by."""
    return dataclasses.replace(full_config(), n_routed_experts=4)


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("even") / "released"
    write_released(folder, even_config())
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_has_one_owner(name):
    layout, bindings = LAYOUTS[name], bind(even_config())
    counts = {binding.native: torch.zeros(binding.shape, dtype=torch.int8) for binding in bindings}
    for rank in range(layout.num_ranks):
        for binding, region in layout.owned(rank, bindings):
            counts[binding.native][tuple(slice(axis.start, axis.stop) for axis in region)] += 1
    assert all(bool((count == 1).all()) for count in counts.values())


@pytest.mark.parametrize("name", ["tp2", "pp4", "ep4", "engram3", "all"])
def test_round_trip_through_a_layout_gives_the_same_bytes(tmp_path, released, name):
    import_checkpoint(released, tmp_path / "there", layout=LAYOUTS[name])
    source = open_source(tmp_path / "there")
    assert isinstance(source, DistributedSource)
    whole = load_released(released)
    for key, value in whole.items():
        assert torch.equal(source.read(key), value), key
    export_checkpoint(tmp_path / "there", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(released)


def test_each_rank_reads_only_what_it_owns(released):
    """Bytes from the files: the stored parts, and the blocks of scales that a cut divides. No rank reads the model."""
    layout, bindings = LAYOUTS["all"], bind(even_config())
    owned: list[int] = []
    for rank in range(layout.num_ranks):
        source = ReleasedSource(released, even_config())
        before = 0
        for binding, region in layout.owned(rank, bindings):
            source.read(binding.native, *(slice(axis.start, axis.stop) for axis in region))
            read, before = source.folder.bytes_read - before, source.folder.bytes_read
            stored = sum(source.folder.info(name).num_bytes for name in source.stored_names(binding))
            share = math.prod(shape_of(region)) / math.prod(binding.shape)
            # Two cuts fall inside blocks of at most 32 rows or columns of a matrix, on either side.
            slack = 1.0 if binding.storage.format else 0.0
            edge = 64 * max(binding.part_shape) * slack * (binding.via.num_parts * share if binding.via.lead else 1)
            assert read <= stored * share + edge, (rank, binding.native)
        owned.append(before)
    everything = sum(info.num_bytes for info in source.folder.tensors.values())
    assert max(owned) < 0.5 * everything and sum(owned) < 1.2 * everything


def test_region_of_a_stored_chunk_is_read_without_the_rest(tmp_path):
    state = {"table": torch.randn(4096, 16), "odd": torch.randn(6, 5).T, "number": torch.tensor(3.0)}
    save(state, storage_writer=FileSystemWriter(tmp_path / "c"), no_dist=True)
    source = DistributedTensors(tmp_path / "c", list(state))
    assert torch.equal(source.read("table", slice(100, 110), slice(3, 7)), state["table"][100:110, 3:7])
    assert source.bytes_read == 10 * 4 * 4
    assert torch.equal(source.read("odd", slice(1, 3)), state["odd"][1:3])
    assert source.read("number") == state["number"]


def test_lost_and_truncated_parts_are_named(tmp_path, released):
    import_checkpoint(released, tmp_path / "there", layout=LAYOUTS["tp2"])
    assert lost_files(tmp_path / "there") == []
    part = sorted((tmp_path / "there").glob("*.distcp"))[1]
    data = part.read_bytes()
    part.write_bytes(data[:-5000])
    with pytest.raises(ValueError, match=rf"{part.name} has {len(data) - 5000} bytes of "):
        DistributedSource(tmp_path / "there")
    part.unlink()
    with pytest.raises(ValueError, match=f"{part.name} is missing"):
        export_checkpoint(tmp_path / "there", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_files_are_cut_by_size(released, monkeypatch):
    monkeypatch.setattr("megatron_dsv41.checkpoint.distributed_writer.FILE_BYTES", 100_000)
    source = ReleasedSource(released, even_config())
    writer = DistributedWriter(source, bind(even_config()), LAYOUTS["tp2"])
    sizes = [sum(num_bytes("BF16", shape_of(region)) for _, region in file) for file in writer.files]
    assert len(sizes) > 10 and sum(size > 200_000 for size in sizes) <= 2  # a chunk may be larger than a file


def test_quantized_storage_has_no_layout(tmp_path, released):
    with pytest.raises(ValueError, match="storage must be 'config'"):
        import_checkpoint(released, tmp_path / "there", layout=LAYOUTS["tp2"], storage="source")
