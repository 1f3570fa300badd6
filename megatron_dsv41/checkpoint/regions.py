"""Boxes of a tensor: one range per axis. What a reader asks for, what a file holds, where the two meet."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

Region = tuple[range, ...]
ReadInto = Callable[[memoryview, int], None]  # fills the buffer from a byte offset


def region_of(shape: Sequence[int], cut: Sequence[slice]) -> Region:
    """One range per axis: slices of the first axes, the others whole. ValueError where a slice leaves its axis."""
    if len(cut) > len(shape):
        raise ValueError(f"{len(cut)} slices of a tensor of shape {list(shape)}")
    region: list[range] = []
    for axis, size in enumerate(shape):
        part = cut[axis] if axis < len(cut) else slice(None)
        start, stop = part.start or 0, size if part.stop is None else part.stop
        if part.step not in (None, 1) or not 0 <= start <= stop <= size:
            raise ValueError(f"rows {part} of axis {axis} of a tensor of shape {list(shape)}")
        region.append(range(start, stop))
    return tuple(region)


def whole(shape: Sequence[int]) -> Region:
    """All of a tensor."""
    return tuple(range(size) for size in shape)


def shape_of(region: Region) -> tuple[int, ...]:
    """Sizes of a region."""
    return tuple(len(axis) for axis in region)


def slices_of(region: Region) -> tuple[slice, ...]:
    """The region as an index."""
    return tuple(slice(axis.start, axis.stop) for axis in region)


def shifted(region: Region, origin: Sequence[int]) -> Region:
    """The region counted from another origin."""
    return tuple(range(axis.start - zero, axis.stop - zero) for axis, zero in zip(region, origin, strict=True))


def intersection(a: Region, b: Region) -> Region | None:
    """What two regions share; None where that is nothing."""
    common = tuple(range(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return common if all(common) else None


def read_region(read: ReadInto, shape: Sequence[int], dtype: torch.dtype, region: Region) -> Tensor:
    """A region of a tensor that lies contiguously (row-major, from byte 0), reading nothing else.

    Costs one call of `read` per contiguous run.
    """
    data = torch.empty(shape_of(region), dtype=dtype)
    if data.numel() == 0:
        return data
    buffer = memoryview(data.view(-1).view(torch.uint8).numpy())
    done = 0
    for start, length in _runs(shape, region):
        begin, size = start * dtype.itemsize, length * dtype.itemsize
        read(buffer[done : done + size], begin)
        done += size
    return data


def _runs(shape: Sequence[int], region: Region) -> Iterator[tuple[int, int]]:
    """(first element, number of elements) of the contiguous runs of a region, in order."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    last = len(shape)  # axes from here on are whole
    while last and len(region[last - 1]) == shape[last - 1]:
        last -= 1
    outer, run_axis = region[: max(last - 1, 0)], max(last - 1, 0)
    first = region[run_axis].start * strides[run_axis] if shape else 0
    length = math.prod(len(axis) for axis in region[run_axis:])
    for index in itertools.product(*outer):
        yield first + sum(i * stride for i, stride in zip(index, strides, strict=False)), length
