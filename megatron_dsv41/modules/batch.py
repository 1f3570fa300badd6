"""What every layer may know about a micro-batch besides streams and state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from megatron_dsv41.ops.documents import Documents, Entries


@dataclasses.dataclass(frozen=True)
class Batch:
    """One micro-batch of T = b*s flat tokens, made once and never changed.

    engram_rows: layer -> int64 [T, columns] table rows. entries: ratio -> compressed entries.
    window_start_T int64: oldest window row of each token; decoder_window_start_T: the same in decoder layers, where a
    replay boundary may cut the window shorter (SPEC 16).
    """

    documents: Documents
    entries: Mapping[int, Entries]
    engram_rows: Mapping[int, Tensor]
    window_start_T: Tensor
    decoder_window_start_T: Tensor

    @property
    def gate_open_T(self) -> Tensor:
        """Tokens that read Engram: alive text, bool [T]."""
        return self.documents.alive_T & ~self.documents.image_T
