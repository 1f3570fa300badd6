"""What a ladder will cost, before anything starts. Plain values for tables and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.experiments.flops import active_parameters, count_parameters
from megatron_dsv41.experiments.ladder import Ladder
from megatron_dsv41.experiments.ladder_cells import PlannedCell
from megatron_dsv41.experiments.memory import Layout, memory_per_rank
from megatron_dsv41.experiments.run_flops import training_flops_per_token
from megatron_dsv41.layer_plan import plan_layers
from megatron_dsv41.run_config import Run

# Ways to count N. `flops` is C / 6D: what the compute itself says.
N_CONVENTIONS = ("active", "prefill", "backbone", "non_embedding", "total", "flops")


def count_n(config: DSV41Config, training_flops_per_token: float) -> dict[str, float]:
    """Parameters of a text model by each convention.

    active: matrices that a generated token multiplies with; prefill: those of the encoder half; backbone: all but
    Engram tables; non_embedding: backbone without embedding and head; total: everything; flops: C / 6D.
    """
    count, active = count_parameters(config), active_parameters(config)
    embeddings = count.by_kind["embedding"] + count.by_kind["head"]
    return {
        "active": active.decode,
        "prefill": active.prefill,
        "backbone": count.backbone,
        "non_embedding": count.backbone - embeddings,
        "total": count.total,
        "flops": training_flops_per_token / 6,
    }


def describe_cell(ladder: Ladder, planned: PlannedCell, layout_of: Callable[[Run, int], Layout]) -> dict[str, Any]:
    """One row of the plan: sizes, tokens, FLOPs, bytes of the fullest rank, hours (None without hardware.tflops).

    layout_of: of a run on so many ranks, with its optimizer's state.
    """
    run, cell = planned.run, planned.cell
    config, per_token = run.architecture(), training_flops_per_token(run)
    tokens = run.steps * run.tokens_per_step
    memory = max(stage.total for stage in memory_per_rank(config, layout_of(run, ladder.hardware.ranks)))
    flops = tokens * per_token
    rate = ladder.hardware.tflops
    return {
        "cell": planned.id,
        **dataclasses.asdict(cell),
        "hidden_size": config.hidden_size,
        "n": count_n(config, per_token),
        "tokens": tokens,
        "steps": run.steps,
        "batch_tokens": run.tokens_per_step,
        "lr": run.optimizer.lr,
        "flops": flops,
        "memory_bytes": memory,
        "hours": flops / (rate * 1e12 * ladder.hardware.ranks) / 3600 if rate else None,
    }


def describe_rung(planned: PlannedCell) -> dict[str, Any]:
    """The shape of one rung: its layers by kind and parameters by kind."""
    config = planned.run.architecture()
    plans = plan_layers(config)
    count = count_parameters(config)
    return {
        "arm": planned.cell.arm,
        "depth": planned.cell.depth,
        "hidden_size": config.hidden_size,
        "heads": f"{config.num_attention_heads} x {config.head_dim}",
        "kinds": [
            f"{plan.kind.value}{plan.ratio if plan.owns_kv else ''}{'+pool' if plan.is_candidate_source else ''}"
            f"{'+engram' if plan.has_engram else ''}"
            for plan in plans
        ],
        "decoder_start": config.decoder_start,
        "by_kind": count.by_kind,
        "n": count_n(config, training_flops_per_token(planned.run)),
    }


def describe_ladder(
    ladder: Ladder, cells: Sequence[PlannedCell], layout_of: Callable[[Run, int], Layout]
) -> dict[str, Any]:
    """The whole plan: rungs, cells, totals, and what does not fit in words. layout_of: as of `describe_cell`."""
    rows = [describe_cell(ladder, cell, layout_of) for cell in cells]
    rungs = {(c.cell.arm, c.cell.depth): c for c in reversed(cells)}
    hours = [row["hours"] for row in rows]
    return {
        "name": ladder.name,
        "rungs": [describe_rung(rungs[key]) for key in dict.fromkeys((c.cell.arm, c.cell.depth) for c in cells)],
        "cells": rows,
        "total": {
            "cells": len(rows),
            "tokens": sum(row["tokens"] for row in rows),
            "flops": sum(row["flops"] for row in rows),
            "hours": None if None in hours else sum(hours),
        },
        "problems": _problems(ladder, rows),
    }


def _problems(ladder: Ladder, rows: Sequence[dict[str, Any]]) -> list[str]:
    limit = ladder.hardware.memory_gb
    return [
        f"cell {row['cell']} needs about {row['memory_bytes'] / 1e9:.3g} GB per rank, hardware.memory_gb is {limit:g}"
        for row in rows
        if limit is not None and row["memory_bytes"] > limit * 1e9
    ]


def check_sharing(
    ladder: Ladder, cells: Sequence[PlannedCell], layout_of: Callable[[Run, int], Layout], sharers: int
) -> None:
    """ValueError unless any `sharers` cells fit into hardware.memory_gb together. layout_of: as of `describe_cell`."""
    limit = ladder.hardware.memory_gb
    if limit is None:
        raise ValueError(f"{sharers} cells on one GPU: hardware.memory_gb must say what it has, to see that they fit")
    rows = [describe_cell(ladder, cell, layout_of) for cell in cells]
    rows = sorted(rows, key=lambda row: row["memory_bytes"], reverse=True)[:sharers]
    total = sum(row["memory_bytes"] for row in rows)
    if total > limit * 1e9:
        raise ValueError(
            f"{sharers} cells on one GPU need up to {total / 1e9:.3g} GB ({', '.join(row['cell'] for row in rows)}), "
            f"hardware.memory_gb is {limit:g}: lower --slots"
        )
