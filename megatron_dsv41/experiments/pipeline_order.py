"""In which order a pipeline rank runs its chunks forward and backward: Megatron's 1F1B and its interleaved form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def pipeline_order(
    stage: int, pipeline: int, virtual: int, micro_batches: int, group: int | None = None
) -> Iterator[tuple[bool, int]]:
    """(is forward, chunk of the rank) of every pass of a step on the rank of a pipeline stage.

    Chunks of the interleaved form take turns after `group` micro-batches each (None: as many as there are stages);
    backward passes take the chunks in reverse.
    """
    group = group or pipeline
    forward = list(_turns(virtual, micro_batches, group))
    ahead = pipeline - stage - 1
    if virtual > 1:
        ahead = 2 * ahead + (virtual - 1) * group
    ahead = min(ahead, len(forward))
    for number in range(len(forward) + ahead):
        if number < len(forward):
            yield True, forward[number]
        if number >= ahead:
            yield False, virtual - 1 - forward[number - ahead]


def waiting_chunks(order: Iterable[tuple[bool, int]], virtual: int) -> Iterator[tuple[int, Sequence[int]]]:
    """At every backward pass: its chunk, and how many micro-batches of each chunk have not finished theirs."""
    waiting = [0] * virtual
    for is_forward, chunk in order:
        if is_forward:
            waiting[chunk] += 1
        else:
            yield chunk, tuple(waiting)
            waiting[chunk] -= 1


def _turns(virtual: int, micro_batches: int, group: int) -> Iterator[int]:
    """Chunks of all forward passes."""
    for first in range(0, micro_batches, group):
        for chunk in range(virtual):
            for _ in range(first, min(first + group, micro_batches)):
                yield chunk
