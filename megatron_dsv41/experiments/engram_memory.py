"""What owned Engram tables take on a rank: rows as served, as updated, their optimizer state, and what a step holds."""

from __future__ import annotations

import dataclasses

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.experiments.memory import Layout, engram_step_bytes

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class OwnerMemory:
    """Bytes of one table on the rank that has most of it. A group of owners has a copy where it runs the layer."""

    layer: int
    copies: int
    rows: int  # served by the rank
    updated: int  # of them by the rank itself: copies divide them
    served: float
    master: float  # 0: the served rows are what is updated
    state: float  # of the optimizer
    step: float  # most that a step holds: all rows distinct

    @property
    def total(self) -> float:
        """All of it."""
        return self.served + self.master + self.state + self.step


def owner_memory(
    config: DSV41Config,
    layout: Layout,
    *,
    table: str,
    master: str,
    state_bytes: float,
    window: int | None = None,
) -> tuple[OwnerMemory, ...]:
    """One entry per Engram layer. table: float8, bfloat16 or float32, as served. state_bytes: per element.

    ValueError where the owners do not divide the ranks.
    """
    owners, world = layout.engram, layout.world
    if world % owners:
        raise ValueError(f"parallel.engram {owners} does not divide {world} ranks")
    dim, columns = config.engram_head_dim, config.engram_columns
    width = dim + dim // 32 if table == "float8" else dim * ELEMENT_BYTES[table]
    stages, stage_ranks = layout.stage_layers(config.num_hidden_layers), world // layout.pipeline
    pieces = layout.context * (layout.tensor if layout.sequence else 1)
    entries = layout.num_micro_batches * layout.micro_batch * layout.seq_length // pieces * columns
    waiting = 1.0 if window is None else min(1.0, 2 * window / layout.num_micro_batches)
    found: list[OwnerMemory] = []
    for layer in config.engram_layer_ids:
        stage = next(number for number, layers in enumerate(stages) if layer in layers)
        copies = len({rank // owners for rank in range(stage * stage_ranks, (stage + 1) * stage_ranks)})
        rows = -(-config.engram_rows(layer) // owners)
        updated = -(-rows // copies)
        distinct = min(entries, config.engram_rows(layer))
        found.append(
            OwnerMemory(
                layer=layer,
                copies=copies,
                rows=rows,
                updated=updated,
                served=rows * width,
                master=0.0 if table == master else updated * dim * ELEMENT_BYTES[master],
                state=updated * dim * state_bytes,
                step=engram_step_bytes(distinct, entries, dim, round(width * waiting)),
            )
        )
    return tuple(found)
