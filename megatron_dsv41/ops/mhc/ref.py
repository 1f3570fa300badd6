"""Single-pass manifold-constrained hyper-connections: the definition (SPEC 7).

All functions accept any leading dims; n streams of width d stand last: streams [..., n, d].
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dsv41.ops.numerics import wide


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """Row softmax plus eps, columns, then (rows, columns) iters-1 times; [..., source i, destination j]."""
    # With tokens last, sums over four numbers are sums of vectors: several times faster on a CPU.
    comb = logits.movedim((-2, -1), (0, 1)).contiguous()
    comb = comb.softmax(1) + eps
    comb = comb / (comb.sum(0, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        comb = comb / (comb.sum(0, keepdim=True) + eps)
    return comb.movedim((0, 1), (-2, -1)).contiguous()


def coefficients(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixing coefficients of one site from its streams.

    fn [(2+n)*n, n*d] (rows: pre, post, comb row-major by source), base [(2+n)*n], scale [3], all fp32.
    Returns fp32 pre [..., n], post [..., n], comb [..., source, destination].
    """
    num_streams = streams.shape[-2]
    x = wide(streams).flatten(-2)
    # Projection first, RMS factor after: one scalar per token, no gain.
    u = (x @ fn.to(x.dtype).T) * torch.rsqrt(x.square().mean(-1, keepdim=True) + rms_eps)
    parts = [num_streams, num_streams, num_streams * num_streams]
    pre, post, comb = (
        part * scale[i] + offset
        for i, (part, offset) in enumerate(zip(u.split(parts, -1), base.split(parts), strict=True))
    )
    comb = sinkhorn(comb.unflatten(-1, (num_streams, num_streams)), iters, eps)
    return pre.sigmoid() + eps, 2 * post.sigmoid(), comb


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Site input sum_i pre_i X_i: [..., d] in the streams' dtype, summed in fp32."""
    return (wide(streams) * pre[..., None]).sum(-2).to(streams.dtype)


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams X'_j = post_j y + sum_i comb[i, j] X_i: [..., n, d] in the streams' dtype, summed in fp32."""
    mixed = comb.transpose(-1, -2) @ wide(streams)
    return (post[..., None] * wide(y)[..., None, :] + mixed).to(streams.dtype)


def site(
    y: Tensor | None,
    streams: Tensor,
    post: Tensor | None,
    comb: Tensor | None,
    pre: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    iters: int,
    eps: float,
    rms_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Everything between two sublayers: the update by the last one's output y, and what the next one needs.

    post, comb: the coefficients of the last site; pre: those that it predicted for this one. y, post, comb None: no
    update, the streams enter as they are. Returns the new streams, this site's input and its pre, post and comb.
    """
    if y is not None and post is not None and comb is not None:
        streams = expand(y, streams, post, comb)
    return streams, collapse(streams, pre), *coefficients(streams, fn, base, scale, iters, eps, rms_eps)
