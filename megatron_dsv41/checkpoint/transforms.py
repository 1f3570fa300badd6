"""How released tensors make up a native one. Every transform is invertible and moves whole pieces, no elements:
the released tensors, in order, lie one behind the other in the native tensor. That is what lets conversion stream
either way, and copy quantized bytes without touching them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor


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

    def to_native(self, parts: Sequence[Tensor]) -> Tensor:
        """Parts in order -> native tensor; the first axis may be shorter than `lead[0]` (a slice of the parts)."""
        if not self.lead:
            return parts[0]
        return torch.stack(list(parts)).reshape(-1, *self.lead[1:], *parts[0].shape)

    def to_released(self, native: Tensor) -> list[Tensor]:
        """The inverse: the parts of a native tensor, or of a slice of its first axis, in order."""
        return [native] if not self.lead else list(native.flatten(0, len(self.lead) - 1).unbind(0))

    def parts_of_rows(self, rows: range) -> range:
        """The parts that hold rows of the native tensor's first axis, where that axis counts parts."""
        each = math.prod(self.lead[1:])
        return range(rows.start * each, rows.stop * each)


def same() -> Transform:
    """One released tensor is the native tensor."""
    return Transform()


def stack(count: int) -> Transform:
    """One tensor per expert -> [count, ...]."""
    return Transform((count,))


def stack_gate_up(count: int) -> Transform:
    """Gate and up matrices of every expert, gate first -> [count, 2, ...]."""
    return Transform((count, 2))
