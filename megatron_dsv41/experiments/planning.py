"""What a run will be, before anything starts: layers, parameters, FLOPs, memory, steps. Plain values for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.experiments.activations import dtype_bytes
from megatron_dsv41.experiments.communication import (
    Stage,
    context_traffic,
    expert_traffic,
    pipeline_traffic,
    tensor_traffic,
)
from megatron_dsv41.experiments.engram_memory import owner_memory
from megatron_dsv41.experiments.flops import (
    active_parameters,
    count_parameters,
    flops_per_token,
    kv_bytes_per_token,
)
from megatron_dsv41.experiments.memory import Layout, StageMemory, memory_per_rank
from megatron_dsv41.layer_plan import STATE_FIELDS, LayerPlan, live_at, plan_layers
from megatron_dsv41.optim.groups import ParameterGroup
from megatron_dsv41.optim.settings import Optimizer
from megatron_dsv41.parallel.payload import Crossing, Lengths
from megatron_dsv41.phase import Phase
from megatron_dsv41.precision import KEPT, RECIPES, Precision, describe_capability, linear_roles, low_roles
from megatron_dsv41.run_config import Parallel


def describe_model(config: DSV41Config, phase: Phase, seq_length: int) -> dict[str, Any]:
    """Layers, parameters by kind, active parameters, KV bytes and FLOPs per token of one architecture."""
    count, active = count_parameters(config), active_parameters(config)
    return {
        "layers": [describe_layer(config, plan) for plan in plan_layers(config)],
        "parameters": {
            "by_kind": count.by_kind,
            "backbone": count.backbone,
            "total": count.total,
            "active_prefill": active.prefill,
            "active_decode": active.decode,
        },
        "kv_bytes_per_token": kv_bytes_per_token(config),
        "flops_per_token": dataclasses.asdict(flops_per_token(config, seq_length, phase)),
        "seq_length": seq_length,
    }


def describe_layer(config: DSV41Config, plan: LayerPlan) -> dict[str, Any]:
    """One row of the layer table; `live` and `boundary_bytes` are of the boundary before the layer."""
    live = live_at(plan_layers(config), plan.layer)
    return {
        "layer": plan.layer,
        "kind": plan.kind.value,
        "ratio": plan.ratio,
        "kv_source": plan.kv_source,
        "topk_source": plan.topk_source,
        "engram": plan.has_engram,
        "candidates": "makes" if plan.is_candidate_source else "uses" if plan.uses_candidates else "",
        "live": [field for field in STATE_FIELDS if field in live],
        "boundary_bytes": boundary_bytes(config, plan.layer) if plan.layer else 0,
    }


def boundary_bytes(config: DSV41Config, boundary: int) -> float:
    """Bytes per token that a pipeline cut before layer `boundary` has to send: streams, pre-mix and live state.

    Latents (fp32, so that readers' gradients add in fp32) and keys: one per `ratio` tokens; selections int32 per token.
    """
    c, plans = config, plan_layers(config)
    ratio = plans[boundary - 1].ratio or 1
    sizes = {
        "compressed_kv": c.head_dim * 4 / ratio,
        "index_keys": c.index_head_dim * dtype_bytes(c) / ratio,
        "topk_indices": 4 * c.index_topk,
        "candidates": 4 * c.candidate_topk_blocks,
    }
    streams = c.hc_mult * (c.hidden_size * dtype_bytes(c) + 4)
    return streams + sum(sizes[field] for field in live_at(plans, boundary))


def describe_cut(chosen: Crossing, alternatives: Iterable[Crossing], lengths: Lengths) -> dict[str, Any]:
    """One row of the table of pipeline cuts. Bytes per token of all ranks that share a micro-batch together.

    The alternative is to send what was chosen to be selected again, or the cheapest way to select again.
    """
    ranks, tokens = lengths.tensor * lengths.context, lengths.batch * lengths.seq

    def describe(cut: Crossing) -> dict[str, Any]:
        return {
            "fields": [field.name for field in cut.fields],
            "shadows": list(cut.shadows),
            "forward": cut.forward_bytes * ranks / tokens,
            "backward": cut.backward_bytes * ranks / tokens,
        }

    others = [cut for cut in alternatives if bool(cut.shadows) != bool(chosen.shadows)]
    cheapest = min(others, key=lambda cut: cut.forward_bytes + cut.backward_bytes, default=None)
    return {"layer": chosen.boundary, **describe(chosen), "alternative": describe(cheapest) if cheapest else None}


def describe_traffic(
    config: DSV41Config, phase: Phase, parallel: Parallel, lengths: Lengths, stages: Sequence[Stage]
) -> list[dict[str, Any]]:
    """Bytes that one rank of every stage sends per micro-batch, forward and backward, over its groups.

    "expert" is None where it depends on the routing.
    """

    def describe(stage: Stage) -> dict[str, Any]:
        expert = expert_traffic(config, parallel, lengths, stage)
        return {
            "layers": [plan.layer for plan in stage.layers],
            "tensor": dataclasses.asdict(tensor_traffic(config, phase, lengths, stage)),
            "context": dataclasses.asdict(context_traffic(config, phase, lengths, stage)),
            "expert": None if expert is None else dataclasses.asdict(expert),
            "pipeline": dataclasses.asdict(pipeline_traffic(stage)),
        }

    return [describe(stage) for stage in stages]


def describe_optimizer(
    groups: Sequence[ParameterGroup], settings: Optimizer, low_precision: Collection[str]
) -> list[dict[str, Any]]:
    """One row per parameter group. low_precision: names of the parameters that need an fp32 copy."""
    return [
        {
            "role": group.role,
            "update": "frozen" if group.frozen else group.algorithm.value,
            "decay": group.decay,
            "lr_multiplier": group.lr,
            "tensors": len(group.shapes),
            "matrices": group.matrices,
            "matrix": list(group.matrix),
            "parameters": group.num_parameters,
            "state_bytes": group.state_bytes(settings, next(iter(group.shapes)) in low_precision),
        }
        for group in groups
    ]


def describe_memory(config: DSV41Config, layout: Layout) -> dict[str, Any]:
    """Bytes per rank of every pipeline stage, of the fullest rank, and of one table per row on its owner."""
    stages = memory_per_rank(config, layout)
    return {
        "layout": dataclasses.asdict(layout) | {"world": layout.world},
        "stages": [_describe_stage(stage) for stage in stages],
        "largest": max(stage.total for stage in stages),
        "tables": [
            dataclasses.asdict(table) | {"copies": table.copies, "total": table.total}
            for table in owner_memory(config, layout)
        ],
    }


def _describe_stage(stage: StageMemory) -> dict[str, Any]:
    owned = dataclasses.asdict(stage.engram) | {"rows": stage.engram.rows}
    return dataclasses.asdict(stage) | {"engram": owned, "total": stage.total, "host": stage.host}


def describe_precision(config: DSV41Config, precision: Precision, tensor: int) -> dict[str, Any]:
    """Which linears multiply in low precision, with their sizes on one of `tensor` ranks; which do not, and why."""
    assert precision.name is not None
    recipe, low = RECIPES[precision.name], low_roles(config, precision)
    rows: list[dict[str, Any]] = []
    for role, linear in linear_roles(config).items():
        rows.append(
            {
                "role": role,
                "multiplies_in": precision.name if role in low else "bf16",
                "inputs": linear.d_in // (tensor if linear.split == "row" else 1),
                "outputs": linear.d_out // (tensor if linear.split == "column" else 1),
                "reason": "" if role in low else "not in precision.roles",
            }
        )
    rows += [
        {"role": role, "multiplies_in": "as without", "inputs": None, "outputs": None, "reason": why}
        for role, why in KEPT.items()
    ]
    needs = f"scales: {recipe.scales}; needs transformer-engine, compute capability {describe_capability(recipe)}"
    return {"recipe": precision.name, "needs": needs, "linears": rows}
