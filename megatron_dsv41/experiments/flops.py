"""Parameters, KV bytes and floating-point operations of a model, from `DSV41Config` alone (SPEC 3).

FLOP counts are of matrix products (a multiply-add is 2), the convention behind MFU. Element-wise work, norms,
Sinkhorn, table look-ups and recomputation are not counted.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.layer_plan import LayerPlan, plan_layers
from megatron_dsv41.phase import Phase

# In the order in which they are shown. The last two are no part of the backbone.
KINDS = (
    "routed experts",
    "attention",
    "shared experts",
    "embedding",
    "head",
    "vision",
    "engram projections",
    "routers",
    "indexers",
    "compressors",
    "mhc",
    "norms",
    "engram tables",
    "dspark",
)
OUTSIDE_BACKBONE = ("engram tables", "dspark")
# As inference stores them: E2M1 with one E4M3 scale per 16 channels; MXFP4, one E8M0 scale per 32.
MAIN_KV_BYTES_PER_CHANNEL = 1 / 2 + 1 / 16
INDEX_KEY_BYTES_PER_CHANNEL = 1 / 2 + 1 / 32


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """Logical parameters by kind (a packed FP4 byte holds two; scales are not parameters)."""

    by_kind: dict[str, int]

    @property
    def backbone(self) -> int:
        """All but Engram tables and DSpark draft blocks."""
        return sum(n for kind, n in self.by_kind.items() if kind not in OUTSIDE_BACKBONE)

    @property
    def total(self) -> int:
        """Everything in the checkpoint."""
        return sum(self.by_kind.values())


@dataclasses.dataclass(frozen=True)
class ActiveParameters:
    """Matrix parameters that one token's forward pass multiplies with."""

    prefill: int  # encoder half only, with the compressor that feeds the decoder
    decode: int  # all layers and the head


@dataclasses.dataclass(frozen=True)
class Flops:
    """Floating-point operations per token by component: the forward pass, and a training step's share."""

    forward: dict[str, float]
    training: dict[str, float]

    @property
    def forward_total(self) -> float:
        """Of one token's forward pass."""
        return sum(self.forward.values())

    @property
    def training_total(self) -> float:
        """Of one token's forward and backward pass."""
        return sum(self.training.values())


def layer_parameters(config: DSV41Config, plan: LayerPlan) -> Counter[str]:
    """Parameters of one backbone layer by kind, its Engram included."""
    c, d = config, config.hidden_size
    count = Counter(
        {
            "attention": attention_matrices(c) + c.q_lora_rank + c.head_dim + c.num_attention_heads,
            "routed experts": c.n_routed_experts * expert_matrices(c),
            "shared experts": c.n_shared_experts * expert_matrices(c),
            "routers": c.n_routed_experts * d + 2 * c.n_routed_experts,
            "mhc": mhc_parameters(c),
            "norms": 2 * d,
        }
    )
    if plan.owns_kv:
        count["compressors"] = compressor_matrices(c, plan) + c.head_dim
        count["indexers"] = c.index_head_dim * c.head_dim + c.index_head_dim
    if plan.owns_selection:
        count["indexers"] += indexer_query_matrices(c)
    if plan.has_engram:
        count["engram projections"] = engram_matrices(c) + 2 * c.hc_mult * d
        count["engram tables"] = c.engram_rows(plan.layer) * c.engram_head_dim
    return count


def count_parameters(config: DSV41Config) -> ParameterCount:
    """Parameters of the whole checkpoint by kind."""
    embedding = config.vocab_size * config.hidden_size
    count = Counter({"embedding": embedding, "head": embedding, "norms": config.hidden_size})
    for plan in plan_layers(config):
        count.update(layer_parameters(config, plan))
    count["vision"] = _vision_parameters(config)
    count["dspark"] = _dspark_parameters(config)
    return ParameterCount({kind: count[kind] for kind in KINDS if count[kind]})


def active_parameters(config: DSV41Config) -> ActiveParameters:
    """Matrix parameters used per token while reading a prompt and while generating."""
    plans = plan_layers(config)
    decoder = max(config.kv_source_layer_ids, default=config.num_hidden_layers)
    compressors = sum(compressor_matrices(config, plan) for plan in plans if plan.owns_kv)
    prefill = sum(_active_in_layer(config, plan) for plan in plans[:decoder])
    decode = sum(_active_in_layer(config, plan) for plan in plans)
    head = config.vocab_size * config.hidden_size
    return ActiveParameters(prefill=prefill + compressors, decode=decode + compressors + head)


def kv_bytes_per_token(config: DSV41Config) -> float:
    """Bytes of global KV that inference keeps per token: quantized entries and index keys of every source."""
    entry = config.head_dim * MAIN_KV_BYTES_PER_CHANNEL + config.index_head_dim * INDEX_KEY_BYTES_PER_CHANNEL
    return sum(entry / plan.ratio for plan in plan_layers(config) if plan.owns_kv)


def mean_visible(seq_length: int, ratio: int, limit: int | None = None) -> float:
    """Mean over t < seq_length of min(floor((t+1) / ratio), limit): the entries that a query sees.

    Entry number j (1-based) is seen by the seq_length - j*ratio + 1 tokens from its last one on.
    """
    entries = seq_length // ratio if limit is None else min(seq_length // ratio, limit)
    return (entries * (seq_length + 1) - ratio * entries * (entries + 1) / 2) / seq_length


def flops_per_token(config: DSV41Config, seq_length: int, phase: Phase | None = None) -> Flops:
    """FLOPs per token, averaged over one document of `seq_length` tokens. `phase` defaults to `Phase()`.

    Backward is twice forward. The indexer counts forward alone unless its objective is on; then its
    projections count three times, its scores three times (dense) or forward plus selected slots (sparse).
    """
    c, phase = config, phase or Phase()
    plans = plan_layers(c)
    d, layers = c.hidden_size, len(plans)
    attended = sum(mean_visible(seq_length, 1, c.sliding_window) + _selected(c, p, seq_length) for p in plans)
    scores = 2 * c.index_n_heads * c.index_head_dim * sum(_scored(c, p, seq_length, phase) for p in plans)
    forward = {
        "attention linears": 2.0 * layers * attention_matrices(c),
        "attention window + selected": 4 * c.num_attention_heads * c.head_dim * attended,
        "experts": 2.0 * layers * (c.num_experts_per_tok + c.n_shared_experts) * expert_matrices(c),
        "routers": 2.0 * layers * c.n_routed_experts * d,
        "mhc": 2.0 * layers * _mhc_matrices(c),
        "compressors": 2.0 * sum(compressor_matrices(c, p) for p in plans if p.owns_kv),
        "engram projections": 2.0 * len(c.engram_layer_ids) * engram_matrices(c),
        "indexer projections": 2.0 * sum(_indexer_matrices(c, p) for p in plans),
        "indexer scores": scores,
        "head": 2.0 * c.vocab_size * d,
    }
    training = {name: 3 * flops for name, flops in forward.items()}
    if phase.index_loss == "off":
        training["indexer projections"] = forward["indexer projections"]
        training["indexer scores"] = scores
    elif phase.index_loss == "sparse":
        selected = sum(_selected(c, p, seq_length) for p in plans if p.owns_selection)
        training["indexer scores"] = scores + 4 * c.index_n_heads * c.index_head_dim * selected
    return Flops(forward, training)


def attention_matrices(c: DSV41Config) -> int:
    """Weights of wq_a, wq_b, wkv, wo_a and wo_b of one layer."""
    d, width = c.hidden_size, c.num_attention_heads * c.head_dim
    query = d * c.q_lora_rank + c.q_lora_rank * width
    output = width * c.o_lora_rank + c.o_groups * c.o_lora_rank * d
    return query + d * c.head_dim + output


def expert_matrices(c: DSV41Config) -> int:
    """Weights of one expert: gate, up and down."""
    return 3 * c.hidden_size * c.moe_intermediate_size


def mhc_parameters(c: DSV41Config) -> int:
    """Both sites of one layer: projections, bases and three scales each."""
    return _mhc_matrices(c) + 2 * (_mhc_outputs(c) + 3)


def compressor_matrices(c: DSV41Config, plan: LayerPlan) -> int:
    """wkv, and wgate where the compressor pools."""
    return (2 if plan.has_gate else 1) * c.head_dim * c.hidden_size


def indexer_query_matrices(c: DSV41Config) -> int:
    """wq_b and weights_proj of one indexer."""
    return c.index_n_heads * (c.index_head_dim * c.q_lora_rank + c.hidden_size)


def engram_matrices(c: DSV41Config) -> int:
    """wkv of one Engram layer: a key per stream and one value from all columns' rows."""
    return (c.hc_mult + 1) * c.hidden_size * c.engram_columns * c.engram_head_dim


def _mhc_outputs(c: DSV41Config) -> int:
    return c.hc_mult * (2 + c.hc_mult)


def _mhc_matrices(c: DSV41Config) -> int:
    return 2 * _mhc_outputs(c) * c.hc_mult * c.hidden_size


def _indexer_matrices(c: DSV41Config, plan: LayerPlan) -> int:
    keys = c.index_head_dim * c.head_dim if plan.owns_kv else 0
    return keys + (indexer_query_matrices(c) if plan.owns_selection else 0)


def _active_in_layer(c: DSV41Config, plan: LayerPlan) -> int:
    experts = (c.num_experts_per_tok + c.n_shared_experts) * expert_matrices(c)
    active = attention_matrices(c) + c.n_routed_experts * c.hidden_size + experts + _mhc_matrices(c)
    active += indexer_query_matrices(c) if plan.owns_selection else 0
    return active + (engram_matrices(c) if plan.has_engram else 0)


def _selected(c: DSV41Config, plan: LayerPlan, seq_length: int) -> float:
    return mean_visible(seq_length, plan.ratio, c.index_topk) if plan.ratio else 0.0


def _scored(c: DSV41Config, plan: LayerPlan, seq_length: int, phase: Phase) -> float:
    if not plan.owns_selection:
        return 0.0
    pool = c.candidate_topk_blocks * c.candidate_block_size if plan.uses_candidates and phase.hsi else None
    return mean_visible(seq_length, plan.ratio, pool)


def _vision_parameters(c: DSV41Config) -> int:
    """Vision tower, aligner and the three delimiter rows; 0 for a text-only config (SPEC 14)."""
    v = c.vision
    if not v:
        return 0
    width, inner, d = v["hidden_size"], v["intermediate_size"], c.hidden_size
    patch = _biased(3 * v["patch_size"] ** 2, width)
    block = _biased(width, 3 * width) + _biased(width, width) + 3 * width * inner + 2 * width
    aligner = _biased(width * v["downsample_ratio"] ** 2, d) + _biased(d, d)
    return patch + v["num_hidden_layers"] * block + width + aligner + 3 * d


def _dspark_parameters(c: DSV41Config) -> int:
    """Draft blocks: ordinary window-only layers with their own experts, and the draft heads (SPEC 13)."""
    blocks, d = c.num_nextn_predict_layers, c.hidden_size
    if not blocks:
        return 0
    attention = attention_matrices(c) + c.q_lora_rank + c.head_dim + c.num_attention_heads
    experts = (c.dspark_n_routed_experts + c.n_shared_experts) * expert_matrices(c)
    router = c.dspark_n_routed_experts * (d + 2)
    main = len(c.dspark_target_layer_ids) * d * d + d
    heads = d + 2 * c.vocab_size * c.dspark_markov_rank + d + c.dspark_markov_rank
    return blocks * (attention + experts + router + mhc_parameters(c) + 2 * d) + main + heads


def _biased(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs
