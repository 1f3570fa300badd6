"""What each layer is, what it reads and writes, and what is alive between layers. All from `DSV41Config` (SPEC 4)."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from megatron_dsv41.config import DSV41Config

# The order is fixed: stage boundaries and recompute pass the state as a flat list in this order.
STATE_FIELDS = ("compressed_kv", "index_keys", "topk_indices", "candidates")
# What a stage keeps for a later one that computes a selection again (parallel.payload); no layer reads these.
QUERY_FIELDS = ("topk_query", "pool_query")


class LayerKind(enum.StrEnum):
    """The four CSA2 modes."""

    SWA = "swa"  # window only
    FULL = "full"  # owns compressor, index keys and an indexer
    REINDEX = "reindex"  # selects again from its source's index keys
    REUSE = "reuse"  # uses the current selection


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """Everything static that one layer needs to know about its place. Layer ids are 0-based and global."""

    layer: int
    kind: LayerKind
    ratio: int  # compression ratio of the cache it reads; 0: none
    kv_source: int | None
    topk_source: int | None
    has_engram: bool
    is_candidate_source: bool
    uses_candidates: bool
    in_decoder: bool  # second half of the causal encoder-decoder: replay simulation applies (SPEC 16)

    @property
    def owns_kv(self) -> bool:
        """The layer has a compressor and index keys."""
        return self.kind is LayerKind.FULL

    @property
    def owns_selection(self) -> bool:
        """The layer has an indexer query side."""
        return self.kind in (LayerKind.FULL, LayerKind.REINDEX)

    @property
    def has_gate(self) -> bool:
        """The compressor pools with a learned gate (ratio > 1)."""
        return self.owns_kv and self.ratio > 1

    @property
    def produces(self) -> frozenset[str]:
        """State fields this layer writes."""
        fields = {"compressed_kv", "index_keys", "topk_indices"} if self.owns_kv else set[str]()
        if self.kind is LayerKind.REINDEX:
            fields = {"topk_indices"}
        return frozenset(fields | ({"candidates"} if self.is_candidate_source else set()))

    @property
    def consumes(self) -> frozenset[str]:
        """State fields this layer reads from earlier layers."""
        if self.kind is LayerKind.REUSE:
            return frozenset({"compressed_kv", "topk_indices"})
        if self.kind is LayerKind.REINDEX:
            return frozenset({"compressed_kv", "index_keys"} | ({"candidates"} if self.uses_candidates else set()))
        return frozenset()


def plan_layers(config: DSV41Config) -> tuple[LayerPlan, ...]:
    """One plan per backbone layer, in order."""
    plans: list[LayerPlan] = []
    kv_source = topk_source = None
    candidate = config.candidate_source_layer_id
    for layer, ratio in enumerate(config.backbone_ratios):
        owns_kv, owns_selection = layer in config.kv_source_layer_ids, layer in config.index_source_layer_ids
        kv_source = layer if owns_kv else kv_source
        topk_source = layer if owns_selection else topk_source
        kind = (
            LayerKind.SWA
            if ratio == 0
            else LayerKind.FULL
            if owns_kv
            else LayerKind.REINDEX
            if owns_selection
            else LayerKind.REUSE
        )
        plans.append(
            LayerPlan(
                layer=layer,
                kind=kind,
                ratio=ratio,
                kv_source=kv_source if ratio else None,
                topk_source=topk_source if ratio else None,
                has_engram=layer in config.engram_layer_ids,
                is_candidate_source=layer == candidate,
                uses_candidates=owns_selection and 0 <= candidate < layer,
                in_decoder=layer >= config.decoder_start,
            )
        )
    return tuple(plans)


def live_at(plans: Sequence[LayerPlan], boundary: int) -> frozenset[str]:
    """State fields that must cross from layer `boundary - 1` to layer `boundary`: written before, read at or after."""
    live: set[str] = set()
    for plan in reversed(plans[boundary:]):
        live = (live - plan.produces) | plan.consumes
    written = frozenset[str]().union(*(p.produces for p in plans[:boundary]))
    return frozenset(live) & written
