"""mHC: the streams that carry the residual, and the mixing coefficients of one site (SPEC 7)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.modules.primitives import Primitives
from megatron_dsv41.ops.registry import Ops

# A start that keeps streams apart: nearly the identity between streams, an average in, an equal share out.
INITIAL_SCALE = 0.01
INITIAL_SELF_LOGIT = 4.0


class Mix(NamedTuple):
    """Coefficients of one site, fp32: pre [s, b, n] for the NEXT site, post [s, b, n], comb [s, b, source, dest]."""

    pre: Tensor
    post: Tensor
    comb: Tensor


class HyperConnection(nn.Module):
    """What happens between two sublayers, in one pass over the streams: the last one's update, the next one's input and
    the coefficients after that.

    Parameters fp32: fn [(2+n)n, n*d], base [(2+n)n], scale [3].
    """

    def __init__(self, config: DSV41Config, role: str, primitives: Primitives, ops: Ops):
        super().__init__()
        n, self.config, self.ops = config.hc_mult, config, ops
        rows = (2 + n) * n
        fn = torch.empty(rows, n * config.hidden_size, dtype=torch.float32).normal_(std=config.initializer_range)
        pre = torch.full((n,), -math.log(n - 1.0) if n > 1 else 0.0)
        base = torch.cat([pre, torch.zeros(n), INITIAL_SELF_LOGIT * torch.eye(n).flatten()])
        self.fn = primitives.parameter(fn, f"{role}.fn")
        self.base = primitives.parameter(base, f"{role}.base")
        self.scale = primitives.parameter(torch.full((3,), INITIAL_SCALE), f"{role}.scale")

    def forward(
        self, streams_SBND: Tensor, pre_SBN: Tensor, update: tuple[Tensor, Mix] | None = None
    ) -> tuple[Tensor, Tensor, Mix]:
        """(streams [s, b, n, d], site input [s, b, d], the site's Mix).

        pre_SBN: what the site before predicted for this one. update: its output [s, b, d] and its Mix, None where the
        streams have it already.
        """
        c = self.config
        y_SBD, last = update or (None, None)
        post, comb = (last.post, last.comb) if last else (None, None)
        weights = (self.fn, self.base, self.scale)
        streams_SBND, x_SBD, *mix = self.ops["mhc.site"](
            y_SBD, streams_SBND, post, comb, pre_SBN, *weights, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps
        )
        return streams_SBND, x_SBD, Mix(*mix)


def open_streams(embedded_SBD: Tensor, num_streams: int) -> tuple[Tensor, Tensor]:
    """n equal copies [s, b, n, d] and the one-hot pre_mix [s, b, n] fp32: the first site reads stream 0."""
    streams = embedded_SBD[:, :, None].expand(-1, -1, num_streams, -1).contiguous()
    wide = torch.promote_types(embedded_SBD.dtype, torch.float32)
    pre_mix = torch.zeros(*embedded_SBD.shape[:2], num_streams, dtype=wide, device=embedded_SBD.device)
    pre_mix[..., 0] = 1.0
    return streams, pre_mix
