"""How released tensors make up a native one. Every transform is invertible and moves whole pieces, no elements:
the released tensors, in order, lie one behind the other in the native tensor. That is what lets conversion stream
either way, and copy quantized bytes without touching them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_dsv41.checkpoint.regions import Region


@dataclasses.dataclass(frozen=True)
class Transform:
    """Released parts [*part] -> native [*lead, *part]. `lead` is () for one part, else the axes that count parts."""

    lead: tuple[int, ...] = ()

    @property
    def num_parts(self) -> int:
        """Released tensors per native tensor."""
        return math.prod(self.lead)

    def native_shape(self, part_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the native tensor made of parts of one shape."""
        return (*self.lead, *part_shape)

    def to_native(self, parts: Sequence[Tensor], lead: Sequence[int] | None = None) -> Tensor:
        """Parts in order -> native tensor. lead: sizes of the leading axes where only some parts are given (default:
        some of the first axis, all of the others).
        """
        if not self.lead:
            return parts[0]
        return torch.stack(list(parts)).reshape(*(lead or (-1, *self.lead[1:])), *parts[0].shape)

    def to_released(self, native: Tensor) -> list[Tensor]:
        """The inverse: the parts of a native tensor, or of some of its leading axes, in order."""
        return [native] if not self.lead else list(native.flatten(0, len(self.lead) - 1).unbind(0))

    def parts_of(self, lead: Region) -> list[int]:
        """The parts in a region of the leading axes, in order."""
        strides = [math.prod(self.lead[axis + 1 :]) for axis in range(len(self.lead))]
        return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*lead)]

    def singles(self, lead: Region) -> list[Region]:
        """Those parts one by one, as regions of the leading axes."""
        return [tuple(range(i, i + 1) for i in index) for index in itertools.product(*lead)]


def same() -> Transform:
    """One released tensor is the native tensor."""
    return Transform()


def stack(count: int) -> Transform:
    """One tensor per expert -> [count, ...]."""
    return Transform((count,))


def stack_gate_up(count: int) -> Transform:
    """Gate and up matrices of every expert, gate first -> [count, 2, ...]."""
    return Transform((count, 2))
