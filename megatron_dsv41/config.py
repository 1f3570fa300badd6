"""The architecture of a DeepSeek-V4.1-Flash family model: sizes, layer schedule, constants. Nothing else.

Field names are the released `config.json` names, so one vocabulary serves the file, run files and code.
`DSV41Config.from_hf` and `to_hf` are inverse to each other: unknown keys are kept (SPEC 2).
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, cast

ROPE_KEYS = {
    "factor": "rope_factor",
    "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow",
    "original_max_position_embeddings": "rope_original_max_position_embeddings",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSV41Config:
    """Architecture of one model. Immutable; `dataclasses.replace` or `with_overrides` make variants.

    All sizes are element counts, layer ids are 0-based and global. Defaults are the release (SPEC 2.2).
    Raises ValueError naming the key, the value and the limit when the parts do not fit together.
    """

    vocab_size: int = 129280
    hidden_size: int = 5120
    moe_intermediate_size: int = 2304
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    num_key_value_heads: int = 1
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_lora_rank: int = 1024
    o_groups: int = 8
    hidden_act: str = "silu"
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-20
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 1048576
    # Rotary: plain base in ratio-0 layers, compress base with YaRN in all others (SPEC 8.2).
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_factor: float = 16.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_original_max_position_embeddings: int = 65536
    # Experts
    n_routed_experts: int = 384
    n_shared_experts: int = 1
    num_experts_per_tok: int = 6
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    # CSA2 schedule
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0, 0, *(2,) * 18, *(1,) * 20, 0, 0, 0)
    kv_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20)
    index_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    candidate_source_layer_id: int = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    # mHC
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    # Engram
    engram_layer_ids: tuple[int, ...] = (1, 14)
    engram_num_embeddings: tuple[int, ...] = (384006168, 384016682)
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_vocab_size: int = 16000000
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092
    # DSpark
    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 128799
    dspark_target_layer_ids: tuple[int, ...] = (37, 38, 39)
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3
    # Tokens and dtype
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int = 129264
    dtype: str = "bfloat16"
    initializer_range: float = 0.02
    # Whatever else the file held, returned unchanged by to_hf.
    vision: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    quantization: Mapping[str, Any] | None = None
    rope_key: Literal["rope_scaling", "rope_parameters"] = "rope_scaling"
    source: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any], repr=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                object.__setattr__(self, field.name, tuple(cast("list[int]", value)))
            if field.type == "float" and isinstance(value, int):
                object.__setattr__(self, field.name, float(value))
        _check_types(self)
        _check_dimensions(self)
        _check_schedule(self)
        _check_engram(self)

    @property
    def backbone_ratios(self) -> tuple[int, ...]:
        """Compression ratio of the cache that each backbone layer reads, [num_hidden_layers]."""
        return self.compress_ratios[: self.num_hidden_layers]

    @property
    def decoder_start(self) -> int:
        """First decoder layer: the last KV source, whose cache all later layers read (SPEC 8.9)."""
        return self.kv_source_layer_ids[-1] if self.kv_source_layer_ids else self.num_hidden_layers

    @property
    def engram_columns(self) -> int:
        """Table columns of one Engram layer: hash heads of every n-gram order (24 in the release)."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def engram_rows(self, layer: int) -> int:
        """Rows of the Engram table of `layer`."""
        return self.engram_num_embeddings[self.engram_layer_ids.index(layer)]

    def with_overrides(self, overrides: Mapping[str, Any]) -> Self:
        """A copy with some fields changed; an unknown field is a ValueError naming the nearest one."""
        known = {field.name for field in dataclasses.fields(self)} - {"source"}
        for key in overrides:
            if key in ("rope_scaling", "rope_parameters"):
                raise ValueError(f"model.{key} is set by its parts: {', '.join(ROPE_KEYS.values())}")
            if key not in known:
                raise ValueError(f"model.{key} is not a model setting{nearest(key, known)}")
        return dataclasses.replace(self, **overrides)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Read a released (nested) config dict. Unknown keys are kept for `to_hf`."""
        if "text_config" not in hf:
            raise ValueError("config has no text_config: this is not a DeepSeek-V4.1 config.json")
        _check_sections(hf)
        text = {**{k: v for k, v in hf.items() if k in TOP_LEVEL_FIELDS}, **hf["text_config"]}
        if text.get("rope_parameters") and text.get("rope_scaling"):
            _require(
                all(text["rope_parameters"].get(key) == text["rope_scaling"].get(key) for key in ROPE_KEYS),
                "rope_parameters and rope_scaling are both given and differ: keep one",
            )
        rope_key = "rope_parameters" if text.get("rope_parameters") else "rope_scaling"
        rope = dict(text.get(rope_key) or {})
        gate_temp = text.get("gate_temp", 1.0)
        _require(
            gate_temp == 1.0, f"gate_temp must be 1.0, the only value that any released config has; got {gate_temp}"
        )
        older = text.get("torch_dtype", text.get("dtype"))
        _require(
            "dtype" not in text or older == text["dtype"],
            f"torch_dtype {older!r} and dtype {text.get('dtype')!r} differ",
        )
        rope_type = rope.get("rope_type", rope.get("type"))
        if rope and rope_type != "yarn":
            raise ValueError(f"{rope_key}.rope_type is {rope_type!r}: only 'yarn' is defined for this model")
        values = {field: rope[key] for key, field in ROPE_KEYS.items() if key in rope}
        values |= {k: rope[k] for k in ("rope_theta", "compress_rope_theta") if k in rope and k not in text}
        names = {f.name for f in dataclasses.fields(cls)} - NOT_IN_TEXT_CONFIG
        values |= {k: v for k, v in text.items() if k in names}
        if older is not None:
            values["dtype"] = older
        return cls(
            **values,
            vision=copy.deepcopy(dict(hf.get("vision_config") or {})),
            quantization=copy.deepcopy(hf.get("quantization_config")),
            rope_key=rope_key,
            source=copy.deepcopy(dict(hf)),
        )

    def to_hf(self) -> dict[str, Any]:
        """The released (nested) form. `from_hf(x).to_hf() == x` for every config with the released keys."""
        hf = copy.deepcopy(dict(self.source)) or _hf_skeleton()
        text = hf.setdefault("text_config", {})
        was_empty = not self.source
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name, value in values.items():
            plain: Any = list(cast("tuple[int, ...]", value)) if isinstance(value, tuple) else value
            homes = [place for place in (hf, text) if name in place]
            if name == "dtype" and not homes and any("torch_dtype" in place for place in (hf, text)):
                homes = [place for place in (hf, text) if "torch_dtype" in place]
                for place in homes:
                    place["torch_dtype"] = plain
                continue
            if not homes and name not in NOT_IN_TEXT_CONFIG and (was_empty or value != _DEFAULTS[name]):
                homes = [hf if name in TOP_LEVEL_FIELDS else text]
            for place in homes:
                place[name] = plain
        rope = text.get(self.rope_key) or {"rope_type": "yarn"}
        text[self.rope_key] = rope
        for key, field in ROPE_KEYS.items():
            rope[key] = _like(rope.get(key), values[field])
        for key in ("rope_theta", "compress_rope_theta"):
            if key in rope:
                rope[key] = values[key]
        if self.vision or "vision_config" in hf:
            hf["vision_config"] = copy.deepcopy(dict(self.vision))
        if self.quantization is not None:
            hf["quantization_config"] = copy.deepcopy(dict(self.quantization))
        else:
            hf.pop("quantization_config", None)
        return hf

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read `config.json`, or the `config.json` of a checkpoint folder."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            return cls.from_hf(json.loads(path.read_text()))
        except FileNotFoundError as error:
            raise ValueError(f"{path} does not exist: give a config.json or a folder that holds one") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error


NOT_IN_TEXT_CONFIG = {"vision", "quantization", "rope_key", "source", *ROPE_KEYS.values()}
TOP_LEVEL_FIELDS = {
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "image_token_id",
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
}


def nearest(key: str, known: set[str]) -> str:
    """'; did you mean X?' for the closest of `known`, or an empty string."""
    matches = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""


def _hf_skeleton() -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "text_config": {"model_type": "deepseek_v41_text"},
    }


def _like(old: Any, new: Any) -> Any:
    """`new`, written as the file wrote it: 16 stays 16 and does not become 16.0."""
    return int(new) if isinstance(old, int) and float(new).is_integer() else new


def _check_sections(hf: Mapping[str, Any]) -> None:
    text = hf["text_config"]
    _require(isinstance(text, Mapping), f"text_config must be a mapping, got {text!r}")
    places = [(hf, "vision_config"), (hf, "quantization_config"), (text, "rope_scaling"), (text, "rope_parameters")]
    for place, key in places:
        value = place.get(key)
        _require(value is None or isinstance(value, Mapping), f"{key} must be a mapping, got {value!r}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_types(c: DSV41Config) -> None:
    expected = {"int": int, "float": float, "bool": bool, "str": str}
    for field in dataclasses.fields(c):
        value = getattr(c, field.name)
        kind = expected.get(str(field.type))
        if kind and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise ValueError(f"{field.name} must be {field.type}, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{field.name} must be a finite number, got {value}")
        if str(field.type).startswith("tuple") and not _is_int_tuple(value):
            raise ValueError(f"{field.name} must be a list of integers, got {value!r}")


def _is_int_tuple(value: object) -> bool:
    return isinstance(value, tuple) and all(type(v) is int for v in cast("tuple[object, ...]", value))


def _check_dimensions(c: DSV41Config) -> None:
    positive = (
        "vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads head_dim q_lora_rank "
        "o_lora_rank o_groups n_routed_experts num_experts_per_tok sliding_window index_n_heads index_head_dim "
        "index_topk hc_mult hc_sinkhorn_iters engram_n_heads engram_head_dim candidate_block_size candidate_topk_blocks"
    )
    for key in positive.split():
        _require(getattr(c, key) > 0, f"{key} must be positive, got {getattr(c, key)}")
    _require(
        c.num_key_value_heads == 1,
        f"num_key_value_heads must be 1 (one shared latent), got {c.num_key_value_heads}",
    )
    _require(
        c.qk_rope_head_dim % 2 == 0 and 0 < c.qk_rope_head_dim <= min(c.head_dim, c.index_head_dim),
        f"qk_rope_head_dim must be even and at most head_dim {c.head_dim} and index_head_dim {c.index_head_dim}, "
        f"got {c.qk_rope_head_dim}",
    )
    _require(
        c.num_attention_heads % c.o_groups == 0,
        f"num_attention_heads {c.num_attention_heads} must be a multiple of o_groups {c.o_groups}",
    )
    _require(
        c.num_experts_per_tok <= c.n_routed_experts,
        f"num_experts_per_tok {c.num_experts_per_tok} exceeds n_routed_experts {c.n_routed_experts}",
    )
    _require(c.n_shared_experts == 1, f"n_shared_experts must be 1, got {c.n_shared_experts}")
    _require(c.scoring_func == "sqrtsoftplus", f"scoring_func must be 'sqrtsoftplus', got {c.scoring_func!r}")
    _require(c.topk_method == "noaux_tc", f"topk_method must be 'noaux_tc', got {c.topk_method!r}")
    _require(c.norm_topk_prob, "norm_topk_prob must be true: the model always normalises routing weights")
    _require(c.hidden_act == "silu", f"hidden_act must be 'silu', got {c.hidden_act!r}")
    _require(not c.attention_bias, "attention_bias must be false: no text linear of this model has a bias")
    _require(not c.tie_word_embeddings, "tie_word_embeddings must be false: embedding and head are two tensors")
    _require(c.rms_norm_eps > 0, f"rms_norm_eps must be positive, got {c.rms_norm_eps}")
    _require(c.head_dim % 32 == 0, f"head_dim must be a multiple of 32 (KV quantization blocks), got {c.head_dim}")
    _require(
        c.index_head_dim % 32 == 0,
        f"index_head_dim must be a multiple of 32 (MXFP4 blocks), got {c.index_head_dim}",
    )
    dtypes = ("float32", "bfloat16")
    _require(c.dtype in dtypes, f"dtype must be one of {', '.join(dtypes)}, got {c.dtype!r}")
    _require(c.swiglu_limit > 0, f"swiglu_limit must be positive, got {c.swiglu_limit}")


def _check_schedule(c: DSV41Config) -> None:
    n, ratios = c.num_hidden_layers, c.compress_ratios
    _require(len(ratios) >= n, f"compress_ratios has {len(ratios)} entries, needs at least num_hidden_layers = {n}")
    _require(
        all(r in (0, 1, 2) for r in ratios),
        f"compress_ratios must hold 0, 1 or 2 only, got {sorted(set(ratios))}",
    )
    for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        ids = getattr(c, key)
        _require(list(ids) == sorted(set(ids)), f"{key} must be strictly ascending, got {list(ids)}")
        bad = [i for i in ids if not 0 <= i < n]
        _require(not bad, f"{key} names layer {bad[0] if bad else None}, outside 0..{n - 1}")
    extra = set(c.kv_source_layer_ids) - set(c.index_source_layer_ids)
    _require(
        not extra,
        f"kv_source_layer_ids {sorted(extra)} are not in index_source_layer_ids: a Full layer selects too",
    )
    for i in c.index_source_layer_ids:
        _require(ratios[i] > 0, f"layer {i} is an index source but compress_ratios[{i}] is 0")
    source = None
    for layer in range(n):
        source = layer if layer in c.kv_source_layer_ids else source
        if ratios[layer] == 0:
            continue
        if source is None:
            raise ValueError(f"layer {layer} has compress ratio {ratios[layer]} but no kv source at or before it")
        _require(
            ratios[layer] == ratios[source],
            f"layer {layer} has compress ratio {ratios[layer]} but reads layer {source}: ratio {ratios[source]}",
        )
    candidate = c.candidate_source_layer_id
    _require(
        candidate == -1 or candidate in c.kv_source_layer_ids,
        f"candidate_source_layer_id {candidate} must be -1 or one of kv_source_layer_ids {list(c.kv_source_layer_ids)}",
    )
    later = [s for s in c.kv_source_layer_ids if candidate >= 0 and s > candidate]
    _require(
        not later,
        f"kv source {later[0] if later else None} follows candidate source {candidate}: "
        "its pool would name another cache",
    )


def _check_engram(c: DSV41Config) -> None:
    _require(
        len(c.engram_num_embeddings) == len(c.engram_layer_ids),
        f"engram_num_embeddings has {len(c.engram_num_embeddings)} entries, engram_layer_ids {len(c.engram_layer_ids)}",
    )
    _require(
        c.engram_max_ngram_size >= 2,
        f"engram_max_ngram_size must be at least 2, got {c.engram_max_ngram_size}",
    )
    _require(
        c.engram_compressed_vocab_size > 0,
        f"engram_compressed_vocab_size must be positive, got {c.engram_compressed_vocab_size}",
    )


_DEFAULTS = {
    f.name: (f.default if f.default is not dataclasses.MISSING else None) for f in dataclasses.fields(DSV41Config)
}
