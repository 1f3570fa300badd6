"""What layers share within one micro-batch: a value that blocks take and return (SPEC 8.10)."""

from __future__ import annotations

import dataclasses
from typing import Self

from torch import Tensor

from megatron_dsv41.layer_plan import QUERY_FIELDS, STATE_FIELDS


@dataclasses.dataclass(frozen=True)
class SharedState:
    """Cross-layer tensors of one micro-batch; a model starts every forward from an empty one.

    compressed_kv [C, D]: rotated (and fake-quantized) latents, fp32 so that the gradients of all readers add in fp32.
    index_keys [C, Di]: rotated index keys before fake quantization; without gradient while the index loss is off.
    topk_indices int32 [T, K]: entry ids (rows of compressed_kv), ascending, -1 = none.
    candidates int32 [T, blocks]: document-local block ids, ascending, -1 = none.
    probed_topk int32 [P, K]: the last selection at the probed rows, for the log. It does not cross pipeline cuts.
    topk_query, pool_query [T, R + I]: what the query side of the latest index source, and of the pool's, multiplied:
    its query latents and head weights side by side, detached. Only where a later stage selects again.
    """

    compressed_kv: Tensor | None = None
    index_keys: Tensor | None = None
    topk_indices: Tensor | None = None
    candidates: Tensor | None = None
    probed_topk: Tensor | None = None
    topk_query: Tensor | None = None
    pool_query: Tensor | None = None

    def keep(self, live: frozenset[str]) -> Self:
        """The state with every field outside `live` dropped."""
        return dataclasses.replace(self, **{name: None for name in STATE_FIELDS + QUERY_FIELDS if name not in live})

    def need(self, name: str) -> Tensor:
        """A field that the layer plan says is alive here."""
        value = getattr(self, name)
        if value is None:
            raise RuntimeError(f"shared state has no {name} where the layer plan says it is alive")
        return value

    def to_tensors(self) -> list[Tensor | None]:
        """The fields in `STATE_FIELDS` order."""
        return [getattr(self, name) for name in STATE_FIELDS]
