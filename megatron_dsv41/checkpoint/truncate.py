"""A smaller model cut from real weights: the first layers, the first experts, released ids kept.

Layer ids decide KV sources and Engram seeds (10007 * layer), so layers are never renumbered (SPEC 19.11). Drafts read
the last layers and go; vision and delimiters stay. The first experts of a trained router are a working router, not a
balanced one.
"""

from __future__ import annotations

import dataclasses

from megatron_dsv41.checkpoint.mapping import Inventory, bind, carried_tensors
from megatron_dsv41.checkpoint.safetensors_io import Shard, TensorSpec
from megatron_dsv41.checkpoint.storage import scale_name, stored_format
from megatron_dsv41.config import DSV41Config


def truncate(config: DSV41Config, layers: int | None = None, experts: int | None = None) -> DSV41Config:
    """The config of the first `layers` layers with the first `experts` experts each; None: all of them."""
    layers = config.num_hidden_layers if layers is None else layers
    experts = config.n_routed_experts if experts is None else experts
    if not 1 <= layers <= config.num_hidden_layers:
        raise ValueError(f"layers must be 1 to num_hidden_layers = {config.num_hidden_layers}, got {layers}")
    if not config.num_experts_per_tok <= experts <= config.n_routed_experts:
        raise ValueError(
            f"experts must be num_experts_per_tok = {config.num_experts_per_tok} to n_routed_experts = "
            f"{config.n_routed_experts}, got {experts}"
        )
    if layers == config.num_hidden_layers:
        return dataclasses.replace(config, n_routed_experts=experts)
    candidate = config.candidate_source_layer_id
    tables = zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True)
    kept_tables = [(layer, rows) for layer, rows in tables if layer < layers]
    return dataclasses.replace(
        config,
        num_hidden_layers=layers,
        n_routed_experts=experts,
        compress_ratios=config.compress_ratios[:layers],
        kv_source_layer_ids=tuple(i for i in config.kv_source_layer_ids if i < layers),
        index_source_layer_ids=tuple(i for i in config.index_source_layer_ids if i < layers),
        candidate_source_layer_id=candidate if candidate < layers else -1,
        engram_layer_ids=tuple(layer for layer, _ in kept_tables),
        engram_num_embeddings=tuple(rows for _, rows in kept_tables),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
    )


def kept_shards(shards: tuple[Shard, ...], config: DSV41Config) -> tuple[Shard, ...]:
    """The source's files with the tensors, and the rows, that the smaller model keeps."""
    stored: Inventory = {spec.name: (spec.dtype, spec.shape) for shard in shards for spec in shard.tensors}
    shapes: dict[str, tuple[int, ...]] = {name: stored[name][1] for name in carried_tensors(config) if name in stored}
    for binding in bind(config):
        for name in binding.released:
            form = stored_format(stored[name][0], binding.storage)
            shapes[name] = binding.part_shape if form is None else form.data_shape(binding.part_shape)
    for name in list(shapes):
        if scale_name(name) in stored:
            shapes[scale_name(name)] = stored[scale_name(name)][1]
    kept = [
        dataclasses.replace(
            shard, tensors=tuple(TensorSpec(s.name, s.dtype, shapes[s.name]) for s in shard.tensors if s.name in shapes)
        )
        for shard in shards
    ]
    return tuple(shard for shard in kept if shard.tensors)
