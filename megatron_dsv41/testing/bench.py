"""Device time of a call, read from CUDA events around CUDA-graph replays, so that launch gaps stay out of it."""

from __future__ import annotations

import functools
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

FASTEST = "*=hopper, triton, grouped, blocked, split"  # of ops, on a Hopper GPU


class Timing(NamedTuple):
    """Milliseconds of one call: the median over the repeats, and their range."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; none where they are hidden."""
    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[:count] or [str(number) for number in range(count)]


def device_ms(*calls: Callable[[], object], repeats: int = 7, span_ms: float = 20.0) -> Timing:
    """Time of one call on the current CUDA device. Several `calls` are timed in turn, as one after the other.

    Give calls over different inputs where one call's inputs would fit in the L2 cache. Every call must be capturable
    in a CUDA graph: no host sync, no new shapes. Each repeat replays the graph for about `span_ms`.
    """
    if not torch.cuda.is_available():
        raise ValueError("device_ms times CUDA work: there is no CUDA device")
    side = _stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for call in calls * 2:  # compiles, autotunes and fills the allocator before the capture
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for call in calls:
            call()
    replays = max(1, int(span_ms / max(_elapsed(graph, 2) / 2, 1e-3)))
    times = [_elapsed(graph, replays) / (replays * len(calls)) for _ in range(repeats)]
    return Timing(statistics.median(times), min(times), max(times))


def eager_ms(call: Callable[[], object], repeats: int = 7) -> Timing:
    """Time of one eager call on the current CUDA device, launch gaps and host waits included."""
    call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return Timing(statistics.median(times), min(times), max(times))


def _elapsed(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def backward_call(forward: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]) -> Callable[[], Any]:
    """A call of the backward alone, for `device_ms`, with random output gradients. The forward runs once, here."""
    torch.cuda.synchronize()
    with torch.cuda.stream(_stream()):  # a backward runs on its forward's stream
        outputs = [out for out in forward() if out.requires_grad]
        grads = [torch.randn_like(out) for out in outputs]
    torch.cuda.synchronize()
    return lambda: torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True)


@functools.cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def relative_error(value: Tensor, exact: Tensor) -> float:
    """||value - exact|| / ||exact|| in fp64; inf where `value` is not finite."""
    value, exact = value.detach().double(), exact.detach().double()
    if not bool(value.isfinite().all()):
        return float("inf")
    return float((value - exact).norm() / exact.norm().clamp_min(1e-300))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with aligned columns."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)
