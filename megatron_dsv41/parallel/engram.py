"""Engram tables owned by row ranges: who has a row, and one exchange that asks for rows or returns their gradients.

Everything here is a function of a process group; `group` None means one process. A table's rows lie in contiguous
ranges, uneven at the end, so that no table has padding. An exchange carries the rows of all tables at once:

    route = Route(owners, ids, group)   # counts are on their way
    route.post_ids()                    # row numbers are on their way
    route.take_ids(held)                # at the owners: checked here, once per exchange
    reply = route.reply(read, width)    # rows are on their way back
    rows = reply.wait()                 # rows[route.places[table]] are those of ids[table]

and `route.forward(values)` sends a value per row to where its number went: that is how gradients return. Every message
ends with how many rows it carries and the sum of their numbers, so that one that came short is noticed. What is wrong
becomes a `fault`, int64 [4] on the device (kind, peer, table, row), which costs no synchronisation until it is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dsv41.ops.engram.rows import as_words

SOUND, OUT_OF_RANGE, SHORT = 0, 1, 2
SEAL_BYTES = 16  # what ends a message: number of rows, sum of their row numbers


@dataclasses.dataclass(frozen=True)
class RowOwners:
    """Ascending contiguous row ranges of a table and the group rank that has each.

    Range i is [bounds[i], bounds[i + 1]) and belongs to ranks[i]. Ranges may be empty.
    """

    bounds: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of the whole table."""
        return self.bounds[-1]

    def range_of(self, rank: int) -> tuple[int, int]:
        """(begin, end) of a rank's rows; (0, 0) for a rank that has none."""
        if rank not in self.ranks:
            return 0, 0
        index = self.ranks.index(rank)
        return self.bounds[index], self.bounds[index + 1]

    def ranks_of(self, ids: Tensor) -> Tensor:
        """Group rank that has each row. An id outside the table goes to an end of it, where it is refused."""
        inner = torch.tensor(self.bounds[1:-1], dtype=ids.dtype, device=ids.device)
        return torch.tensor(self.ranks, device=ids.device)[torch.bucketize(ids, inner, right=True)]


def split_rows(begin: int, end: int, parts: int) -> tuple[int, ...]:
    """Bounds of `parts` equal contiguous ranges of ceil(rows / parts) rows; the last are shorter, or empty."""
    size = -(-(end - begin) // parts)
    return tuple(min(begin + part * size, end) for part in range(parts + 1))


def row_owners(rows: int, owners: int) -> RowOwners:
    """A table's rows over a group of `owners` ranks."""
    return RowOwners(split_rows(0, rows, owners), tuple(range(owners)))


def row_updaters(rows: int, owners: int, copies: Sequence[int]) -> RowOwners:
    """The rank of the world that updates each row, where the groups `copies` of consecutive ranks have a copy each.

    The copies of an owner's range divide it, so that the state of a row exists once.
    """
    ranges = split_rows(0, rows, owners)
    bounds, ranks = [0], []
    for owner in range(owners):
        bounds += split_rows(ranges[owner], ranges[owner + 1], len(copies))[1:]
        ranks += [copy * owners + owner for copy in copies]
    return RowOwners(tuple(bounds), tuple(ranks))


@dataclasses.dataclass(frozen=True)
class Messages:
    """Where elements lie in the messages to or from every peer, in peer order, each followed by its seal."""

    counts: tuple[int, ...]  # elements per peer
    counts_P: Tensor  # the same on the device
    peer_E: Tensor
    table_E: Tensor
    ids_E: Tensor

    def places(self, seal: int) -> Tensor:
        """Row of every element in a buffer of all messages whose seals take `seal` rows."""
        return torch.arange(len(self.peer_E), device=self.peer_E.device) + self.peer_E * seal

    def seals(self, seal: int) -> Tensor:
        """First row of every peer's seal, int64 [peers]."""
        return self.counts_P.cumsum(0) + torch.arange(len(self.counts), device=self.counts_P.device) * seal

    def splits(self, seal: int) -> list[int]:
        """Rows per peer."""
        return [count + seal for count in self.counts]

    @property
    def sealed(self) -> Tensor:
        """What the seals must say: int64 [peers, 2]."""
        sums_P = torch.zeros_like(self.counts_P).index_add_(0, self.peer_E, self.ids_E)
        return torch.stack([self.counts_P, sums_P], dim=1)

    def check(self, found_P2: Tensor) -> Tensor:
        """Fault of messages whose seals say `found_P2`: the first that came short, by the last row it should hold."""
        wrong_P = (found_P2 != self.sealed).any(1)
        peer = wrong_P.int().argmax()
        kind = torch.where(wrong_P.any(), SHORT, SOUND)
        if not len(self.peer_E):
            return torch.stack([kind, peer, torch.full_like(peer, -1), torch.full_like(peer, -1)])
        # `take`, because x[i] of a number i on a GPU waits for it.
        last = (self.counts_P.cumsum(0).take(peer) - 1).clamp_min(0)
        return torch.stack([kind, peer, self.table_E.take(last), self.ids_E.take(last)])


class Posted:
    """Rows on their way. `wait` gives the buffer; its `fault` says whether all arrived."""

    def __init__(self, buffer: Tensor, messages: Messages, work: Any, keep: Tensor):
        self.buffer, self.messages, self.work, self._keep = buffer, messages, work, keep
        self.fault: Tensor | None = None

    def wait(self) -> Tensor:
        """The received rows, seals between them."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        if self.fault is None:
            del self._keep
            seals = self.buffer[self.messages.seals(1)].view(torch.uint8)[:, :SEAL_BYTES]
            self.fault = self.messages.check(seals.contiguous().view(torch.int64))
        return self.buffer


class Route:
    """What this rank asks of the others in one exchange, and what they ask of it. Collective, in program order.

    owners: of every table. ids: ascending distinct row numbers per table, int64. `places[table]`: where the row of each
    of them will lie in a reply.
    """

    def __init__(self, owners: Sequence[RowOwners], ids: Sequence[Tensor], group: ProcessGroup | None):
        self.group, self.size, self.tables = group, group.size() if group else 1, len(owners)
        ids_E = torch.cat(list(ids))
        lengths = [len(part) for part in ids]
        table_E = torch.arange(self.tables, device=ids_E.device).repeat_interleave(
            torch.tensor(lengths, device=ids_E.device), output_size=len(ids_E)
        )
        peer_E = torch.cat([table.ranks_of(part) for table, part in zip(owners, ids, strict=True)])
        order_E = torch.argsort(peer_E, stable=True)
        peer_E, table_E, self._ids_E = peer_E[order_E], table_E[order_E], ids_E[order_E]
        place_E = torch.empty_like(order_E)
        place_E[order_E] = torch.arange(len(ids_E), device=ids_E.device) + peer_E
        self.places = place_E.split(lengths)
        self._peer_E, self._table_E = peer_E, table_E
        self._sent_PT = torch.bincount(peer_E * self.tables + table_E, minlength=self.size * self.tables)
        self._received_PT = torch.empty_like(self._sent_PT)
        self._work = self._exchange(self._received_PT, self._sent_PT, None, None)

    def post_ids(self) -> None:
        """Send the row numbers. Waits for the counts: the sizes of messages are needed on the host."""
        _finish(self._work)
        counts_2PT = torch.stack([self._sent_PT, self._received_PT]).view(2, self.size, self.tables)
        counts_2P, on_host = counts_2PT.sum(2), counts_2PT.cpu()
        sent, received = (tuple(counts) for counts in on_host.sum(2).tolist())
        self._asked_T = on_host[1].sum(0).tolist()
        total, device = sum(received), self._ids_E.device
        self.sent = Messages(sent, counts_2P[0], self._peer_E, self._table_E, self._ids_E)
        segment_E = torch.arange(len(self._received_PT), device=device).repeat_interleave(
            self._received_PT, output_size=total
        )
        self.received = Messages(
            received, counts_2P[1], segment_E // self.tables, segment_E % self.tables, self._ids_E.new_empty(total)
        )
        message = self._ids_E.new_empty(len(self._ids_E) + 2 * self.size)
        message[self.sent.places(2)] = self._ids_E
        seal = self.sent.seals(2)
        message[torch.stack([seal, seal + 1], 1)] = self.sent.sealed
        self._buffer, self._sending = message.new_zeros(total + 2 * self.size), message
        self._work = self._exchange(self._buffer, message, self.received.splits(2), self.sent.splits(2))

    def take_ids(self, held: Sequence[tuple[int, int]]) -> Tensor:
        """Receive row numbers; the fault of the first that is not in this rank's rows [begin, end) of its table."""
        _finish(self._work)
        del self._sending
        ids_E = self._buffer[self.received.places(2)]
        self.received = dataclasses.replace(self.received, ids_E=ids_E)
        seal = self.received.seals(2)
        short = self.received.check(self._buffer[torch.stack([seal, seal + 1], 1)])
        del self._buffer
        bounds = torch.tensor(list(held), dtype=torch.int64, device=ids_E.device)
        begin_E, end_E = bounds[self.received.table_E].unbind(1)
        outside_E = (ids_E < begin_E) | (ids_E >= end_E)
        if not len(ids_E):
            return short
        first = outside_E.int().argmax()
        peer, table = self.received.peer_E.take(first), self.received.table_E.take(first)
        wrong = torch.stack([torch.full_like(peer, OUT_OF_RANGE), peer, table, ids_E.take(first)])
        return torch.where(short[0] == SOUND, torch.where(outside_E.any(), wrong, torch.zeros_like(wrong)), short)

    def asked(self, table: int) -> Tensor:
        """int64 [n]: which of the received row numbers are a table's. Ascending; nobody waits for the device."""
        counts_PT, total = self._received_PT.view(self.size, self.tables), self._asked_T[table]
        counts_P, begin_PT = counts_PT[:, table], (self._received_PT.cumsum(0) - self._received_PT).view_as(counts_PT)
        shift_P = begin_PT[:, table] - (counts_P.cumsum(0) - counts_P)
        return torch.arange(total, device=counts_P.device) + shift_P.repeat_interleave(counts_P, output_size=total)

    def reply(self, read: Callable[[int, Tensor], Tensor], width: int) -> Posted:
        """Send back the rows asked for. read(table, ids) -> uint8 [n, width]."""
        received = self.received
        sent = torch.empty(len(received.ids_E) + self.size, width, dtype=torch.uint8, device=received.ids_E.device)
        places = received.places(1)
        for table in range(self.tables):
            here = self.asked(table)
            as_words(sent).index_copy_(0, places[here], as_words(read(table, received.ids_E[here])))
        return self._post(sent, received, self.sent)

    def forward(self, values: Iterable[Tensor], width: int, dtype: torch.dtype) -> Posted:
        """Send a row per id, [n, width] of `dtype` for each table, to where the ids went. Tables are taken one by one.

        Element e of what arrives, in row `received.places(1)[e]`, is for row `received.ids_E[e]` of table
        `received.table_E[e]`.
        """
        sent = torch.empty(len(self._ids_E) + self.size, width, dtype=dtype, device=self._ids_E.device)
        for places, part in zip(self.places, values, strict=True):
            sent.index_copy_(0, places, part)
            del part  # before the next, and before what arrives, has memory
        return self._post(sent, self.sent, self.received)

    def _post(self, sent: Tensor, there: Messages, back: Messages) -> Posted:
        width = sent.shape[1] * sent.element_size()
        assert width >= SEAL_BYTES, f"a row of {width} bytes cannot hold the seal of {SEAL_BYTES}"
        seals = torch.zeros(self.size, width, dtype=torch.uint8, device=sent.device)
        seals[:, :SEAL_BYTES] = there.sealed.view(torch.uint8)
        sent[there.seals(1)] = seals.view(sent.dtype)
        buffer = sent.new_zeros(sum(back.splits(1)), *sent.shape[1:])
        return Posted(buffer, back, self._exchange(buffer, sent, back.splits(1), there.splits(1)), sent)

    def _exchange(self, receive: Tensor, send: Tensor, receive_splits: Any, send_splits: Any) -> Any:
        if self.group is None:
            receive.copy_(send)
            return None
        return dist.all_to_all_single(receive, send, receive_splits, send_splits, group=self.group, async_op=True)


def _finish(work: Any) -> None:
    if work is not None:
        work.wait()


def read_faults(fault: Tensor, group: ProcessGroup | None) -> list[tuple[int, int, int, int, int]]:
    """Faults of all ranks of a group as (rank, kind, peer, table, row), group ranks. Collective; synchronises once."""
    everyone = fault.new_empty(group.size() if group else 1, 4)
    if group is None:
        everyone[0] = fault
    else:
        dist.all_gather_into_tensor(everyone, fault[None].contiguous(), group=group)
    return [(rank, *values) for rank, values in enumerate(everyone.tolist()) if values[0] != SOUND]
