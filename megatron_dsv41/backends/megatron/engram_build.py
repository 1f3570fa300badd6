"""From settings to the owned Engram tables of a rank, filled with initial rows."""

from __future__ import annotations

import functools

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_dsv41.backends.megatron.config import DSV41TransformerConfig
from megatron_dsv41.backends.megatron.engram import EngramExchange
from megatron_dsv41.backends.megatron.engram_tables import EngramGroups, OwnedTable
from megatron_dsv41.backends.megatron.layout import Layout
from megatron_dsv41.backends.megatron.pipeline import Boundaries
from megatron_dsv41.modules.engram import EngramHash, draw_rows
from megatron_dsv41.ops.engram.rows import RowDtype, RowFormat
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.run_config import Engram


def own_tables(
    config: DSV41TransformerConfig,
    token_map: Tensor,
    boundaries: Boundaries,
    groups: ProcessGroupCollection,
    table: RowDtype,
    settings: Engram,
    *,
    frozen: bool = False,
) -> EngramExchange | None:
    """The exchange of this rank and its rows; None where tables are parameters, or the model has none. Collective."""
    model, owners = config.architecture, config.engram_owners
    if model is None or owners is None or not model.engram_layer_ids:
        return None
    pipeline, device = groups.pp, torch.device(torch.cuda.current_device())
    stages = boundaries.stages[pipeline.rank() :: pipeline.size()]
    layers = [layer for layer in model.engram_layer_ids if any(layer in stage for stage in stages)]
    layout, own = Layout.of(groups, config.sequence_parallel), EngramGroups.create(owners, layers)
    dtype, form = getattr(torch, model.dtype), RowFormat(table, model.engram_head_dim)
    tables, ops = {}, Ops(config.ops)
    for layer in own.holders:
        tables[layer] = OwnedTable(
            layer,
            model.engram_rows(layer),
            form,
            getattr(torch, settings.master),
            own,
            device,
            pinned=settings.memory == "host",
            ops=ops,
        )
        draw = functools.partial(draw_rows, config.seed, layer, dim=form.dim, std=model.initializer_range)
        tables[layer].fill(lambda rows, draw=draw: draw(rows).to(dtype))
    return EngramExchange(
        EngramHash(model, token_map.to(device), ops["engram.hash"]),
        layout,
        own,
        tables,
        layers,
        form,
        dtype=dtype,
        gradient_scale=1 / groups.dp_cp.size(),  # Megatron's DDP averages every other gradient
        window=settings.window,
        frozen=frozen,
        ops=ops,
    )
