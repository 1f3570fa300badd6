"""The one table between native names (our state-dict keys) and released names (DeepSeek's files), used both ways.

A rule says for one kind of tensor: native name, released name or names, shape of one released tensor, how the parts
make up the native tensor (`via`), how the release stores it (`storage`), which axis backends shard (`split`), and on
which layers it exists (`on`). `bind(config)` expands the table for one model. What we keep but do not train is
`CARRIED_THROUGH`; a name in neither place is an error (SPEC 18, 19).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping

from megatron_dsv41.checkpoint.storage import Storage, config_dtype, format_dtype, scale_name
from megatron_dsv41.checkpoint.transforms import Transform, same, stack, stack_gate_up
from megatron_dsv41.config import DSV41Config
from megatron_dsv41.layer_plan import LayerPlan, plan_layers

# Released names of parts that travel unchanged: DSpark drafts, vision tower, projector, image delimiters.
CARRIED_THROUGH = ("mtp.", "vision.", "aligner.", "image_")

Shape = tuple[int, ...]
Inventory = dict[str, tuple[str, Shape]]  # released name -> (safetensors dtype, shape)


class Split(enum.StrEnum):
    """What the sharded axis of a native tensor counts. The axis is the first one but for GROUP_INPUTS (the last)."""

    NONE = "none"  # replicated
    VOCAB = "vocab"
    HEADS = "heads"  # query heads
    GROUPS = "groups"  # output groups
    GROUP_INPUTS = "group_inputs"  # columns that contract with GROUPS rows
    INDEX_HEADS = "index_heads"
    FFN = "ffn"
    FFN_INPUTS = "ffn_inputs"  # columns that contract with FFN rows
    EXPERTS = "experts"
    ENGRAM_ROWS = "engram_rows"


def _always(plan: LayerPlan) -> bool:
    return True


def _owns_kv(plan: LayerPlan) -> bool:
    return plan.owns_kv


def _owns_selection(plan: LayerPlan) -> bool:
    return plan.owns_selection


def _has_gate(plan: LayerPlan) -> bool:
    return plan.has_gate


def _has_engram(plan: LayerPlan) -> bool:
    return plan.has_engram


def _same(sizes: Mapping[str, int]) -> Transform:
    return same()


def _per_expert(sizes: Mapping[str, int]) -> Transform:
    return stack(sizes["experts"])


def _gate_up(sizes: Mapping[str, int]) -> Transform:
    return stack_gate_up(sizes["experts"])


@dataclasses.dataclass(frozen=True)
class Rule:
    """One kind of tensor. `{l}` is the layer, `{e}` the expert; `shape` names entries of `sizes`."""

    native: str
    released: tuple[str, ...]
    shape: tuple[str, ...]
    storage: Storage = Storage.PLAIN
    split: Split = Split.NONE
    on: Callable[[LayerPlan], bool] = _always
    via: Callable[[Mapping[str, int]], Transform] = _same

    @property
    def per_layer(self) -> bool:
        """The rule is expanded for every layer that `on` accepts."""
        return "{l}" in self.native


def _top(name: str, *shape: str, split: Split = Split.NONE) -> Rule:
    return Rule(name, (name,), shape, split=split)


def _layer(
    name: str,
    *shape: str,
    storage: Storage = Storage.PLAIN,
    split: Split = Split.NONE,
    on: Callable[[LayerPlan], bool] = _always,
    released: str = "",
) -> Rule:
    return Rule(f"layers.{{l}}.{name}", (f"layers.{{l}}.{released or name}",), shape, storage, split, on)


def _experts(name: str, matrices: tuple[str, ...], *shape: str, via: Callable[[Mapping[str, int]], Transform]) -> Rule:
    released = tuple(f"layers.{{l}}.ffn.experts.{{e}}.{matrix}.weight" for matrix in matrices)
    return Rule(f"layers.{{l}}.ffn.experts.{name}", released, shape, Storage.FP4_ROW32, Split.EXPERTS, via=via)


_FP8, _FP32 = Storage.FP8_BLOCK32, Storage.FLOAT32

RULES: tuple[Rule, ...] = (
    _top("embed.weight", "vocab", "hidden", split=Split.VOCAB),
    _top("head.weight", "vocab", "hidden", split=Split.VOCAB),
    _top("norm.weight", "hidden"),
    _layer("attn_norm.weight", "hidden"),
    _layer("ffn_norm.weight", "hidden"),
    *(
        rule
        for site in ("attn", "ffn")
        for rule in (
            _layer(f"{site}_hc.fn", "mixes", "streams*hidden", storage=_FP32, released=f"hc_{site}_fn"),
            _layer(f"{site}_hc.base", "mixes", storage=_FP32, released=f"hc_{site}_base"),
            _layer(f"{site}_hc.scale", "mix_kinds", storage=_FP32, released=f"hc_{site}_scale"),
        )
    ),
    _layer("attn.wq_a.weight", "q_rank", "hidden", storage=_FP8),
    _layer("attn.q_norm.weight", "q_rank"),
    _layer("attn.wq_b.weight", "heads*latent", "q_rank", storage=_FP8, split=Split.HEADS),
    _layer("attn.wkv.weight", "latent", "hidden", storage=_FP8),
    _layer("attn.kv_norm.weight", "latent"),
    _layer("attn.wo_a.weight", "groups*o_rank", "group_heads*latent", storage=_FP8, split=Split.GROUPS),
    _layer("attn.wo_b.weight", "hidden", "groups*o_rank", storage=_FP8, split=Split.GROUP_INPUTS),
    _layer("attn.attn_sink", "heads", storage=_FP32, split=Split.HEADS),
    _layer("attn.compressor.wkv.weight", "latent", "hidden", on=_owns_kv),
    _layer("attn.compressor.wgate.weight", "latent", "hidden", on=_has_gate),
    _layer("attn.compressor.norm.weight", "latent", on=_owns_kv),
    _layer("attn.indexer.wk.weight", "index_dim", "latent", on=_owns_kv),
    _layer("attn.indexer.k_norm.weight", "index_dim", on=_owns_kv),
    _layer(
        "attn.indexer.wq_b.weight",
        "index_heads*index_dim",
        "q_rank",
        storage=_FP8,
        split=Split.INDEX_HEADS,
        on=_owns_selection,
    ),
    _layer("attn.indexer.weights_proj.weight", "index_heads", "hidden", split=Split.INDEX_HEADS, on=_owns_selection),
    _layer("ffn.gate.weight", "experts", "hidden"),
    _layer("ffn.gate.bias", "experts", storage=_FP32),
    _layer("ffn.gate.bias_vl", "experts", storage=_FP32),
    _experts("w13", ("w1", "w3"), "ffn", "hidden", via=_gate_up),
    _experts("w2", ("w2",), "hidden", "ffn", via=_per_expert),
    _layer("ffn.shared_experts.w1.weight", "ffn", "hidden", storage=_FP8, split=Split.FFN),
    _layer("ffn.shared_experts.w3.weight", "ffn", "hidden", storage=_FP8, split=Split.FFN),
    _layer("ffn.shared_experts.w2.weight", "hidden", "ffn", storage=_FP8, split=Split.FFN_INPUTS),
    _layer(
        "engram.embed.weight",
        "engram_rows",
        "engram_dim",
        storage=Storage.FP8_ROW32,
        split=Split.ENGRAM_ROWS,
        on=_has_engram,
    ),
    _layer("engram.wkv.weight", "keys_value*hidden", "engram_columns*engram_dim", storage=_FP8, on=_has_engram),
    _layer("engram.q_weight", "streams", "hidden", on=_has_engram),
    _layer("engram.k_weight", "streams", "hidden", on=_has_engram),
)


@dataclasses.dataclass(frozen=True)
class Binding:
    """One native tensor of one model and the released tensors that hold it.

    released: names of the parts in order; every part has `part_shape`. layer: None for embedding, head, final norm.
    """

    native: str
    released: tuple[str, ...]
    part_shape: Shape
    storage: Storage
    split: Split
    via: Transform
    layer: int | None = None

    @property
    def shape(self) -> Shape:
        """Shape of the native tensor."""
        return self.via.native_shape(self.part_shape)

    @property
    def is_float32(self) -> bool:
        """The tensor is float32 whatever the model's dtype."""
        return self.storage is Storage.FLOAT32


def bind(config: DSV41Config) -> tuple[Binding, ...]:
    """Every native tensor of a model, in the order of the forward pass by layer. Names are unique both ways."""
    plans = plan_layers(config)
    bindings = [_bind(rule, _sizes(config, None), "", None) for rule in RULES if not rule.per_layer]
    for plan in plans:
        sizes = _sizes(config, plan)
        bindings += [_bind(r, sizes, str(plan.layer), plan.layer) for r in RULES if r.per_layer and r.on(plan)]
    return tuple(bindings)


def parameter_bindings(config: DSV41Config) -> tuple[Binding, ...]:
    """The native tensors that an optimizer moves: all but the router biases, which are buffers with their own rule."""
    return tuple(b for b in bind(config) if not b.native.endswith((".gate.bias", ".gate.bias_vl")))


def released_inventory(config: DSV41Config) -> Inventory:
    """Name -> (dtype, shape) of every tensor of the released layout of a model, carried-through parts included.

    With a `quantization_config` the release's storage; without one every tensor is plain, in the config's dtype.
    """
    inventory: Inventory = {}
    for binding in bind(config):
        for name in binding.released:
            inventory |= _entries(name, binding.part_shape, binding.storage, config)
    for name, (shape, storage) in carried_tensors(config).items():
        inventory |= _entries(name, shape, storage, config)
    return inventory


def carried_tensors(config: DSV41Config) -> dict[str, tuple[Shape, Storage]]:
    """Logical shape and storage of every carried-through tensor that a complete checkpoint of this model has."""
    return dict(_draft(config)) | dict(_vision(config))


def is_carried(name: str) -> bool:
    """Whether a released name (of a tensor or its scales) belongs to the carried-through parts."""
    return name.startswith(CARRIED_THROUGH)


def release_shards(config: DSV41Config, names: Inventory) -> dict[str, str]:
    """Shard file of every tensor, split by role as the release does: vision, embedding, one per layer, final norm and
    head, one per draft block, one per Engram table (SPEC 18). Roles without tensors get no file.
    """
    roles = {name: _role(name) for name in names}
    ordered = sorted(set(roles.values()))
    files = {role: f"model-{i:05d}-of-{len(ordered):05d}.safetensors" for i, role in enumerate(ordered, 1)}
    return {name: files[role] for name, role in roles.items()}


def _role(name: str) -> tuple[int, int]:
    kind, *rest = name.split(".")
    if kind == "embed":
        return 1, 0
    if kind == "layers":
        return (5, int(rest[0])) if rest[1] == "engram" else (2, int(rest[0]))
    if kind in ("norm", "head"):
        return 3, 0
    return (4, int(rest[0])) if kind == "mtp" else (0, 0)


def _bind(rule: Rule, sizes: Mapping[str, int], layer: str, number: int | None) -> Binding:
    via = rule.via(sizes)
    names = [name.replace("{l}", layer) for name in rule.released]
    released = [name.replace("{e}", str(e)) for e in range(via.num_parts // len(names)) for name in names]
    return Binding(
        native=rule.native.replace("{l}", layer),
        released=tuple(released),
        part_shape=_shape(rule.shape, sizes),
        storage=rule.storage,
        split=rule.split,
        via=via,
        layer=number,
    )


def _shape(expressions: tuple[str, ...], sizes: Mapping[str, int]) -> Shape:
    shape: list[int] = []
    for expression in expressions:
        size = 1
        for factor in expression.split("*"):
            size *= sizes[factor]
        shape.append(size)
    return tuple(shape)


def _sizes(config: DSV41Config, plan: LayerPlan | None) -> dict[str, int]:
    """The words of the table's shapes. Engram rows are those of the plan's layer."""
    streams = config.hc_mult
    return {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "streams": streams,
        "mixes": (2 + streams) * streams,  # pre, post, comb
        "mix_kinds": 3,
        "heads": config.num_attention_heads,
        "latent": config.head_dim,
        "q_rank": config.q_lora_rank,
        "groups": config.o_groups,
        "group_heads": config.num_attention_heads // config.o_groups,
        "o_rank": config.o_lora_rank,
        "index_heads": config.index_n_heads,
        "index_dim": config.index_head_dim,
        "experts": config.n_routed_experts,
        "ffn": config.moe_intermediate_size,
        "keys_value": streams + 1,
        "engram_columns": config.engram_columns,
        "engram_dim": config.engram_head_dim,
        "engram_rows": config.engram_rows(plan.layer) if plan and plan.has_engram else 0,
    }


def _entries(name: str, shape: Shape, storage: Storage, config: DSV41Config) -> Inventory:
    form = storage.format
    if config.quantization is None:
        return {name: ("F32" if storage is Storage.FLOAT32 else config_dtype(config.dtype), shape)}
    if form is None:
        return {name: ("F32" if storage is Storage.FLOAT32 else "BF16", shape)}
    return {
        name: (format_dtype(form), form.data_shape(shape)),
        scale_name(name): ("F8_E8M0", form.scale_shape(shape)),
    }


def _draft(config: DSV41Config) -> Iterator[tuple[str, tuple[Shape, Storage]]]:
    """DSpark: window-only blocks with experts of their own, and four small heads (SPEC 13)."""
    blocks, hidden = config.num_nextn_predict_layers, config.hidden_size
    if not blocks:
        return
    plan = dataclasses.replace(plan_layers(config)[0], layer=0, has_engram=False)
    sizes = _sizes(config, None) | {"experts": config.dspark_n_routed_experts}
    for block in range(blocks):
        for rule in RULES:
            if rule.per_layer and rule.on(plan):
                binding = _bind(rule, sizes, str(block), block)
                for name in binding.released:
                    yield name.replace("layers.", "mtp.", 1), (binding.part_shape, binding.storage)
    rank, last = config.dspark_markov_rank, f"mtp.{blocks - 1}"
    taps = len(config.dspark_target_layer_ids) * hidden
    yield "mtp.0.main_proj.weight", ((hidden, taps), Storage.FP8_BLOCK32)
    yield "mtp.0.main_norm.weight", ((hidden,), Storage.PLAIN)
    yield f"{last}.norm.weight", ((hidden,), Storage.PLAIN)
    yield f"{last}.markov_head.embed.weight", ((config.vocab_size, rank), Storage.PLAIN)
    yield f"{last}.markov_head.head.weight", ((config.vocab_size, rank), Storage.PLAIN)
    yield f"{last}.confidence_head.proj.weight", ((1, hidden + rank), Storage.PLAIN)


def _vision(config: DSV41Config) -> Iterator[tuple[str, tuple[Shape, Storage]]]:
    """Vision tower, projector and the three delimiters (SPEC 14), for a config with vision layers."""
    vision = config.vision
    blocks = int(vision.get("num_hidden_layers", 0))
    if not blocks:
        return
    width, inner, hidden = int(vision["hidden_size"]), int(vision["intermediate_size"]), config.hidden_size
    patch = 3 * int(vision["patch_size"]) ** 2
    unshuffled = width * int(vision["downsample_ratio"]) ** 2
    shapes: dict[str, Shape] = {f"image_{name}": (hidden,) for name in ("start", "end", "newline")}
    shapes |= {"vision.patch_embed.proj.weight": (width, patch), "vision.patch_embed.proj.bias": (width,)}
    for block in range(blocks):
        prefix = f"vision.blocks.{block}"
        shapes |= {
            f"{prefix}.attn.wqkv.weight": (3 * width, width),
            f"{prefix}.attn.wqkv.bias": (3 * width,),
            f"{prefix}.attn.wo.weight": (width, width),
            f"{prefix}.attn.wo.bias": (width,),
            f"{prefix}.mlp.w1.weight": (2 * inner, width),
            f"{prefix}.mlp.w2.weight": (width, inner),
            f"{prefix}.norm1.weight": (width,),
            f"{prefix}.norm2.weight": (width,),
        }
    shapes["vision.norm.weight"] = (width,)
    for name, columns in (("w1", unshuffled), ("w2", hidden)):
        shapes |= {f"aligner.{name}.weight": (hidden, columns), f"aligner.{name}.bias": (hidden,)}
    for name, shape in shapes.items():
        yield name, (shape, Storage.PLAIN)
