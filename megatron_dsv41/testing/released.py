"""A small checkpoint with every kind of released tensor, random, in the release's storage and odd sizes."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron_dsv41 import presets
from megatron_dsv41.checkpoint import jobs
from megatron_dsv41.checkpoint.convert import import_checkpoint
from megatron_dsv41.checkpoint.mapping import release_shards, released_inventory
from megatron_dsv41.checkpoint.pieces import GIB, Effort
from megatron_dsv41.checkpoint.safetensors_io import INDEX, ShardWriter, TensorSpec, index_text, shards_by_file
from megatron_dsv41.checkpoint.storage import DTYPE_NAMES, TORCH_DTYPES
from megatron_dsv41.checkpoint.team import Team
from megatron_dsv41.config import DSV41Config


def full_config() -> DSV41Config:
    """tiny() with drafts, vision and quantization, and sizes that leave partial blocks everywhere."""
    return dataclasses.replace(
        presets.tiny(),
        dtype="bfloat16",
        vocab_size=70,
        image_token_id=69,
        hidden_size=80,
        moe_intermediate_size=36,
        q_lora_rank=40,
        o_lora_rank=20,
        n_routed_experts=3,
        engram_head_dim=40,
        engram_num_embeddings=(6534, 6878),
        num_nextn_predict_layers=2,
        dspark_target_layer_ids=(6, 7),
        dspark_n_routed_experts=2,
        dspark_num_experts_per_tok=1,
        dspark_markov_rank=12,
        vision=presets.RELEASED_VISION | {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48},
        quantization=presets.RELEASED_QUANTIZATION,
    )


def random_tensor(name: str, dtype: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Any value that the dtype can hold but NaN and infinity; scales stay where bfloat16 is exact."""
    count = torch.Size(shape).numel()
    if dtype == "F8_E8M0":
        return torch.randint(100, 140, shape, generator=generator).to(torch.uint8).view(torch.float8_e8m0fnu)
    if dtype in ("F8_E4M3", "I8"):
        byte = torch.randint(0, 256, (count,), generator=generator).to(torch.uint8)
        if dtype == "F8_E4M3":
            byte = torch.where((byte & 0x7F) == 0x7F, 0, byte)
        byte = torch.where(torch.arange(count) // 200 % 5 == 0, 0, byte)  # blocks of zeros
        return byte.view(TORCH_DTYPES[dtype]).reshape(shape)
    return torch.randn(shape, generator=generator).to(TORCH_DTYPES[dtype])


def write_released(
    folder: Path, config: DSV41Config, seed: int = 0, change: Callable[[dict[str, Tensor]], object] | None = None
) -> dict[str, Tensor]:
    """A random released folder; `change(tensors)` may edit the tensors before they are written."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: random_tensor(n, d, s, generator) for n, (d, s) in released_inventory(config).items()}
    if change:
        change(tensors)
    write_tensors(folder, tensors, release_shards(config, released_inventory(config)))
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "encoding").mkdir()
    (folder / "encoding" / "encoding.py").write_text("# encodes chats\n")
    return tensors


def write_tensors(folder: Path, tensors: dict[str, Tensor], files: dict[str, str]) -> None:
    """Shards and index of some tensors."""
    shards = shards_by_file([TensorSpec(n, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()], files)
    folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder, shards)
    for name, tensor in tensors.items():
        writer.write_bytes(name, 0, tensor.reshape(-1))
    writer.close()
    (folder / INDEX).write_text(index_text(shards))


def import_slowly(source: Path, target: Path, pause: float, *, together: bool = False) -> None:
    """An import that waits before every write and notes its progress at once: to be killed in the middle.

    together: as one of the ranks of the default process group.
    """
    write = ShardWriter.write_bytes

    def slow(self: ShardWriter, name: str, start: int, data: Tensor) -> None:
        time.sleep(pause)
        write(self, name, start, data)

    ShardWriter.write_bytes = slow
    jobs.SYNC_SECONDS = 0.0
    team = Team.of_world() if together else Team()
    import_checkpoint(source, target, effort=Effort(max_memory=8 * GIB, workers=2), team=team)


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
