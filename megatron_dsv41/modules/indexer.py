"""Lightning indexer: keys of a KV source, queries of a selecting layer (SPEC 8.5, 9)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.layer_plan import LayerPlan
from megatron_dsv41.modules.primitives import Primitives
from megatron_dsv41.ops.documents import Entries
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.phase import Phase

CosSin = tuple[Tensor, Tensor]


class QuerySide(nn.Module):
    """The up-projection of an index source's queries, and the selection made with them."""

    def __init__(self, config: DSV41Config, plan: LayerPlan, phase: Phase, primitives: Primitives, ops: Ops):
        super().__init__()
        self.config, self.plan, self.phase, self.ops = config, plan, phase, ops
        self.wq_b = primitives.linear(
            "attn.indexer.wq_b", config.q_lora_rank, config.index_n_heads * config.index_head_dim
        )

    def rotated_queries(self, q_latent_TR: Tensor, cos_sin_T: CosSin) -> Tensor:
        """Query latents -> index queries [T, I, index_head_dim], rotated, not yet quantized."""
        q_TID = self.wq_b(q_latent_TR.detach()).unflatten(-1, (-1, self.config.index_head_dim))
        return self.ops["rope.rotate"](q_TID, *cos_sin_T)

    @property
    def restricted(self) -> bool:
        """The layer selects inside the candidate pool."""
        return self.plan.uses_candidates and self.phase.hsi

    def select(
        self, q_TID: Tensor, weights_TI: Tensor, keys_CD: Tensor, candidates: Tensor | None, entries: Entries
    ) -> tuple[Tensor, Tensor | None]:
        """(topk_indices, candidates) of SharedState; the pool only where this layer makes it. Without gradient."""
        config, pools = self.config, self.plan.is_candidate_source
        return self.ops["csa2.select"](
            self.quantize(q_TID.detach()),
            weights_TI.detach(),
            self.quantize(keys_CD.detach()),
            entries,
            config.index_topk,
            candidates,
            config.candidate_block_size,
            config.candidate_topk_blocks if pools else 0,
        )

    def quantize(self, x: Tensor) -> Tensor:
        """MXFP4 of queries or keys where the phase asks for it."""
        return self.ops["quant.fake_mxfp4"](x) if self.phase.index_mxfp4 else x


class Indexer(QuerySide):
    """Query side (`wq_b`, `weights_proj`) of Full and Reindex layers; key side (`wk`, `k_norm`) of Full layers only.

    Everything that enters is detached: only the index loss trains these parameters. While it is off no graph is built
    and they are frozen.
    """

    def __init__(self, config: DSV41Config, plan: LayerPlan, phase: Phase, primitives: Primitives, ops: Ops):
        super().__init__(config, plan, phase, primitives, ops)
        heads, dim = config.index_n_heads, config.index_head_dim
        self.weights_proj = primitives.linear("attn.indexer.weights_proj", config.hidden_size, heads)
        if plan.owns_kv:
            self.wk = primitives.linear("attn.indexer.wk", config.head_dim, dim)
            self.k_norm = primitives.norm("attn.indexer.k_norm", dim, config.rms_norm_eps)
        if not self.trained:  # else weight decay would wear them away without any gradient
            self.requires_grad_(False)

    @property
    def trained(self) -> bool:
        """The index loss is on."""
        return self.phase.index_loss != "off"

    def keys(self, latent_CD: Tensor, cos_sin_C: CosSin) -> Tensor:
        """Unrotated latents -> rotated index keys [C, index_head_dim], not yet quantized."""
        with torch.set_grad_enabled(self.trained and torch.is_grad_enabled()):
            return self.ops["rope.rotate"](self.k_norm(self.wk(latent_CD.detach())), *cos_sin_C)

    def queries(self, x_TD: Tensor, q_latent_TR: Tensor, cos_sin_T: CosSin) -> tuple[Tensor, Tensor]:
        """Index queries [T, I, index_head_dim], rotated, not yet quantized, and head weights [T, I]."""
        dim, heads = self.config.index_head_dim, self.config.index_n_heads
        with torch.set_grad_enabled(self.trained and torch.is_grad_enabled()):
            q_TID = self.rotated_queries(q_latent_TR, cos_sin_T)
            return q_TID, self.weights_proj(x_TD.detach()) * (dim**-0.5 * heads**-0.5)
