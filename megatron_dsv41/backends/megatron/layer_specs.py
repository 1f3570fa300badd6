"""Layers as Megatron's ModuleSpecs: what kind of block stands where, as data that a user may change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.layer_plan import LayerPlan, live_at, plan_layers
from megatron_dsv41.modules.block import Block
from megatron_dsv41.modules.shadow import ShadowIndexer
from megatron_dsv41.parallel.payload import Crossing, kept_for, query_field, shadow_outputs


def layer_specs(config: DSV41Config, layers: Sequence[int], after: Crossing | None = None) -> dict[int, ModuleSpec]:
    """Layer -> spec of its block, for the layers of one stage, which hands on what crosses `after`.

    `build_module(spec, config=..., phase=..., primitives=..., ops=...)` makes the block: the parts come from the
    primitives by role, with the process groups that these were given. Another `module` with Block's signature takes a
    layer's place.
    """
    plans = plan_layers(config)
    return {layer: ModuleSpec(module=Block, params=_block_params(plans, layer, after)) for layer in layers}


def shadow_specs(config: DSV41Config, before: Crossing | None) -> dict[int, ModuleSpec]:
    """Layer -> spec of the shadow of its indexer, for a stage that begins at the cut `before`."""
    if before is None:
        return {}
    plans, specs = plan_layers(config), {}
    for source in before.shadows:
        outputs = shadow_outputs(plans, before.boundary, source)
        params = {"plan": plans[source], "query": query_field(plans[source]), "outputs": outputs}
        specs[source] = ModuleSpec(module=ShadowIndexer, params=params)
    return specs


def _block_params(plans: Sequence[LayerPlan], layer: int, after: Crossing | None) -> dict[str, Any]:
    live, recorded = live_at(plans, layer + 1), frozenset[str]()
    if after is not None:
        live |= kept_for(after, plans, layer)
        recorded = frozenset({query_field(plans[layer])} if layer in after.shadows else ())
    return {"plan": plans[layer], "live_after": live, "recorded": recorded}
