"""A copy of an index source's query side that selects again on a later pipeline stage."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.layer_plan import LayerPlan
from megatron_dsv41.modules.attention import layer_frequencies
from megatron_dsv41.modules.batch import Batch
from megatron_dsv41.modules.indexer import QuerySide
from megatron_dsv41.modules.primitives import Primitives
from megatron_dsv41.modules.shared_state import SharedState
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.ops.rope.ref import cos_sin
from megatron_dsv41.phase import Phase


class ShadowIndexer(QuerySide):
    """Makes `outputs` (state fields) from the query inputs that layer `plan` left in the state field `query`.

    Its weight is the owner's, copied whenever that changes. Selection has no gradient, so the copy has none either.
    """

    frequencies: Tensor

    def __init__(
        self,
        config: DSV41Config,
        plan: LayerPlan,
        phase: Phase,
        primitives: Primitives,
        ops: Ops,
        query: str,
        outputs: frozenset[str],
    ):
        super().__init__(config, plan, phase, primitives, ops)
        self.query, self.outputs = query, outputs
        self.requires_grad_(False)
        self.register_buffer("frequencies", layer_frequencies(config, plan.ratio, phase.yarn), persistent=False)

    @torch.no_grad()
    def forward(self, state: SharedState, batch: Batch) -> SharedState:
        """The state with what the source selected, by the same operations on the same values."""
        q_latent_TR, weights_TI = state.need(self.query).split(
            [self.config.q_lora_rank, self.config.index_n_heads], dim=-1
        )
        turn_T = cos_sin(batch.documents.position_T, self.frequencies)
        topk, candidates = self.select(
            self.rotated_queries(q_latent_TR.contiguous(), turn_T),
            weights_TI.contiguous(),
            state.need("index_keys"),
            state.need("candidates") if self.restricted else None,
            batch.entries[self.plan.ratio],
        )
        found = {"topk_indices": topk, "candidates": candidates}
        return dataclasses.replace(state, **{name: found[name] for name in self.outputs})
