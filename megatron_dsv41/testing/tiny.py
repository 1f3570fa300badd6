"""A model small enough for exhaustive tests, with every mechanism alive."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.modules.transformer import Transformer
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.phase import Phase

# The tiny model, as wide as the kernels need it: heads of 512 channels, index heads of 128, a window of 128.
KERNEL_WIDTHS: dict[str, Any] = {
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_attention_heads": 16,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 4,
    "sliding_window": 128,
    "n_routed_experts": 8,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 64,
    "candidate_topk_blocks": 16,
    "engram_head_dim": 64,
    "initializer_range": 0.02,
}


def tiny_config(**changes: object) -> DSV41Config:
    """Eight layers: SWA, SWA, Full r2, Reuse, Full r1 + pool, Reuse, Reindex, Reuse; Engram at 1 and 3; fp32."""
    config = DSV41Config(
        vocab_size=96,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=8,
        num_attention_heads=4,
        head_dim=32,
        qk_rope_head_dim=8,
        q_lora_rank=24,
        o_lora_rank=8,
        o_groups=2,
        rope_original_max_position_embeddings=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
        compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1),
        kv_source_layer_ids=(2, 4),
        index_source_layer_ids=(2, 4, 6),
        index_n_heads=2,
        index_head_dim=32,
        index_topk=4,
        candidate_source_layer_id=4,
        candidate_topk_blocks=3,
        candidate_block_size=4,
        engram_layer_ids=(1, 3),
        engram_num_embeddings=(834, 1020),
        engram_n_heads=2,
        engram_head_dim=32,
        engram_vocab_size=120,
        engram_compressed_vocab_size=96,
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        image_token_id=95,
        dtype="float32",
        initializer_range=0.1,
    )
    return config.with_overrides(changes)


def tiny_model(
    config: DSV41Config, *, seed: int = 0, phase: Phase | None = None, ops: Ops | None = None
) -> Transformer:
    """A Transformer with an identity token map and weights that keep every path active (sinks, biases, norms too)."""
    torch.manual_seed(seed)
    model = Transformer(config, identity_map(config), phase=phase, ops=ops)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("attn_sink", "base", "scale", "gate.bias", "gate.bias_vl", "norm.weight")):
                tensor.add_(torch.randn_like(tensor) * 0.3)
    return model


def identity_map(config: DSV41Config) -> Tensor:
    """Every raw id is its own class."""
    return torch.arange(config.vocab_size) % config.engram_compressed_vocab_size


def without_rounding(phase: Phase | None = None) -> Phase:
    """The phase with every fake quantization off: a smooth function between selection boundaries."""
    return dataclasses.replace(phase or Phase(), window_kv_fp8=False, main_kv_fp4=False, index_mxfp4=False)
