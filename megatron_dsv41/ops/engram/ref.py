"""Engram: n-gram row ids, rows read and published, their gradients merged, the gated injection (SPEC 12)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_dsv41.ops.documents import Documents
from megatron_dsv41.ops.engram.rows import RowFormat
from megatron_dsv41.ops.engram.runs import Runs
from megatron_dsv41.ops.numerics import wide

GATE_FLOOR = 1e-6


def hash_rows(
    compressed_T: Tensor,
    pad_class: int | Tensor,
    documents: Documents,
    multipliers: Sequence[int],
    primes: Sequence[int],
    heads: int,
) -> Tensor:
    """Table rows of every token, int64 [T, columns]; column (order-2)*heads + head.

    compressed_T: int64 compressed token ids. multipliers: one per look-back 0..max_ngram-1. primes: one per column.
    A look-back that leaves the document, or crosses a dead or image token, reads the pad class, and so do all
    further ones.
    """
    barrier_T = ~documents.alive_T | documents.image_T
    here_T = torch.arange(compressed_T.shape[0], device=compressed_T.device)
    blocked_T = torch.zeros_like(barrier_T)
    rows, offset, running_T = [], 0, None
    for back, multiplier in enumerate(multipliers):
        source_T = (here_T - back).clamp_min(0)
        blocked_T = blocked_T | (documents.position_T < back) | barrier_T[source_T]
        term_T = torch.where(blocked_T, pad_class, compressed_T[source_T]) * multiplier
        running_T = term_T if running_T is None else running_T ^ term_T
        for prime in primes[(back - 1) * heads : back * heads] if back else ():
            rows.append(running_T % prime + offset)
            offset += prime
    return torch.stack(rows, dim=-1)


def hash_tokens(
    input_ids_T: Tensor,
    token_map: Tensor,
    pad_id: int,
    documents: Documents,
    multipliers: Sequence[int],
    primes: Sequence[int],
    heads: int,
) -> Tensor:
    """`hash_rows` of raw token ids int64 [T]. token_map: int64 [vocabulary], raw id -> class; pad_id: raw.

    Whatever id a dead or image token has, it is a barrier. A living token whose id is not in the vocabulary (-1 and
    -100 of a label mask, say) gets row -1, which no table has: the lookup refuses it.
    """
    known_T = (input_ids_T >= 0) & (input_ids_T < len(token_map))
    compressed_T = token_map[torch.where(known_T, input_ids_T, pad_id)]
    stray_T = ~known_T & documents.alive_T & ~documents.image_T
    rows_TC = hash_rows(compressed_T, token_map[pad_id], documents, multipliers, primes, heads)
    return rows_TC.masked_fill(stray_T[:, None], -1)


def read_rows(rows_NW: Tensor, places_E: Tensor, form: RowFormat, dtype: torch.dtype) -> Tensor:
    """Rows as bytes uint8 [N, width] at places int64 [E] -> values [E, dim] in `dtype` (bfloat16 or float32)."""
    return form.decode(rows_NW.index_select(0, places_E), dtype)


def encode_rows(values_RD: Tensor, form: RowFormat) -> Tensor:
    """Values [R, dim] -> bytes uint8 [R, width]: see `RowFormat.encode`."""
    return form.encode(values_RD)


def merge(values_ED: Tensor, runs: Runs, scale: float = 1.0, into: Tensor | None = None) -> Tensor:
    """Sums of the entries of every run: [E, D] -> fp32 [M, D] (fp64 stays), times `scale`.

    A run is added up in an order that depends on its length alone. into: fp32 [U, D], to whose row `runs.rows_M[m]` sum
    m is added in place; it is returned.
    """
    ordered = values_ED[runs.order_E].to(torch.promote_types(values_ED.dtype, torch.float32))
    merged = torch.segment_reduce(ordered, "sum", lengths=runs.begins.diff(), axis=0, unsafe=True) * scale
    return merged if into is None else into.index_add_(0, runs.rows_M, merged.to(into.dtype))  # rows are distinct


def gate(
    streams: Tensor,
    key: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    open_gate: Tensor,
    rms_eps: float,
) -> Tensor:
    """streams_i + g_i * value, one cast to the streams' dtype.

    streams, key [..., n, d]; value [..., d]; q_weight, k_weight [n, d]; open_gate bool [...]: False closes the gate.
    g_i = sigmoid(signed square root of the scaled dot product of the RMS-normalised stream and key).
    """
    x, k = wide(streams), wide(key)
    dot = (x * (wide(q_weight) * wide(k_weight)) * k).sum(-1)
    dot = dot * torch.rsqrt(x.square().mean(-1) + rms_eps) * torch.rsqrt(k.square().mean(-1) + rms_eps)
    dot = dot * x.shape[-1] ** -0.5
    g = torch.copysign(dot.abs().clamp_min(GATE_FLOOR).sqrt(), dot).sigmoid()
    g = torch.where(open_gate[..., None], g, 0.0)
    return (x + g[..., None] * wide(value)[..., None, :]).to(streams.dtype)
