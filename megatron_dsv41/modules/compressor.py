"""Compressor of a KV source layer: `ratio` tokens become one latent (SPEC 8.4)."""

from __future__ import annotations

from torch import Tensor, nn

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.modules.primitives import Primitives
from megatron_dsv41.ops.documents import Groups
from megatron_dsv41.ops.registry import Ops


class Compressor(nn.Module):
    """Latents before rotary. Ratio 1 projects; ratio > 1 pools with a learned gate per channel, in fp32."""

    def __init__(self, config: DSV41Config, ratio: int, primitives: Primitives, ops: Ops):
        super().__init__()
        self.ratio, self.ops = ratio, ops
        pooled = ratio > 1
        self.wkv = primitives.linear("attn.compressor.wkv", config.hidden_size, config.head_dim, fp32=pooled)
        if pooled:
            self.wgate = primitives.linear("attn.compressor.wgate", config.hidden_size, config.head_dim, fp32=True)
        self.norm = primitives.norm("attn.compressor.norm", config.head_dim, config.rms_norm_eps)

    def forward(self, x_TD: Tensor, groups: Groups) -> Tensor:
        """x [T, d] -> latents [C, head_dim] in x's dtype."""
        if self.ratio == 1:  # every token is an entry
            return self.norm(self.wkv(x_TD))
        return self.norm(self.ops["csa2.pool"](self.wkv(x_TD), self.wgate(x_TD), groups).to(x_TD.dtype))
