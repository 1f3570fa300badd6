"""What must cross each pipeline cut: fields with shapes, dtypes and bytes, and what is computed again instead of sent.

The selection of an index source, and the candidate pool, need not cross: the inputs of the source's query side can
cross in their place, and the later stage runs a shadow of it (DESIGN: the model under pipeline parallelism). Imports no
torch, so that a plan can ask.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.layer_plan import LayerPlan, live_at, plan_layers
from megatron_dsv41.phase import Phase

Shadows = Literal["bytes", "always", "never"]
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int32": 4}
ALIGNMENT = 16  # bytes, so that every field starts where any dtype may


@dataclasses.dataclass(frozen=True)
class Field:
    """One tensor of the payload; `dtype` is a torch dtype by name.

    Processes of a tensor group, and those of a context group, may hold the same values: then each sends a part, and the
    parts are gathered on arrival. adds_over_tensor: each process of a tensor group has a part of the gradient's sum,
    instead of all of it; over a context group they always have parts.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    has_gradient: bool
    tensor_copies: int = 1
    context_copies: int = 1
    adds_over_tensor: bool = False

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Size of the whole tensor."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def wire_bytes(self) -> int:
        """Size of one process's part, filled up to the alignment."""
        return -(-self.num_bytes // (self.tensor_copies * self.context_copies * ALIGNMENT)) * ALIGNMENT


@dataclasses.dataclass(frozen=True)
class Lengths:
    """A micro-batch of `batch` rows of `seq` tokens, cut into `context` shards.

    `tensor` processes share a shard: between sites each holds a piece of it where `sequence` is set, else all of it.
    """

    batch: int
    seq: int
    context: int = 1
    tensor: int = 1
    sequence: bool = False

    @property
    def shard(self) -> int:
        """Tokens of a row inside sites."""
        return self.seq // self.context

    @property
    def piece(self) -> int:
        """Tokens of a row between sites."""
        return self.shard // self.tensor if self.sequence else self.shard


@dataclasses.dataclass(frozen=True)
class Crossing:
    """The cut before layer `boundary`: fields in wire order, and the index sources that the later stage shadows."""

    boundary: int
    fields: tuple[Field, ...]
    shadows: tuple[int, ...] = ()

    @property
    def forward_bytes(self) -> int:
        """Bytes of a micro-batch that one process sends on."""
        return sum(field.wire_bytes for field in self.fields)

    @property
    def backward_bytes(self) -> int:
        """Bytes of gradient that come back."""
        return sum(field.wire_bytes for field in self.fields if field.has_gradient)


def query_field(plan: LayerPlan) -> str:
    """Where a shared state keeps the inputs of an index source's query side."""
    return "pool_query" if plan.is_candidate_source else "topk_query"


def kept_for(crossing: Crossing, plans: Sequence[LayerPlan], layer: int) -> frozenset[str]:
    """State fields that must stay alive after `layer`, in the stage before `crossing`, because they will cross."""
    made = frozenset[str]().union(*(plan.produces for plan in plans[: layer + 1]))
    queries = {query_field(plans[source]) for source in crossing.shadows if source <= layer}
    return frozenset({field.name for field in crossing.fields} & made | queries)


def shadow_outputs(plans: Sequence[LayerPlan], boundary: int, source: int) -> frozenset[str]:
    """What a shadow of layer `source` makes for the layers from `boundary` on."""
    selects = source == max(plan.layer for plan in plans[:boundary] if plan.owns_selection)
    pools = plans[source].is_candidate_source
    return frozenset(({"topk_indices"} if selects else set()) | ({"candidates"} if pools else set()))


class CrossingPlanner:
    """Crossings of one model, phase and micro-batch shape."""

    def __init__(self, config: DSV41Config, phase: Phase, lengths: Lengths):
        self.config, self.phase, self.lengths = config, phase, lengths
        self.plans = plan_layers(config)

    def choose(self, starts: Sequence[int], rule: Shadows) -> tuple[Crossing, ...]:
        """The crossing before each of `starts`, ascending first layers of all stages but the first.

        bytes: whatever sends least, forward and backward; always: as many shadows as can be; never: none.
        """
        chosen: list[Crossing] = []
        for previous, start in itertools.pairwise([0, *starts]):
            known = chosen[-1].shadows if chosen else ()
            options = list(self.alternatives(start, previous, known))
            if rule == "never":
                chosen.append(options[0])
            elif rule == "always":
                chosen.append(max(options, key=lambda c: len(c.shadows)))
            else:
                chosen.append(min(options, key=lambda c: (c.forward_bytes + c.backward_bytes, len(c.shadows))))
        return tuple(chosen)

    def alternatives(self, boundary: int, stage_start: int = 0, known: Sequence[int] = ()) -> Iterator[Crossing]:
        """Every way to cross, the one without shadows first.

        The stage before the cut starts at layer `stage_start` and received the query inputs of the sources in `known`:
        it can pass on those, and those of its own layers.
        """
        usable = [source for source in self._sources(boundary) if source >= stage_start or source in known]
        for count in range(len(usable) + 1):
            for shadows in itertools.combinations(usable, count):
                if all(self._useful(boundary, source, shadows) for source in shadows):
                    yield self.crossing(boundary, shadows)

    def crossing(self, boundary: int, shadows: Sequence[int] = ()) -> Crossing:
        """The cut before layer `boundary` with these shadows on its later side."""
        live = live_at(self.plans, boundary)
        made = frozenset[str]().union(*(shadow_outputs(self.plans, boundary, source) for source in shadows))
        read = self._read_by(shadows)
        queries = {query_field(self.plans[source]) for source in shadows}
        names = ((live | read) - made) | queries | {"streams", "pre_mix"}
        fields = [field for field in self._fields(boundary, live) if field.name in names]
        order = sorted(fields, key=lambda f: (not f.has_gradient, -f.item_bytes))
        return Crossing(boundary, tuple(order), tuple(shadows))

    def _sources(self, boundary: int) -> list[int]:
        """Index sources of the cache in use whose outputs may be alive: the latest one and the pool's."""
        before = self.plans[:boundary]
        latest = max((plan.layer for plan in before if plan.owns_selection), default=-1)
        cache = max((plan.layer for plan in before if plan.owns_kv), default=0)
        pools = [plan.layer for plan in before if plan.is_candidate_source]
        return sorted({source for source in [latest, *pools] if source >= cache})

    def _useful(self, boundary: int, source: int, shadows: Sequence[int]) -> bool:
        """The shadow makes something that is read by later layers or by another shadow."""
        others = [other for other in shadows if other != source]
        wanted = live_at(self.plans, boundary) | self._read_by(others)
        return bool(wanted & shadow_outputs(self.plans, boundary, source))

    def _read_by(self, shadows: Sequence[int]) -> frozenset[str]:
        restricted = any(self.plans[source].uses_candidates and self.phase.hsi for source in shadows)
        return frozenset(({"index_keys"} if shadows else set()) | ({"candidates"} if restricted else set()))

    def _fields(self, boundary: int, live: frozenset[str]) -> list[Field]:
        config, lengths = self.config, self.lengths
        n, dtype = config.hc_mult, config.dtype
        wide = "float64" if dtype == "float64" else "float32"
        tp, cp = lengths.tensor, lengths.context
        copies = 1 if lengths.sequence else tp
        fields = [
            Field("pre_mix", (lengths.piece, lengths.batch, n), wide, True, copies),
            Field("streams", (lengths.piece, lengths.batch, n, config.hidden_size), dtype, True, copies),
        ]
        if not live:
            return fields
        ratio = next(plan.ratio for plan in self.plans[boundary:] if plan.consumes)
        entries, tokens = lengths.batch * lengths.seq // ratio, lengths.batch * lengths.shard
        blocks = min(config.candidate_topk_blocks, -(-entries // config.candidate_block_size))
        keys_learn = self.phase.index_loss != "off" and "index_keys" in live
        query = (tokens, config.q_lora_rank + config.index_n_heads)
        return [
            *fields,
            Field("compressed_kv", (entries, config.head_dim), wide, True, tp, cp, adds_over_tensor=True),
            Field("index_keys", (entries, config.index_head_dim), dtype, keys_learn, tp, cp),
            Field("topk_indices", (tokens, min(config.index_topk, entries)), "int32", False, tp),
            Field("candidates", (tokens, blocks), "int32", False, tp),
            Field("topk_query", query, dtype, False, tp),
            Field("pool_query", query, dtype, False, tp),
        ]
