"""Layers as Megatron's ModuleSpecs: what kind of block stands where, as data that a user may change."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.layer_plan import live_at, plan_layers
from megatron_dsv41.modules.block import Block


def layer_specs(config: DSV41Config, layers: Sequence[int]) -> dict[int, ModuleSpec]:
    """Layer -> spec of its block, for the layers of one stage.

    `build_module(spec, config=..., phase=..., primitives=..., ops=...)` makes the block: the parts come from the
    primitives by role, with the process groups that these were given. Another `module` with Block's signature takes a
    layer's place.
    """
    plans = plan_layers(config)
    return {
        layer: ModuleSpec(module=Block, params={"plan": plans[layer], "live_after": live_at(plans, layer + 1)})
        for layer in layers
    }
