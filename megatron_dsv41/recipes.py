"""Recipes: sections of a run file that a run builds on with `recipe: NAME`, and changes where it says otherwise.

What is published is as published (SPEC 17). Lengths, rates and shares of the others are unpublished: starting points.
Layouts belong to a machine, and so to the run; only long sequences bring the context parallelism they need.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dsv41.config import nearest

Sections = dict[str, Any]

_PRETRAINING = {"hsi": False, "main_kv_fp4": False, "index_loss": "sparse"}
_ONE_MEGA = {"data": {"seq_length": 2**20}, "parallel": {"cp": 16}}


def _long(**changes: Any) -> Sections:
    """bf16 with recomputed blocks and the published optimizer."""
    return {
        "data": {"seq_length": 2**16, "packing": "best_fit"},
        "train": {"precision": "bf16", "recompute": "block"},
        "optimizer": {"name": "published", "ns_dtype": "bfloat16"} | changes.pop("optimizer"),
        **changes,
    }


RECIPES: dict[str, Sections] = {
    # 45 T tokens in batches of 96 Mi; sequences of 64 Ki, of 1 Mi from 34 T on.
    "pretrain-flash": _long(
        batch={"micro": 1, "tokens": 96 * 2**20},
        optimizer={"lr": 2.6e-4},
        schedule={"shape": "published"},
        phase=_PRETRAINING,
        phases=[
            {"name": "64k", "tokens": 34_000_000_000_000},
            {"name": "1m", "tokens": 11_000_000_000_000, **_ONE_MEGA},
        ],
    ),
    # From a checkpoint at the constant rate (train.init_from) down to nothing, on the data that should weigh most.
    "anneal": _long(
        batch={"micro": 1, "tokens": 96 * 2**20},
        optimizer={"lr": 2.6e-4},
        phase=_PRETRAINING,
        phases=[{"name": "anneal", "tokens": 1_000_000_000_000, "lr": {"start": 2.6e-4, "end": 0.0}}],
    ),
    # From a checkpoint of short sequences (train.init_from) to 1 Mi, the batch in tokens constant.
    "long-context": _long(
        batch={"micro": 1, "tokens": 96 * 2**20},
        optimizer={"lr": 2.6e-5},
        phase=_PRETRAINING,
        phases=[
            {"name": "256k", "tokens": 500_000_000_000, "data": {"seq_length": 2**18}, "parallel": {"cp": 4}},
            {"name": "1m", "tokens": 500_000_000_000, **_ONE_MEGA},
        ],
    ),
    # From a base model (train.init_from) on chats (dsv41 prep --chat): everything that inference approximates is on.
    "posttrain-sft": _long(
        batch={"micro": 1, "tokens": 4 * 2**20},
        optimizer={"lr": 1e-5},
        phase={
            "hsi": True,
            "main_kv_fp4": True,
            "index_loss": "sparse",
            "quantized_weights": True,
            "replay": 0.5,
        },
        phases=[
            {"name": "warmup", "steps": 100, "lr": {"start": 0.0, "end": 1e-5}},
            {"name": "sft", "tokens": 10_000_000_000, "lr": {"end": 1e-6, "shape": "cosine"}},
        ],
    ),
}


def on_recipe(values: Mapping[str, Any]) -> dict[str, Any]:
    """The run file with its `recipe`, if any, underneath: sections are merged key by key, lists replaced.

    ValueError for an unknown name.
    """
    changes = dict(values)
    name = changes.pop("recipe", None)
    if name is None:
        return changes
    if name not in RECIPES:
        known = ", ".join(sorted(RECIPES))
        raise ValueError(f"recipe {name!r} does not exist{nearest(str(name), set(RECIPES))}; recipes: {known}")
    return _merged(RECIPES[name], changes)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
