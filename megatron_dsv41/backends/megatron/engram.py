"""Owned Engram tables in a training step: rows are fetched before they are needed, gradients return afterwards.

Per step and rank: `announce` (token ids become row numbers, which cross while an earlier step computes), `serve` (rows
cross, as soon as the tables hold what that step must read), reads in forward passes, `start_return` after the last
backward and `finish_return` after the dense gradient reduction. On GPUs the exchanges have a stream of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from megatron_dsv41.backends.megatron.engram_tables import EngramGroups, OwnedTable
from megatron_dsv41.backends.megatron.engram_window import RETURN, Window, on_stream
from megatron_dsv41.backends.megatron.layout import Layout
from megatron_dsv41.modules.engram import EngramHash
from megatron_dsv41.ops.documents import Documents, join_documents
from megatron_dsv41.ops.engram.rows import RowFormat
from megatron_dsv41.ops.engram.runs import Runs
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.ops.row_blocks import row_sparse
from megatron_dsv41.parallel.engram import (
    OUT_OF_RANGE,
    SOUND,
    Posted,
    Route,
    RowOwners,
    read_faults,
    row_owners,
    row_updaters,
)
from megatron_dsv41.parallel.engram_rows import FetchedRows, RowGradients


class EngramFault(RuntimeError):
    """An exchange of Engram rows went wrong; the message names the ranks, the table and the row."""


@dataclasses.dataclass
class StepRows:
    """What one step of this rank reads. batches: per micro-batch, layer -> rows. windows: in order of micro-batches."""

    batches: list[dict[int, FetchedRows]]
    windows: list[Window]
    window_of: list[int]  # per micro-batch
    gradients: dict[int, RowGradients]
    returns: Route | None
    served: int = 0  # windows
    returning: Posted | None = None


class EngramExchange:
    """How rows of owned tables travel. Every method is collective over the world, in one order.

    tables: layer -> this rank's rows. layers: those that this rank runs. gradient_scale: factor of summed gradients.
    window: micro-batches per exchange of rows; None: all of a step. frozen: no gradients return.
    """

    def __init__(
        self,
        engram_hash: EngramHash,
        layout: Layout,
        groups: EngramGroups,
        tables: Mapping[int, OwnedTable],
        layers: Sequence[int],
        form: RowFormat,
        *,
        dtype: torch.dtype,
        gradient_scale: float,
        window: int | None = None,
        frozen: bool = False,
        ops: Ops | None = None,
    ):
        config = engram_hash.config
        self.hash, self.layout, self.groups, self.owned, self.layers = engram_hash, layout, groups, tables, layers
        self.form, self.dtype, self.gradient_scale, self.window, self.frozen = (
            form,
            dtype,
            gradient_scale,
            window,
            frozen,
        )
        self.ops = ops or Ops()
        self.all_layers = config.engram_layer_ids
        rows, copies = {layer: config.engram_rows(layer) for layer in self.all_layers}, groups.copies
        self.owners = [row_owners(rows[layer], groups.owners) for layer in self.all_layers]
        self.updaters = [row_updaters(rows[layer], groups.owners, copies[layer]) for layer in self.all_layers]
        # Tokens that several ranks of a tensor group have whole are one rank's to return.
        self.returns = not frozen and (layout.sequence or layout.tp.rank == 0)
        self.stream = torch.cuda.Stream()
        self.current: StepRows | None = None  # of the step that computes
        self.upcoming: StepRows | None = None  # announced, not begun
        self.last: Sequence[Window] = ()  # of the last step

    # --- before a step ------------------------------------------------------------------------------------------

    def announce(self, batches: Sequence[tuple[Tensor, Documents]], training: bool) -> StepRows:
        """Row numbers of a step's micro-batches (ids int64 [b, s] of whole sequences) go on their way to the owners."""
        with on_stream(self.stream):
            rows = self._own_rows(batches)
            size = self.window or len(batches)
            window_of = [index // size for index in range(len(batches))]
            unique = [self._unique(rows, begin, begin + size) for begin in range(0, len(batches), size)]
            routes = [Route(self.owners, [part[0] for part in tables], self.groups.fetch) for tables in unique]
            everything = [torch.unique(torch.cat([tables[i][0] for tables in unique])) for i in range(len(self.owners))]
            gradients, returns = {}, None
            if training and not self.frozen:
                mine = everything if self.returns else [ids[:0] for ids in everything]
                returns = Route(self.updaters, mine, self.groups.world)
                gradients = {
                    layer: RowGradients(mine[self.all_layers.index(layer)], self.form.dim, self.ops)
                    for layer in (self.layers if self.returns else ())
                }
            for route in (*routes, *([returns] if returns else [])):
                route.post_ids()
            windows = [Window(route, self.stream) for route in routes]
            step = StepRows([], windows, window_of, gradients, returns)
            for index, window in enumerate(window_of):
                step.batches.append(self._fetched(index, windows[window], unique[window], everything, gradients))
        return step

    def _own_rows(self, batches: Sequence[tuple[Tensor, Documents]]) -> dict[int, list[Tensor]]:
        """layer -> per micro-batch int64 [T, columns] of the tokens that this rank keeps between sites."""
        ids_T = torch.cat([ids_BS.reshape(-1) for ids_BS, _ in batches])
        joined = self.hash(ids_T, join_documents([documents for _, documents in batches]), self.layers)
        sizes = [ids_BS.numel() for ids_BS, _ in batches]

        def own(rows_TC: Tensor, batch_size: int) -> Tensor:
            kept = self.layout.context_slice(rows_TC.unflatten(0, (batch_size, -1))).flatten(0, 1)
            return self.layout.stream_slice(kept, batch_size)

        return {
            layer: [own(part, ids.shape[0]) for part, (ids, _) in zip(rows.split(sizes), batches, strict=True)]
            for layer, rows in joined.items()
        }

    def _unique(self, rows: Mapping[int, list[Tensor]], begin: int, end: int) -> list[tuple[Tensor, list[Tensor]]]:
        """Per table: the distinct rows of some micro-batches, and each micro-batch's slots [T, columns] among them."""
        found = []
        for layer in self.all_layers:
            parts = rows.get(layer, [])[begin:end]
            if not parts:
                found.append((torch.empty(0, dtype=torch.int64, device=self.hash.token_map.device), []))
                continue
            ids, slots = torch.unique(torch.cat([part.flatten() for part in parts]), return_inverse=True)
            pieces = slots.split([part.numel() for part in parts])
            found.append((ids, [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]))
        return found

    def _fetched(
        self,
        index: int,
        window: Window,
        unique: list[tuple[Tensor, list[Tensor]]],
        everything: list[Tensor],
        gradients: Mapping[int, RowGradients],
    ) -> dict[int, FetchedRows]:
        found = {}
        for layer in self.layers:
            table = self.all_layers.index(layer)
            ids, slots = unique[table]
            slots_TC, sums = slots[index % (self.window or len(slots))], gradients.get(layer)
            runs = Runs.of(torch.searchsorted(everything[table], ids)[slots_TC.flatten()]) if sums else None
            places_TC = window.route.places[table][slots_TC]
            found[layer] = FetchedRows(window, places_TC, self.form, self.dtype, self.ops, sums, runs)
        return found

    def serve(self, step: StepRows) -> None:
        """Send the rows of a step's first window, once; the tables must hold what the step reads.

        EngramFault when row numbers have arrived that are not their receiver's. Looks at the device once.
        """
        if step.served:
            return
        rank, group = dist.get_rank(), dist.get_rank() // self.groups.owners
        held = [owners.range_of(rank % self.groups.owners) for owners in self.owners]
        held = [rows if self.owned.get(layer) else (0, 0) for layer, rows in zip(self.all_layers, held, strict=True)]
        with on_stream(self.stream):
            faults = [window.route.take_ids(held) for window in step.windows]
            for fault in faults:
                fault[1] += group * self.groups.owners  # ranks of the world
            if step.returns is not None:
                faults.append(step.returns.take_ids([updaters.range_of(rank) for updaters in self.updaters]))
            self.refuse(faults)
        self._serve_next(step)

    def begin(self, step: StepRows) -> None:
        """A step starts to compute: its rows are on their way from here on at the latest."""
        self.serve(step)
        if step.returns is not None:
            self.current = step
        if step is self.upcoming:
            self.upcoming = None

    def reached(self, step: StepRows, micro_batch: int) -> None:
        """A rank begins a micro-batch: the first of a window sends the rows of the next window."""
        if micro_batch and step.window_of[micro_batch] == step.window_of[micro_batch - 1]:
            return
        if step.window_of[micro_batch] + 1 == step.served < len(step.windows):
            self._serve_next(step)

    def _serve_next(self, step: StepRows) -> None:
        def read(table: int, ids: Tensor) -> Tensor:
            owned = self.owned.get(self.all_layers[table])
            return ids.new_empty(0, self.form.width, dtype=torch.uint8) if owned is None else owned.serve(ids)

        step.windows[step.served].serve(read, self.form.width)
        step.served += 1

    def tables_changed(self) -> None:
        """The step's update is published: what the next step reads may cross."""
        if self.upcoming is not None:
            self.serve(self.upcoming)

    # --- after the last backward --------------------------------------------------------------------------------

    def start_return(self) -> None:
        """Send the gradients of the current step to whoever updates their rows."""
        step = self.current
        if step is None or step.returns is None:
            return
        with record_function(RETURN), on_stream(self.stream):
            step.returning = step.returns.forward(self._sums(step), self.form.dim, torch.float32)

    def _sums(self, step: StepRows) -> Iterator[Tensor]:
        """Summed gradients of every table, each given up when the next is asked for."""
        for layer in self.all_layers:
            if layer not in step.gradients:
                yield torch.empty(0, self.form.dim, device=self.hash.token_map.device)
                continue
            sums_UD = step.gradients[layer].give()
            if sums_UD.is_cuda:
                sums_UD.record_stream(self.stream)  # made by a backward, on its stream
            yield sums_UD

    def finish_return(self) -> list[Tensor]:
        """Sum what arrived into row-sparse gradients of the tables' masters, and give their values [rows, dim].

        EngramFault when messages came short.
        """
        step, self.current, found = self.current, None, []
        if step is None:
            return found
        faults = [window.reply.fault for window in step.windows if window.waited and window.reply is not None]
        with record_function(RETURN), on_stream(self.stream):
            if step.returning is not None and step.returns is not None:
                arrived = step.returning.wait()
                for table, layer in enumerate(self.all_layers):
                    if layer in self.owned:
                        found.append(self._take_gradient(self.owned[layer], table, step.returns, arrived))
                faults.append(step.returning.fault)
            self.refuse([fault for fault in faults if fault is not None])
        torch.cuda.current_stream().wait_stream(self.stream)
        for window in step.windows:
            window.reply = None  # its rows have been read for the last time
        self.last = step.windows
        return found

    def _take_gradient(self, table: OwnedTable, index: int, route: Route, arrived: Tensor) -> Tensor:
        here_E = route.asked(index)
        runs = Runs.of(route.received.ids_E[here_E] - table.first).among(route.received.places(1)[here_E])
        sums_MD = self.ops["engram.merge"](arrived, runs, self.gradient_scale)
        table.master.grad = row_sparse(runs.rows_M, sums_MD, table.last - table.first)
        return sums_MD

    def milliseconds(self) -> dict[str, Tensor]:
        """Of the last step's fetches, from serving to arrival: what forward passes waited for, and the rest.

        The slowest rank of each. Synchronises.
        """
        both = [window.milliseconds() for window in self.last]
        exposed = sum(waited for _, waited in both)
        hidden = sum(fetch for fetch, _ in both) - exposed
        slowest = torch.tensor([hidden, exposed], device=self.hash.token_map.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.groups.world)
        return {"engram_fetch_hidden_ms": slowest[0], "engram_fetch_exposed_ms": slowest[1]}

    # --- faults -------------------------------------------------------------------------------------------------

    def refuse(self, faults: Sequence[Tensor]) -> None:
        """EngramFault on every rank when any rank has a fault (ranks of the world)."""
        fault = torch.zeros(4, dtype=torch.int64, device=self.hash.token_map.device)
        for other in reversed(faults):
            fault = torch.where(other[0] != SOUND, other, fault)
        found = read_faults(fault, self.groups.world)
        if found:
            raise EngramFault("\n".join(self._message(*one) for one in found))

    def _message(self, rank: int, kind: int, peer: int, table: int, row: int) -> str:
        owners, layer = self.owners[table], self.all_layers[table]
        name = f"layers.{layer}.engram.embed"
        if kind == OUT_OF_RANGE:
            return (
                f"rank {peer} asked rank {rank} for row {row} of {name}, which has {_rows_of(owners, rank)} of its "
                f"{owners.rows} rows: a token id outside the vocabulary, or other hash constants than the tables'"
            )
        return (
            f"an Engram exchange came short: of what rank {peer} sends, not all has arrived at rank {rank}; the last "
            f"that should have come is row {row} of {name}"
        )


def _rows_of(owners: RowOwners, rank: int) -> str:
    begin, end = owners.range_of(rank % len(owners.ranks))
    return f"rows {begin} to {end - 1}" if end > begin else "none"
