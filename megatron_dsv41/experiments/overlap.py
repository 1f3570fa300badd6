"""What communication costs a step: how long it runs on a device, and how much of that no computation covers.

Times are milliseconds on one axis of all ranks. Several streams may run at once; work of one kind that overlaps itself
counts once. A collective can also wait: until the last rank has come to it, no byte moves.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Span:
    """Device work from `begin` to `end`. kind: of communication; empty for computation.

    members: the ranks that take part, where they are known. waits: not all of them have come yet.
    """

    begin: float
    end: float
    kind: str = ""
    members: tuple[int, ...] = ()
    waits: bool = False


@dataclasses.dataclass(frozen=True)
class Cost:
    """Milliseconds of one kind of communication. waiting: the part of `exposed` in which a rank was still missing."""

    total: float
    exposed: float
    waiting: float


@dataclasses.dataclass(frozen=True)
class Account:
    """A step on one device, in milliseconds. exposed: of all kinds together; two that overlap count once here."""

    length: float
    computing: float
    exposed: float
    idle: float
    kinds: dict[str, Cost]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same set as ascending intervals that do not touch; those without length fall away."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def without(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """What of the first no interval of the second covers."""
    left, cover, index = list[Interval](), union(others), 0
    for begin, end in union(intervals):
        while index < len(cover) and cover[index][1] <= begin:
            index += 1
        for first, last in itertools.islice(cover, index, None):
            if first >= end:
                break
            if first > begin:
                left.append((begin, first))
            begin = max(begin, last)
        if begin < end:
            left.append((begin, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    """Of their union."""
    return sum(end - begin for begin, end in union(intervals))


def account(spans: Iterable[Span], begin: float, end: float) -> Account:
    """What happens on one device from `begin` to `end`; spans that reach beyond are cut there."""
    computing: list[Interval] = []
    kinds: dict[str, list[Interval]] = defaultdict(list)
    waiting: dict[str, list[Interval]] = defaultdict(list)
    for span in spans:
        cut = (max(span.begin, begin), min(span.end, end))
        if not span.kind:
            computing.append(cut)
            continue
        kinds[span.kind].append(cut)
        if span.waits:
            waiting[span.kind].append(cut)
    computing = union(computing)
    costs = {
        kind: Cost(length(parts), length(without(parts, computing)), length(without(waiting[kind], computing)))
        for kind, parts in sorted(kinds.items())
    }
    exposed = length(without(itertools.chain(*kinds.values()), computing))
    busy = length(computing)
    return Account(end - begin, busy, exposed, end - begin - busy - exposed, costs)


def split_waits(ranks: Sequence[Sequence[Span]]) -> list[list[Span]]:
    """Spans of every rank, where a call is divided at the moment at which its last member has come to it.

    Call n of a kind over the same members is call n of each of them. Where members disagree about how many there are
    (a rank of a pipeline with two neighbours), nothing is divided.
    """
    calls: dict[tuple[str, tuple[int, ...]], dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for rank, spans in enumerate(ranks):
        for span in sorted(spans, key=lambda span: span.begin):
            if span.kind and rank in span.members:
                calls[span.kind, span.members][rank].append(span)
    complete: dict[tuple[int, Span], float] = {}
    for (_, members), found in calls.items():
        if {len(found[rank]) for rank in members} != {len(found[members[0]])}:
            continue
        for together in zip(*(found[rank] for rank in members), strict=True):
            last = max(span.begin for span in together)
            complete |= {(rank, span): last for rank, span in zip(members, together, strict=True)}
    return [[part for span in spans for part in _divided(span, complete.get((rank, span)))] for rank, spans in
            enumerate(ranks)]  # fmt: skip


def _divided(span: Span, moment: float | None) -> list[Span]:
    if moment is None or moment <= span.begin:
        return [span]
    moment = min(moment, span.end)
    parts = [dataclasses.replace(span, end=moment, waits=True), dataclasses.replace(span, begin=moment)]
    return [part for part in parts if part.end > part.begin]
