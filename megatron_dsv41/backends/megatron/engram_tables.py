"""The Engram rows that this rank owns: what it serves, what it updates, and their place in checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dsv41.experiments.traces import ENGRAM_RETURN, ENGRAM_ROWS
from megatron_dsv41.ops.engram import ref
from megatron_dsv41.ops.engram.rows import RowFormat, as_words
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.ops.row_blocks import row_blocks
from megatron_dsv41.optim.optimizer import Place
from megatron_dsv41.parallel.engram import RowOwners, row_owners, row_updaters


def table_name(layer: int) -> str:
    """Native name of a layer's table."""
    return f"layers.{layer}.engram.embed.weight"


@dataclasses.dataclass(frozen=True)
class EngramGroups:
    """Who owns Engram rows together. Consecutive ranks of the world form groups of `owners`.

    A group keeps a copy of a table where one of its ranks runs the table's layer. `copies`: layer -> numbers of those
    groups. The other three are of this rank; None stands for this rank alone: `fetch`, its group; `holders`, layer ->
    everyone that has rows of the table; `replicas`, layer -> those that have the same rows.
    """

    owners: int
    world: ProcessGroup
    fetch: ProcessGroup | None
    copies: dict[int, tuple[int, ...]]
    holders: dict[int, ProcessGroup | None]
    replicas: dict[int, ProcessGroup | None]

    @classmethod
    def create(cls, owners: int, layers: Sequence[int]) -> EngramGroups:
        """Collective over the world. layers: of those with a table, the ones that this rank runs."""
        rank, size = dist.get_rank(), dist.get_world_size()
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, list(layers))
        copies = {
            layer: tuple(sorted({other // owners for other in range(size) if layer in everyone[other]}))
            for layer in sorted({layer for part in everyone for layer in part})
        }
        made: dict[tuple[int, ...], ProcessGroup | None] = {}

        def group(ranks: Sequence[int]) -> ProcessGroup | None:
            """Every rank makes every group, in one order."""
            key = tuple(ranks)
            if key not in made:
                described = dist.new_group(list(key), group_desc=ENGRAM_ROWS) if len(key) > 1 else None
                made[key] = cast(ProcessGroup | None, described)
            return made[key]

        fetch = [group(range(first, first + owners)) for first in range(0, size, owners)]
        holders, replicas = {}, {}
        for layer, numbers in copies.items():
            all_ranks = group([number * owners + owner for number in numbers for owner in range(owners)])
            same_rows = [group([number * owners + owner for number in numbers]) for owner in range(owners)]
            if rank // owners in numbers:
                holders[layer], replicas[layer] = all_ranks, same_rows[rank % owners]
        world = cast(ProcessGroup, dist.new_group(list(range(size)), group_desc=ENGRAM_RETURN))
        return cls(owners, world, fetch[rank // owners], copies, holders, replicas)


class OwnedTable:
    """This rank's rows [begin, end) of a table, and rows [first, last) of them that this rank updates.

    published: uint8 [end - begin, width], what is served. master [last - first, dim]: what is updated; a view of
    `published` where both have one dtype. Replicas update a part each and share what they publish.
    """

    def __init__(
        self,
        layer: int,
        rows: int,
        form: RowFormat,
        master: torch.dtype,
        groups: EngramGroups,
        device: torch.device,
        pinned: bool = False,
        ops: Ops | None = None,
    ):
        rank = dist.get_rank()
        self.layer, self.name, self.rows, self.format = layer, table_name(layer), rows, form
        # Rows in host memory are encoded where they lie.
        self.encode = ref.encode_rows if pinned else (ops or Ops())["engram.encode_rows"]
        self.owners: RowOwners = row_owners(rows, groups.owners)
        self.updaters: RowOwners = row_updaters(rows, groups.owners, groups.copies[layer])
        self.holders, self.replicas = groups.holders[layer], groups.replicas[layer]
        self.copy = groups.copies[layer].index(rank // groups.owners)
        self.begin, self.end = self.owners.range_of(rank % groups.owners)
        self.first, self.last = self.updaters.range_of(rank)
        device = torch.device("cpu") if pinned else device
        pin = pinned and torch.cuda.is_available()
        self.published = torch.empty(
            self.end - self.begin, form.width, dtype=torch.uint8, device=device, pin_memory=pin
        )
        self.aliased = form.plain is master
        if self.aliased:
            self.master = self.published.view(master)[self.first - self.begin : self.last - self.begin]
        else:
            self.master = torch.empty(self.last - self.first, form.dim, dtype=master, device=device, pin_memory=pin)
        if master is not torch.float32:
            self.master.grad_dtype = None  # merged gradients are fp32 whatever the rows are kept in

    @property
    def place(self) -> Place:
        """Where `master` lies in the table, for balanced updates."""
        return Place(total_rows=self.rows, row_groups=() if self.holders is None else (self.holders,))

    def serve(self, ids: Tensor) -> Tensor:
        """Row numbers int64 [n], all of this rank's -> their bytes [n, width], on the device of `ids`."""
        local = (ids - self.begin).to(self.published.device)
        found = as_words(self.published).index_select(0, local).to(ids.device, non_blocking=True)
        return found.view(torch.uint8)

    @torch.no_grad()
    def fill(self, read: Callable[[slice], Tensor], master: bool = True) -> None:
        """Take rows from read(slice of the whole table) -> values [n, dim], a block at a time, the master's too."""
        for block in row_blocks(self.end - self.begin, self.format.dim):
            values = read(slice(self.begin + block.start, self.begin + block.stop))
            self.published[block] = self.format.encode(values).to(self.published.device)
            if master and not self.aliased:
                low, high = max(block.start + self.begin, self.first), min(block.stop + self.begin, self.last)
                if low < high:
                    part = values[low - self.begin - block.start : high - self.begin - block.start]
                    self.master[low - self.first : high - self.first] = part.to(self.master.device, self.master.dtype)

    @torch.no_grad()
    def publish(self) -> None:
        """Serve the updated rows from now on. Collective over the replicas."""
        if not self.aliased:
            for block in row_blocks(self.last - self.first, self.format.dim):
                offset = self.first - self.begin
                rows = self.encode(self.master[block], self.format)
                self.published[block.start + offset : block.stop + offset] = rows
        if self.replicas is None:
            return
        device = self.published.device if dist.get_backend(self.replicas) == "gloo" else torch.device("cuda")
        for rank in dist.get_process_group_ranks(self.replicas):
            first, last = self.updaters.range_of(rank)
            for block in row_blocks(last - first, self.format.width):
                rows = self.published[first - self.begin + block.start : first - self.begin + block.stop]
                sent = rows.to(device)
                dist.broadcast(sent, src=rank, group=self.replicas)
                if sent.data_ptr() != rows.data_ptr():
                    rows.copy_(sent)

    def load(self, values: Tensor) -> None:
        """Take this rank's published rows as `entry` described them.

        The master is optimizer state: it is read in place, before this, and these rows are rounded.
        """
        self.fill(lambda rows: values[rows.start - self.begin : rows.stop - self.begin], master=False)

    @torch.no_grad()
    def renew_master(self) -> None:
        """From the published rows, which were changed from outside."""
        offset = self.first - self.begin
        for block in row_blocks(0 if self.aliased else self.last - self.first, self.format.dim):
            rows = self.published[block.start + offset : block.stop + offset]
            self.master[block] = self.format.decode(rows, self.master.dtype)

    def entry(self, key: str, dtype: torch.dtype) -> ShardedTensor:
        """The published rows as values of `dtype`: their place in a checkpoint, whoever owns them when it is read."""
        values = self.format.decode(self.published, dtype)
        return self._sharded(key, values, self.begin, replica=self.copy)

    def state_entry(self, key: str, value: Tensor) -> ShardedTensor:
        """A tensor of optimizer state of the updated rows; no other rank has it."""
        return self._sharded(key, value, self.first, replica=0)

    def _sharded(self, key: str, value: Tensor, begin: int, replica: int) -> ShardedTensor:
        return ShardedTensor(
            key=key,
            data=value.detach(),
            dtype=value.dtype,
            local_shape=tuple(value.shape),
            global_shape=(self.rows, self.format.dim),
            global_offset=(begin, 0),
            axis_fragmentations=None,  # ranges need not be equal
            replica_id=(0, 0, replica),
        )
