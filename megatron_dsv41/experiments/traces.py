"""torch.profiler's Chrome traces of a step: device work as spans, and the bytes that a rank sent.

`testing.wire` puts every call of torch.distributed into a profiler range that names its group and bytes. Kinds of
communication are told apart by the groups' descriptions (Megatron's, and ours of Engram). An NCCL kernel carries its
group's too; one that does not belongs to the last call that its thread made before the launch. Without a GPU the spans
are operators, and calls for as long as the caller stayed in them.
"""

from __future__ import annotations

import bisect
import dataclasses
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_dsv41.experiments.overlap import Span

# Profiler ranges: the step that is read; what runs between the last backward pass and the optimizer; one call.
STEP, GRADIENTS, CALL = "step: whole", "step: sum gradients", "call: "
PIPELINE, EXPERT, HALO, GATHER, TENSOR = "PP payload", "EP exchange", "CP halo", "CP gather", "TP"
FETCH, RETURN, REDUCE, SUMS, OTHER = "Engram fetch", "Engram return", "DP reduce", "TP gradients", "other"
ENGRAM_ROWS, ENGRAM_RETURN = "ENGRAM_ROWS", "ENGRAM_RETURN"  # descriptions of our own groups
# Kind by the beginning of a description; the first that matches counts.
GROUPS = {
    "PIPELINE_MODEL_PARALLEL": PIPELINE,
    "EXPERT_MODEL_PARALLEL": EXPERT,
    "EXPERT_TENSOR": EXPERT,
    "CONTEXT_PARALLEL": GATHER,
    "TENSOR_MODEL_PARALLEL": TENSOR,
    "DATA_PARALLEL": REDUCE,
    "EXPERT_DATA_PARALLEL": REDUCE,
    "INTRA_": REDUCE,
    ENGRAM_ROWS: FETCH,
    ENGRAM_RETURN: RETURN,
}
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
Event = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Call:
    """What is known of communication: its group's description and ranks of the world, and the bytes a rank sends.

    message: from one rank to another, not of the whole group.
    """

    group: str = ""
    ranks: tuple[int, ...] = ()
    message: bool = False
    sent: float = 0.0

    def range_name(self) -> str:
        """Of the profiler range around it; without quotes, which not every exporter escapes."""
        ranks = ",".join(map(str, self.ranks))
        return f"{CALL}{self.group}|{ranks}|{'message' if self.message else ''}|{self.sent}"

    @classmethod
    def of_range(cls, name: str) -> Call:
        """The inverse."""
        group, ranks, message, sent = name.removeprefix(CALL).rsplit("|", 3)
        return cls(group, tuple(int(rank) for rank in ranks.split(",") if rank), bool(message), float(sent))


@dataclasses.dataclass(frozen=True)
class Trace:
    """One rank's step from `begin` to `end` in milliseconds since the epoch. sent: bytes by kind of communication."""

    begin: float
    end: float
    spans: tuple[Span, ...]
    sent: dict[str, float]


def read_trace(path: str | Path) -> Trace:
    """The last step (range STEP) of a trace file (.json or .json.gz). ValueError where there is none."""
    path = Path(path)
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as stream:
        whole = json.load(stream)
    events = [event for event in whole["traceEvents"] if event.get("ph") == "X"]
    steps = [e for e in events if e["name"] == STEP and e.get("cat") == "user_annotation"]
    if not steps:
        raise ValueError(f"{path} holds no range '{STEP}'")
    step = max(steps, key=lambda event: event["ts"])
    base, first, last = int(whole.get("baseTimeNanoseconds", 0)) / 1e6, step["ts"], step["ts"] + step["dur"]
    events = _Events(event for event in events if first <= event["ts"] <= last)
    spans: list[Span] = []
    for event, call in events.work():
        begin, end = base + event["ts"] / 1e3, base + (event["ts"] + event["dur"]) / 1e3
        spans.append(Span(begin, end, events.kind(event, call), call.ranks if call else ()))
    sent: dict[str, float] = defaultdict(float)
    for event, call in events.calls:
        sent[events.kind(event, call)] += call.sent
    return Trace(base + first / 1e3, base + last / 1e3, tuple(spans), dict(sent))


class _Events:
    """Events of a step, and which call device work belongs to."""

    def __init__(self, events: Iterable[Event]):
        self.events = list(events)
        ranges = [e for e in self.events if e["name"].startswith(CALL) and e.get("cat") == "user_annotation"]
        self.calls = [(e, Call.of_range(e["name"])) for e in sorted(ranges, key=lambda event: event["ts"])]
        self.by_thread: dict[Any, tuple[list[float], list[Call]]] = defaultdict(lambda: ([], []))
        for event, call in self.calls:
            times, calls = self.by_thread[event["tid"]]
            times.append(event["ts"])
            calls.append(call)
        self.launches = {
            event["args"]["correlation"]: event
            for event in self.events
            if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
        }
        self.gradients = [e for e in self.events if e["name"] == GRADIENTS and e.get("cat") == "user_annotation"]

    def work(self) -> list[tuple[Event, Call | None]]:
        """Of the device, of the processor where there is no device, with the call that it carries out, if any."""
        found = [event for event in self.events if event.get("cat") in DEVICE]
        if found:
            return [(event, self._call(event)) for event in found]
        operators = [e for e in self.events if e.get("cat") == "cpu_op" and e["name"].startswith("aten::")]
        return [*((event, None) for event in operators), *self.calls]

    def kind(self, event: Event, call: Call | None) -> str:
        """Of communication; empty for computation."""
        if call is None:
            return ""
        kind = next((kind for start, kind in GROUPS.items() if call.group.startswith(start)), OTHER)
        message = call.message or "SendRecv" in event["name"]
        if kind == GATHER and message:
            return HALO
        if kind == PIPELINE and not message:
            return OTHER
        if kind == TENSOR and self._sums_gradients(self._launch(event)):
            return SUMS
        return kind

    def _call(self, event: Event) -> Call | None:
        args = event.get("args", {})
        if not event["name"].startswith("nccl"):
            return None
        if described := args.get("Process Group Description"):
            ranks = str(args.get("Process Group Ranks", ""))
            known = () if "..." in ranks else tuple(int(rank) for rank in re.findall(r"\d+", ranks))
            return Call(str(described), known)
        launch = self._launch(event)
        times, calls = self.by_thread[launch["tid"]]
        place = bisect.bisect_right(times, launch["ts"])
        return calls[place - 1] if place else Call()

    def _launch(self, event: Event) -> Event:
        return self.launches.get(event.get("args", {}).get("correlation"), event)

    def _sums_gradients(self, event: Event) -> bool:
        return any(r["tid"] == event["tid"] and r["ts"] <= event["ts"] <= r["ts"] + r["dur"] for r in self.gradients)
