"""Lightning indexer: keys of a KV source, queries of a selecting layer (SPEC 8.5, 9)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.layer_plan import LayerPlan
from megatron_dsv41.modules.primitives import Primitives
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.phase import Phase

CosSin = tuple[Tensor, Tensor]


class Indexer(nn.Module):
    """Query side (`wq_b`, `weights_proj`) of Full and Reindex layers; key side (`wk`, `k_norm`) of Full layers only.

    Everything that enters is detached: only the index loss trains these parameters. While it is off no graph is built
    and they are frozen.
    """

    def __init__(self, config: DSV41Config, plan: LayerPlan, phase: Phase, primitives: Primitives, ops: Ops):
        super().__init__()
        self.config, self.plan, self.phase, self.ops = config, plan, phase, ops
        heads, dim = config.index_n_heads, config.index_head_dim
        self.wq_b = primitives.linear("attn.indexer.wq_b", config.q_lora_rank, heads * dim)
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
            q_TID = self.wq_b(q_latent_TR.detach()).unflatten(-1, (-1, dim))
            q_TID = self.ops["rope.rotate"](q_TID, *cos_sin_T)
            return q_TID, self.weights_proj(x_TD.detach()) * (dim**-0.5 * heads**-0.5)

    def quantize(self, x: Tensor) -> Tensor:
        """MXFP4 of queries or keys where the phase asks for it."""
        return self.ops["quant.fake_mxfp4"](x) if self.phase.index_mxfp4 else x
