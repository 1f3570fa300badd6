"""What owned Engram tables take on a rank: rows as served, as updated, their optimizer state, and what a step holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.run_config import Run

if TYPE_CHECKING:
    from megatron_dsv41.experiments.memory import Layout

SEALS = 1 << 10  # bytes
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
ENTRY_NUMBERS, ROW_NUMBERS = 4 * 8, 24 * 8  # bytes of integers per entry and per row; some live for an exchange alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tables:
    """How the owners of Engram rows keep them (`engram.*`)."""

    served: str = "bfloat16"  # float8, bfloat16 or float32
    master: str = "float32"
    state_bytes: float = 8  # of the optimizer, per element
    window: int | None = None  # micro-batches whose rows cross together; None: all of a step
    in_host: bool = False

    @classmethod
    def of(cls, run: Run) -> Tables | None:
        """Of a run; None where no rows are owned."""
        if run.parallel.engram is None:
            return None
        settings, momentum = run.engram, ELEMENT_BYTES[run.optimizer.momentum_dtype]
        return cls(
            served=run.engram_table,
            master=settings.master,
            state_bytes=8 if run.optimizer.name == "adamw" else momentum,
            window=settings.window,
            in_host=settings.memory == "host",
        )

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row as it is served and sent."""
        return dim + dim // 32 if self.served == "float8" else dim * ELEMENT_BYTES[self.served]


@dataclasses.dataclass(frozen=True)
class OwnerMemory:
    """Bytes of one table on the rank that has most of it. A group of owners has a copy where it runs the layer."""

    layer: int
    stage: int  # of the pipeline, which runs the layer
    groups: tuple[int, ...]  # of owners, with a copy each
    rows: int  # served by the rank
    updated: int  # of them by the rank itself: copies divide them
    served: float
    master: float  # 0: the served rows are what is updated
    state: float  # of the optimizer
    step: float  # most that a step holds where the layer runs: all rows distinct
    step_elsewhere: float  # and on an owner of another stage

    @property
    def copies(self) -> int:
        """Number of copies."""
        return len(self.groups)

    @property
    def total(self) -> float:
        """All of it on a rank that runs the layer."""
        return self.served + self.master + self.state + self.step


@dataclasses.dataclass(frozen=True)
class TableMemory:
    """Bytes of all owned tables together on the rank of a pipeline stage that has most of them."""

    served: float = 0.0
    master: float = 0.0
    state: float = 0.0
    exchange: float = 0.0  # rows and gradients on their way, at most
    in_host: bool = False  # all but the exchange

    @property
    def rows(self) -> float:
        """What stays from step to step."""
        return self.served + self.master + self.state

    @property
    def on_device(self) -> float:
        """What counts beside the model."""
        return self.exchange + (0.0 if self.in_host else self.rows)


def owner_memory(config: DSV41Config, layout: Layout) -> tuple[OwnerMemory, ...]:
    """One entry per Engram layer; none where nobody owns rows. ValueError where the owners do not divide the ranks."""
    tables, owners, world = layout.tables, layout.engram, layout.world
    if tables is None:
        return ()
    if world % owners:
        raise ValueError(f"parallel.engram {owners} does not divide {world} ranks")
    dim, columns = config.engram_head_dim, config.engram_columns
    width, stages = tables.row_bytes(dim), layout.stage_layers(config.num_hidden_layers)
    pieces = layout.context * (layout.tensor if layout.sequence else 1)
    entries = layout.num_micro_batches * layout.micro_batch * layout.seq_length // pieces * columns
    waiting = 1.0 if tables.window is None else min(1.0, 2 * tables.window / layout.num_micro_batches)
    found: list[OwnerMemory] = []
    for layer in config.engram_layer_ids:
        stage = next(number for number, layers in enumerate(stages) if layer in layers)
        ranks = layout.stage_ranks(stage)
        groups = tuple(sorted({rank // owners for rank in ranks}))
        rows = -(-config.engram_rows(layer) // owners)
        updated = -(-rows // len(groups))
        distinct = min(entries, config.engram_rows(layer))
        asked = math.ceil(distinct * len(ranks) / (owners * len(groups)))
        returned = math.ceil(asked / (1 if layout.sequence else layout.tensor))
        fetched = round(width * waiting)
        found.append(
            OwnerMemory(
                layer=layer,
                stage=stage,
                groups=groups,
                rows=rows,
                updated=updated,
                served=rows * width,
                master=0.0 if tables.served == tables.master else updated * dim * ELEMENT_BYTES[tables.master],
                state=updated * dim * tables.state_bytes,
                step=engram_step_bytes(distinct, entries, dim, fetched),
                step_elsewhere=engram_owner_bytes(asked, returned, dim, fetched),
            )
        )
    return tuple(found)


def engram_step_bytes(rows: int, entries: int, dim: int, width: int) -> float:
    """The most bytes that a rank holds for tables with owners at once, from the fetch to the return.

    rows: distinct ones that a step reads, each `width` bytes as fetched; at the return an fp32 gradient of `dim` as it
    is sent, and one that arrives where every rank updates as many rows. entries: tokens times columns. Of this step and
    of the next there are numbers: where entries lie and how they add up, where rows come from and go to.
    """
    return rows * (width + 8 * dim + 2 * ROW_NUMBERS) + 2 * ENTRY_NUMBERS * entries + SEALS


def engram_owner_bytes(asked: int, returned: int, dim: int, width: int) -> float:
    """The same on a rank that owns rows of layers that others run.

    asked: rows that it sends, `width` bytes each. returned: fp32 gradients of `dim` as they arrive, and their sums.
    """
    return asked * (width + 2 * ROW_NUMBERS) + returned * 8 * dim + SEALS


def tables_of_stage(tables: Sequence[OwnerMemory], layout: Layout, stage: int) -> TableMemory:
    """What the fullest rank of a stage has of all tables: `tables` as `owner_memory` gives them."""
    if layout.tables is None:
        return TableMemory()
    in_host = layout.tables.in_host

    def held(group: int) -> TableMemory:
        """By an owner of a group."""
        owned = [table for table in tables if group in table.groups]
        return TableMemory(
            served=sum(table.served for table in owned),
            master=sum(table.master for table in owned),
            state=sum(table.state for table in owned),
            exchange=sum(table.step if table.stage == stage else table.step_elsewhere for table in owned),
            in_host=in_host,
        )

    groups = {rank // layout.engram for rank in layout.stage_ranks(stage)}
    return max(map(held, sorted(groups)), key=lambda memory: memory.rows + memory.exchange)
