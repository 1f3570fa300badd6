"""The dial: one depth gives a whole model and how it is trained. Every rule is here, and every constant is a setting.

With the defaults, depth 40 is the release. Small ladders change constants and keep the rules:

    ladder:  width = width_per_layer x depth, so that parameters grow as depth^3
             half of the layers are encoder, half decoder (CED)
    encoder: two SWA layers, then groups of a Full (ratio 2) layer and Reuse layers
    decoder: one Full (ratio 1) layer that makes the pool; a Reindex layer every four, Reuse between them
    Engram:  after layer 1 and at 35 % of the depth; rows grow as depth^3 too
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from megatron_dsv41.config import DSV41Config

WINDOW_LAYERS = 2
ENCODER_GROUP = 6  # layers of the release that share one compressed cache
REINDEX_EVERY = 4
ENGRAM_FIRST, ENGRAM_SECOND = 1, 0.35
LEAST_DEPTH = 8  # the fewest layers with every kind of layer in each half
MAY_BE_ZERO = ("engram_rows", "batch_exponent", "warmup", "min_lr", "decay_from")
DIALLED = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank"),
    *("o_lora_rank", "o_groups", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
    *("sliding_window", "compress_ratios", "kv_source_layer_ids", "index_source_layer_ids", "index_n_heads"),
    *("index_head_dim", "index_topk", "candidate_source_layer_id", "candidate_topk_blocks", "candidate_block_size"),
    *("hc_mult", "engram_layer_ids", "engram_num_embeddings", "engram_vocab_size", "engram_n_heads"),
    *("engram_head_dim", "engram_max_ngram_size", "num_nextn_predict_layers", "dspark_target_layer_ids"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Constants of the dial. The defaults give the release at depth 40 (SPEC 2.2, 17).

    Ratios are to the hidden size unless said otherwise. ValueError for a constant that cannot be.
    """

    # Width
    width_per_layer: float = 128
    width_multiple: int = 32
    head_dim: int = 512
    rope_head_dim: int = 64
    query_width: float = 6.4  # heads x head_dim; the number of heads is rounded to a multiple of o_groups
    o_groups: int = 8
    q_lora: float = 0.25
    o_lora: float = 0.2
    # Experts: their number is constant, so that all rungs are equally sparse
    expert_width: float = 0.45
    experts: int = 384
    experts_per_token: int = 6
    # CSA2
    csa2: Literal["published", "no-pool", "no-reindex", "window"] = "published"
    window: int = 128
    index_heads: float = 0.5  # of the attention heads
    index_head_dim: int = 128
    index_topk: int = 512
    pool_blocks: int = 2048
    pool_block_size: int = 8
    # mHC
    streams: int = 4
    # Engram; rows per column start at engram_rows x depth^3, 0: no Engram
    engram_rows: float = 250
    engram_heads: int = 8
    engram_head_dim: int = 256
    engram_ngram: int = 4
    # Learning rate: lr x (depth / lr_at_depth)^lr_exponent. Width grows with depth: this is 1 / width
    lr: float = 2.6e-4
    lr_at_depth: int = 40
    lr_exponent: float = -1.0
    # Global batch: batch_tokens x (tokens / batch_at_tokens)^batch_exponent
    batch_tokens: float = 100_663_296
    batch_at_tokens: float = 45e12
    batch_exponent: float = 0.5
    # Shares of the run, and of the peak rate
    warmup: float = 0.02
    decay_from: float = 28 / 45
    decay_to: float = 40 / 45
    min_lr: float = 0.1
    # Points of validation, evenly spaced; the run's length is rounded up to a multiple of them
    evals: int = 4
    checkpoints: int = 2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str) or field.name == "lr_exponent":
                continue
            if value < 0 or (value == 0 and field.name not in MAY_BE_ZERO):
                least = "not be negative" if field.name in MAY_BE_ZERO else "be positive"
                raise ValueError(f"rules.{field.name} must {least}, got {value}")
        if not self.warmup <= self.decay_from < self.decay_to <= 1:
            raise ValueError(
                "rules: warmup <= decay_from < decay_to <= 1 must hold, got "
                f"{self.warmup:g}, {self.decay_from:g}, {self.decay_to:g}"
            )
        if self.min_lr > 1:
            raise ValueError(f"rules.min_lr is a share of the peak rate, at most 1, got {self.min_lr}")


def architecture(base: DSV41Config, rules: Rules, depth: int) -> DSV41Config:
    """The model of one rung: what the dial does not set (vocabulary, constants) is as in `base`."""
    return base.with_overrides(model_settings(rules, depth))


def model_settings(rules: Rules, depth: int) -> dict[str, Any]:
    """The fields of DSV41Config that the dial sets (DIALLED). ValueError for a depth that loses a mechanism."""
    width = _rounded(rules.width_per_layer * depth, rules.width_multiple)
    heads = _rounded(rules.query_width * width / rules.head_dim, rules.o_groups)
    return {
        "num_hidden_layers": depth,
        "hidden_size": width,
        "num_attention_heads": heads,
        "head_dim": rules.head_dim,
        "qk_rope_head_dim": rules.rope_head_dim,
        "q_lora_rank": _rounded(rules.q_lora * width, 8),
        "o_lora_rank": _rounded(rules.o_lora * width, 8),
        "o_groups": rules.o_groups,
        "moe_intermediate_size": _rounded(rules.expert_width * width, 8),
        "n_routed_experts": rules.experts,
        "num_experts_per_tok": rules.experts_per_token,
        "sliding_window": rules.window,
        "index_n_heads": max(1, round(rules.index_heads * heads)),
        "index_head_dim": rules.index_head_dim,
        "index_topk": rules.index_topk,
        "candidate_topk_blocks": rules.pool_blocks,
        "candidate_block_size": rules.pool_block_size,
        "hc_mult": rules.streams,
        "num_nextn_predict_layers": 0,  # draft blocks do not take part in training
        "dspark_target_layer_ids": (),
        **layer_schedule(rules, depth),
        **engram_settings(rules, depth),
    }


def layer_schedule(rules: Rules, depth: int) -> dict[str, Any]:
    """Layer kinds of one depth: the released pattern, shortened or lengthened in both halves alike."""
    if depth < LEAST_DEPTH or depth % 2:
        raise ValueError(
            f"depth {depth} loses a mechanism: encoder and decoder halves need an even depth of {LEAST_DEPTH} or more"
        )
    if rules.csa2 == "window":
        empty: dict[str, Any] = {"kv_source_layer_ids": (), "index_source_layer_ids": ()}
        return empty | {"compress_ratios": (0,) * depth, "candidate_source_layer_id": -1}
    half = depth // 2
    compressed = half - WINDOW_LAYERS
    groups = max(1, round(compressed / ENCODER_GROUP))
    encoder = tuple(WINDOW_LAYERS + compressed * group // groups for group in range(groups))
    every = min(REINDEX_EVERY, half // 2)
    reindex = () if rules.csa2 == "no-reindex" else tuple(range(half + every, depth, every))
    return {
        "compress_ratios": (0,) * WINDOW_LAYERS + (2,) * compressed + (1,) * half,
        "kv_source_layer_ids": (*encoder, half),
        "index_source_layer_ids": (*encoder, half, *reindex),
        "candidate_source_layer_id": half if rules.csa2 == "published" else -1,
    }


def engram_settings(rules: Rules, depth: int) -> dict[str, Any]:
    """Engram layers and table sizes: columns are consecutive primes, as in the release (SPEC 7)."""
    sizes: dict[str, Any] = {
        "engram_n_heads": rules.engram_heads,
        "engram_head_dim": rules.engram_head_dim,
        "engram_max_ngram_size": rules.engram_ngram,
    }
    if rules.engram_rows == 0:
        return sizes | {"engram_layer_ids": (), "engram_num_embeddings": ()}
    from megatron_dsv41.modules.engram import column_primes

    layers = (ENGRAM_FIRST, round(ENGRAM_SECOND * depth))
    sizes |= {"engram_layer_ids": layers, "engram_vocab_size": round(rules.engram_rows * depth**3)}
    shape = DSV41Config(num_hidden_layers=40, engram_num_embeddings=(1, 1), **sizes)
    return sizes | {"engram_num_embeddings": tuple(sum(primes) for primes in column_primes(shape).values())}


def learning_rate(rules: Rules, depth: int) -> float:
    """Peak learning rate of a rung."""
    return rules.lr * (depth / rules.lr_at_depth) ** rules.lr_exponent


def batch_tokens(rules: Rules, tokens: float, multiple: int, factor: float = 1.0) -> int:
    """Tokens of one optimizer step, a multiple of `multiple` (one pass of all ranks)."""
    ideal = factor * rules.batch_tokens * (tokens / rules.batch_at_tokens) ** rules.batch_exponent
    return _rounded(ideal, multiple)


def steps(rules: Rules, tokens: float, per_step: int) -> int:
    """Optimizer steps for at least `tokens`, a multiple of the validation points."""
    return math.ceil(tokens / per_step / rules.evals) * rules.evals


def schedule(rules: Rules, steps: int, lr: float) -> dict[str, Any]:
    """The schedule section of a run of `steps`: the release's shape, by shares of the run (SPEC 17)."""
    warmup, first, last = (round(share * steps) for share in (rules.warmup, rules.decay_from, rules.decay_to))
    return {"warmup": warmup, "stable": first - warmup, "cosine": last - first, "min_lr": lr * rules.min_lr}


def _rounded(value: float, multiple: int) -> int:
    return max(1, round(value / multiple)) * multiple
