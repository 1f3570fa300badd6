"""One layer: Engram write, attention site, FFN site (SPEC 6, 7)."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.layer_plan import LayerPlan
from megatron_dsv41.modules.attention import Attention
from megatron_dsv41.modules.batch import Batch
from megatron_dsv41.modules.engram import Engram
from megatron_dsv41.modules.hyper_connection import HyperConnection
from megatron_dsv41.modules.moe import MoE
from megatron_dsv41.modules.primitives import Primitives
from megatron_dsv41.modules.shared_state import SharedState
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.phase import Phase


class Aux(NamedTuple):
    """What a layer reports beside its output.

    Losses to add (already weighted, fp32 []), expert load fp32 [2, E], and of a probed selection the sums of
    `selection_quality` fp32 [5], else zeros.
    """

    balance_loss: Tensor
    index_loss: Tensor
    expert_load: Tensor
    index_quality: Tensor

    @property
    def loss(self) -> Tensor:
        """Both auxiliary losses."""
        return self.balance_loss + self.index_loss

    @classmethod
    def stack(cls, layers: list[Self]) -> Self:
        """Per-layer values with a leading layer axis."""
        return cls(*(torch.stack(values) for values in zip(*layers, strict=True)))


class Block(nn.Module):
    """One layer of the backbone.

    streams [s, b, n, d]; pre_mix [s, b, n] fp32, the collapse weights that the previous site predicted; state: what
    layers share. All three come back, with this layer's Aux. Inputs are never modified. live_after: the state fields
    that the block hands on; recorded: see Attention.
    """

    def __init__(
        self,
        config: DSV41Config,
        plan: LayerPlan,
        phase: Phase,
        primitives: Primitives,
        ops: Ops,
        live_after: frozenset[str],
        recorded: frozenset[str] = frozenset(),
    ):
        super().__init__()
        self.plan, self.ops, self.live_after = plan, ops, live_after
        d, eps = config.hidden_size, config.rms_norm_eps
        if plan.has_engram:
            self.engram = Engram(config, plan.layer, primitives, ops)
        self.attn_hc = HyperConnection(config, "attn_hc", primitives, ops)
        self.attn_norm = primitives.norm("attn_norm", d, eps)
        self.attn = Attention(config, plan, phase, primitives, ops, recorded)
        self.ffn_hc = HyperConnection(config, "ffn_hc", primitives, ops)
        self.ffn_norm = primitives.norm("ffn_norm", d, eps)
        self.ffn = MoE(config, phase, primitives, ops)

    def forward(
        self, streams_SBND: Tensor, pre_mix_SBN: Tensor, state: SharedState, batch: Batch
    ) -> tuple[Tensor, Tensor, SharedState, Aux]:
        """See class."""
        if self.plan.has_engram:
            streams_SBND = self.engram(streams_SBND, batch)
        streams_SBND, x_SBD, mix = self.attn_hc(streams_SBND, pre_mix_SBN)
        y_SBD, state, index = self.attn(self.attn_norm(x_SBD), state, batch)
        streams_SBND, x_SBD, mix = self.ffn_hc(streams_SBND, mix.pre, (y_SBD, mix))
        y_SBD, routing = self.ffn(self.ffn_norm(x_SBD), batch)
        streams_SBND = self.ops["mhc.expand"](y_SBD, streams_SBND, mix.post, mix.comb)
        aux = Aux(routing.balance_loss, index.loss, routing.expert_load, index.quality)
        return streams_SBND, mix.pre, state.keep(self.live_after), aux
