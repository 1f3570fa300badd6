"""What every layer may know about a micro-batch besides streams and state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megatron_dsv41.ops.documents import Documents, Entries, Groups


@dataclasses.dataclass(frozen=True)
class Batch:
    """One micro-batch of T = b*s flat tokens, made once and never changed; or one shard of T tokens of a longer row.

    engram_rows: layer -> what the backend's Engram table reads: int64 [T, columns] table rows, or rows fetched before.
    gate_open_T bool: tokens that read Engram, alive text. Both are of the tokens as kept between sites, which may be
    fewer than inside.
    entries: ratio -> all compressed entries of the micro-batch, and which of them these T tokens see.
    groups: ratio -> the groups that this process compresses.
    window_start_T int64: oldest window row of each token, counting the halo of earlier tokens that a shard receives.
    decoder_window_start_T: the same in decoder layers, where a replay boundary may cut the window (SPEC 16).
    total_tokens: tokens of the micro-batch over all sequence shards.
    index_scale: factor of the index loss in this step, on top of the phase's weight.
    probe_P int64: rows on which selections are measured; None: none are.
    """

    documents: Documents
    total_tokens: int
    entries: Mapping[int, Entries]
    groups: Mapping[int, Groups]
    engram_rows: Mapping[int, Any]
    gate_open_T: Tensor
    window_start_T: Tensor
    decoder_window_start_T: Tensor
    index_scale: float = 1.0
    probe_P: Tensor | None = None
