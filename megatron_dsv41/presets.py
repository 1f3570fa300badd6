"""Named model shapes. Each is a function that returns a complete `DSV41Config`."""

from __future__ import annotations

from megatron_dsv41.config import DSV41Config

RELEASED_VISION = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 32,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "patch_size": 14,
    "rope_theta": 10000.0,
    "downsample_ratio": 3,
    "max_image_tokens": 1024,
    "min_pixels": 295936,
    "max_wh_ratio": None,
}
RELEASED_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


def flash() -> DSV41Config:
    """The release: DeepSeek-V4.1-Flash, 763.2 B parameters (SPEC 1-3)."""
    return DSV41Config(vision=RELEASED_VISION, quantization=RELEASED_QUANTIZATION)


def proxy() -> DSV41Config:
    """Eight layers at the release's width with 16 experts: every mechanism on one 141 GB GPU (6.97 B parameters)."""
    return DSV41Config(
        vocab_size=32768,
        num_hidden_layers=8,
        compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1),
        kv_source_layer_ids=(2, 4),
        index_source_layer_ids=(2, 4, 6),
        candidate_source_layer_id=4,
        n_routed_experts=16,
        engram_layer_ids=(1,),
        engram_num_embeddings=(2403994,),
        engram_vocab_size=100000,
        engram_compressed_vocab_size=32768,
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        image_token_id=3,
    )


def tiny() -> DSV41Config:
    """Eight narrow layers with every mechanism alive; trains on two CPU cores."""
    return DSV41Config(
        vocab_size=2048,
        hidden_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=8,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=64,
        o_lora_rank=32,
        o_groups=4,
        rope_original_max_position_embeddings=256,
        max_position_embeddings=4096,
        n_routed_experts=8,
        num_experts_per_tok=2,
        sliding_window=16,
        compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1),
        kv_source_layer_ids=(2, 4),
        index_source_layer_ids=(2, 4, 6),
        index_n_heads=4,
        index_head_dim=32,
        index_topk=16,
        candidate_source_layer_id=4,
        candidate_topk_blocks=8,
        candidate_block_size=4,
        engram_layer_ids=(1, 3),
        engram_num_embeddings=(6126, 6332),
        engram_n_heads=2,
        engram_head_dim=32,
        engram_vocab_size=1000,
        engram_compressed_vocab_size=2048,
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        image_token_id=3,
        dtype="float32",
    )


PRESETS = {"flash": flash, "proxy": proxy, "tiny": tiny}
