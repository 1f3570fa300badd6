"""What only size shows: every released name at once, and memory that does not grow with the tensors."""

from __future__ import annotations

import dataclasses
import filecmp
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dsv41 import presets
from megatron_dsv41.checkpoint.convert import export_checkpoint, import_checkpoint
from megatron_dsv41.checkpoint.mapping import released_inventory
from megatron_dsv41.checkpoint.safetensors_io import SafetensorsFolder, Shard, TensorSpec, read_header
from megatron_dsv41.cli.convert_layout import parse_layout
from megatron_dsv41.config import DSV41Config
from megatron_dsv41.testing.released import folder_bytes, full_config, write_released

pytestmark = pytest.mark.slow


def narrow_flash() -> DSV41Config:
    """Every layer, expert, draft and vision block of the release, a few channels wide."""
    flash = presets.flash()
    narrow = {"hidden_size": 64, "moe_intermediate_size": 34, "num_attention_heads": 8, "head_dim": 32}
    narrow |= {"qk_rope_head_dim": 8, "q_lora_rank": 40, "o_lora_rank": 16, "index_n_heads": 4, "index_head_dim": 32}
    narrow |= {"vocab_size": 200, "image_token_id": 199, "dspark_noise_token_id": 3, "dspark_markov_rank": 8}
    narrow |= {"engram_head_dim": 48, "engram_num_embeddings": (3001, 3002), "engram_vocab_size": 100}
    vision = {**flash.vision, "hidden_size": 32, "intermediate_size": 48}
    return flash.with_overrides(narrow | {"engram_compressed_vocab_size": 200, "vision": vision})


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("flash") / "released"
    write_released(folder, narrow_flash())
    yield folder
    shutil.rmtree(folder)


def test_names_and_shards_are_the_releases(released):
    assert set(released_inventory(narrow_flash())) == set(released_inventory(presets.flash()))
    folder = SafetensorsFolder(released)
    assert len(folder.tensors) == 96_085 and len(folder.headers) == 48


def test_quantized_storage_round_trips_byte_for_byte(tmp_path, released):
    import_checkpoint(released, tmp_path / "native", storage="source")
    export_checkpoint(tmp_path / "native", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(released)


@pytest.mark.parametrize("layout", ["", "tp=2", "pp=4", "ep=4", "engram=3", "tp=2,pp=4,ep=4,engram=3"])
def test_every_layout_round_trips_byte_for_byte(tmp_path, released, layout):
    divided = parse_layout(layout, narrow_flash()) if layout else None
    import_checkpoint(released, tmp_path / "native", layout=divided)
    export_checkpoint(tmp_path / "native", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(released)


PROGRAM = """
import sys
from pathlib import Path
from megatron_dsv41.checkpoint.convert import export_checkpoint, import_checkpoint
from megatron_dsv41.checkpoint.pieces import Effort
effort = Effort(max_memory=int(sys.argv[4]), workers=2)
convert = {"import": import_checkpoint, "export": export_checkpoint}[sys.argv[1]]
convert(sys.argv[2], sys.argv[3], effort=effort)
# Not getrusage: its maximum starts at what the process that started this one had.
(peak,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(peak) * 1024)
"""


def peak_memory(action: str, source: Path, target: Path, limit: int) -> int:
    """Largest resident set, bytes, of a process that converts with `limit` as its setting."""
    command = [sys.executable, "-c", PROGRAM, action, str(source), str(target), str(limit)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


def test_memory_stays_within_the_setting_with_all_names(tmp_path, released):
    limit = 1_250_000_000
    assert peak_memory("import", released, tmp_path / "native", limit) < limit
    assert peak_memory("export", tmp_path / "native", tmp_path / "back", limit) < limit


def test_memory_does_not_grow_with_a_table_of_8_gb(tmp_path):
    """A hole on disk; decoded whole it would need 16 GB in bfloat16. Import decodes it, export quantizes it again."""
    limit = 1_250_000_000
    config = full_config()
    rows = 8 * 10**9 // config.engram_head_dim
    write_released(tmp_path / "src", config)
    file = SafetensorsFolder(tmp_path / "src").info("layers.1.engram.embed.weight").file
    path = tmp_path / "src" / file
    header = read_header(path)
    specs = [
        TensorSpec(t.name, t.dtype, (rows, *t.shape[1:]) if "embed" in t.name else t.shape) for t in header.tensors
    ]
    text = Shard(file, tuple(specs), header.metadata).header()
    path.write_bytes(text)
    size = len(text) + sum(spec.num_bytes for spec in specs)
    os.truncate(path, size)
    config = dataclasses.replace(config, engram_num_embeddings=(rows, config.engram_num_embeddings[1]))
    (tmp_path / "src" / "config.json").write_text(json.dumps(config.to_hf()))
    try:
        assert peak_memory("import", tmp_path / "src", tmp_path / "native", limit) < limit
        assert peak_memory("export", tmp_path / "native", tmp_path / "back", limit) < limit
        assert size > 8 * 10**9 and filecmp.cmp(path, tmp_path / "back" / file, shallow=False)
    finally:
        shutil.rmtree(tmp_path)
