"""Fetched Engram rows in flight: posted by one part of a step, waited for by another, and how long that took."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from megatron_dsv41.parallel.engram import Posted, Route

FETCH, WAIT, RETURN = "engram: fetch rows", "engram: wait for rows", "engram: return gradients"


def on_stream(stream: Any) -> Any:
    """Work inside the block runs beside the current stream, after everything that is queued there now.

    Buffers that such blocks made may be freed at any time: whoever gets the memory is queued after their last reader.
    """
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


class Window:
    """A `RowSource`: the rows that some micro-batches of a step read, from all tables of a rank."""

    def __init__(self, route: Route, stream: Any):
        self.route, self.stream = route, stream
        self.reply: Posted | None = None
        self.waited = False
        self.started, self.arrived, self.asked, self.got = (torch.cuda.Event(enable_timing=True) for _ in range(4))

    def serve(self, read: Callable[[int, Tensor], Tensor], width: int) -> None:
        """Send the rows that others asked for: read(table, ids) -> uint8 [n, width]."""
        with record_function(FETCH), on_stream(self.stream):
            self.started.record()
            self.reply = self.route.reply(read, width)
            if self.reply.work is None or self.reply.buffer.is_cuda:
                self.reply.wait()  # holds up this stream, not the host
                self.arrived.record()
            else:
                self.reply.work.get_future().add_done_callback(lambda _: self.arrived.record())

    def wait(self) -> Tensor:
        """See RowSource."""
        assert self.reply is not None, "rows are read that were not served"
        if self.waited:
            return self.reply.buffer
        with record_function(WAIT):
            self.asked.record()
            rows = self.reply.wait()
            torch.cuda.current_stream().wait_event(self.arrived)
            self.got.record()
        self.waited = True
        return rows

    def milliseconds(self) -> tuple[float, float]:
        """(of the fetch, from serving to arrival; of them waited for in a forward pass). Synchronises with its end."""
        if not self.waited:
            return 0.0, 0.0
        self.got.synchronize()
        waited = self.asked.elapsed_time(self.got)
        return max(self.started.elapsed_time(self.arrived), waited), waited
