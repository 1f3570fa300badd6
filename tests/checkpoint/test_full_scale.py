"""What only size shows: every released name at once, and memory that does not grow with the tensors."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from megatron_dsv41 import presets
from megatron_dsv41.checkpoint.convert import export_checkpoint, import_checkpoint
from megatron_dsv41.checkpoint.mapping import released_inventory
from megatron_dsv41.checkpoint.safetensors_io import SafetensorsFolder, Shard, TensorSpec, read_header
from megatron_dsv41.config import DSV41Config
from megatron_dsv41.testing.released import folder_bytes, full_config, write_released

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("DSV41_SLOW" not in os.environ, reason="takes minutes and 2 GB of disk: set DSV41_SLOW=1"),
]


def narrow_flash() -> DSV41Config:
    """Every layer, expert, draft and vision block of the release, a few channels wide."""
    flash = presets.flash()
    narrow = {"hidden_size": 64, "moe_intermediate_size": 34, "num_attention_heads": 8, "head_dim": 32}
    narrow |= {"qk_rope_head_dim": 8, "q_lora_rank": 40, "o_lora_rank": 16, "index_n_heads": 4, "index_head_dim": 32}
    narrow |= {"vocab_size": 200, "image_token_id": 199, "dspark_noise_token_id": 3, "dspark_markov_rank": 8}
    narrow |= {"engram_head_dim": 48, "engram_num_embeddings": (3001, 3002), "engram_vocab_size": 100}
    vision = {**flash.vision, "hidden_size": 32, "intermediate_size": 48}
    return flash.with_overrides(narrow | {"engram_compressed_vocab_size": 200, "vision": vision})


@pytest.mark.parametrize("storage", ["source", "config"])
def test_all_96085_tensors_round_trip_byte_for_byte(tmp_path, storage):
    config = narrow_flash()
    assert set(released_inventory(config)) == set(released_inventory(presets.flash()))
    write_released(tmp_path / "src", config)
    assert len(SafetensorsFolder(tmp_path / "src").headers) == 48
    import_checkpoint(tmp_path / "src", tmp_path / "native", storage=storage)
    export_checkpoint(tmp_path / "native", tmp_path / "back")
    assert folder_bytes(tmp_path / "back") == folder_bytes(tmp_path / "src")


PROGRAM = """
import resource, sys
from megatron_dsv41.checkpoint.convert import export_checkpoint, import_checkpoint
from megatron_dsv41.checkpoint.pieces import Effort
effort = Effort(max_memory=int(sys.argv[4]), workers=2)
import_checkpoint(sys.argv[1], sys.argv[2], effort=effort)
export_checkpoint(sys.argv[2], sys.argv[3], effort=effort)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_memory_does_not_grow_with_a_table(tmp_path):
    """An Engram table of 400 MB, a hole on disk; decoded whole it would need 3 GB."""
    rows, limit = 10**7, 1_250_000_000
    write_released(tmp_path / "src", full_config())
    file = SafetensorsFolder(tmp_path / "src").info("layers.1.engram.embed.weight").file
    path = tmp_path / "src" / file
    header = read_header(path)
    specs = [
        TensorSpec(t.name, t.dtype, (rows, *t.shape[1:]) if "embed" in t.name else t.shape) for t in header.tensors
    ]
    text = Shard(file, tuple(specs), header.metadata).header()
    path.write_bytes(text)
    os.truncate(path, len(text) + sum(spec.num_bytes for spec in specs))
    config = dataclasses.replace(full_config(), engram_num_embeddings=(rows, full_config().engram_num_embeddings[1]))
    (tmp_path / "src" / "config.json").write_text(json.dumps(config.to_hf()))
    folders = [str(tmp_path / name) for name in ("src", "native", "back")]
    result = subprocess.run([sys.executable, "-c", PROGRAM, *folders, str(limit)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < limit
    assert (tmp_path / "back" / file).read_bytes() == path.read_bytes()
