"""Layouts: how layers fall on stages, and what cannot work, with the setting, its limit and what to set instead.

Imports no Megatron, so that a plan can ask.
"""

from __future__ import annotations

import math

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.parallel.payload import Crossing, CrossingPlanner, Lengths
from megatron_dsv41.parallel.stages import even_stages, parse_layout
from megatron_dsv41.phase import Phase
from megatron_dsv41.run_config import Parallel


def stage_layers(config: DSV41Config, parallel: Parallel) -> list[range]:
    """Layers of every stage in pipeline order: stage = chunk * pp + pipeline rank."""
    stages = parallel.pp * parallel.vpp
    if parallel.layout is not None:
        return parse_layout(parallel.layout, config.num_hidden_layers, stages)
    return even_stages(config.num_hidden_layers, stages)


def plan_crossings(config: DSV41Config, phase: Phase, parallel: Parallel, batch: int, seq: int) -> tuple[Crossing, ...]:
    """What crosses before every stage but the first, for micro-batches of `batch` sequences of `seq` tokens."""
    starts = [stage.start for stage in stage_layers(config, parallel)[1:]]
    return crossing_planner(config, phase, parallel, batch, seq).choose(starts, parallel.shadows)


def crossing_planner(config: DSV41Config, phase: Phase, parallel: Parallel, batch: int, seq: int) -> CrossingPlanner:
    """What plans the cuts of a layout."""
    return CrossingPlanner(config, phase, Lengths(batch, seq, parallel.cp, parallel.tp, parallel.sp))


def check_layout(config: DSV41Config, parallel: Parallel) -> None:
    """ValueError when `parallel` cannot split a model of `config`, whatever the data."""
    tp, etp = parallel.tp, parallel.expert_tp
    _divides("parallel.tp", tp, config, "o_groups", "num_attention_heads", "moe_intermediate_size", "vocab_size")
    _divides("parallel.etp", etp, config, "moe_intermediate_size")
    _divides("parallel.ep", parallel.ep, config, "n_routed_experts")
    if etp not in (1, tp):
        raise ValueError(f"parallel.etp {etp} must be 1 or parallel.tp = {tp}")
    if tp > 1 and not parallel.sp and (parallel.ep > 1 or etp != tp):
        raise ValueError("experts that are split otherwise than the rest need parallel.sp=true where parallel.tp > 1")
    if parallel.dispatcher == "flex":
        raise ValueError(
            "parallel.dispatcher flex runs on DeepEP or HybridEP, which this backend does not drive: set "
            "parallel.dispatcher=auto, alltoall or allgather"
        )
    if parallel.vpp > 1 and parallel.pp == 1:
        raise ValueError("parallel.vpp interleaves the stages of several pipeline ranks: it needs parallel.pp > 1")
    stage_layers(config, parallel)
    if parallel.engram is not None:
        _check_owners(config, parallel.engram)


def _check_owners(config: DSV41Config, owners: int) -> None:
    if not config.engram_layer_ids:
        raise ValueError(f"parallel.engram {owners}: the model has no Engram tables; leave the setting out")
    fewest = min(config.engram_num_embeddings)
    if owners > fewest:
        raise ValueError(f"parallel.engram {owners} exceeds the {fewest} rows of the smallest table: set it lower")


def _divides(setting: str, size: int, config: DSV41Config, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value % size:
            raise ValueError(f"{setting} {size} does not divide {name} {value}: set {setting}={math.gcd(value, size)}")


def sequence_pieces(parallel: Parallel) -> int:
    """Equal pieces that a sequence is cut into."""
    return parallel.cp * (parallel.tp if parallel.sp else 1)
