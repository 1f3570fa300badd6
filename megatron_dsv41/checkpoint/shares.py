"""Which rank of a layout owns which part of which native tensor: what an import for that layout divides files by."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from megatron_dsv41.checkpoint.mapping import Binding, Split
from megatron_dsv41.checkpoint.regions import Region, whole

LAST_AXIS = (Split.GROUP_INPUTS, Split.FFN_INPUTS)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A division of the model. stages: layers of every pipeline rank. The sizes: ways a stage's tensors are split over
    tensor, expert and expert-tensor ranks and over owners of Engram rows. Copies (data, context parallel) own nothing.
    """

    stages: tuple[tuple[int, ...], ...]
    tp: int = 1
    ep: int = 1
    etp: int = 1
    engram: int = 1

    @property
    def width(self) -> int:
        """Ranks of one stage that own something."""
        return max(self.tp, self.ep * self.etp, self.engram)

    @property
    def num_ranks(self) -> int:
        """Ranks that own something."""
        return self.width * len(self.stages)

    def owned(self, rank: int, bindings: Sequence[Binding]) -> Iterator[tuple[Binding, Region]]:
        """The parts of a rank. Together the ranks own every element once."""
        stage, place = divmod(rank, self.width)
        for binding in bindings:
            if self._stage(binding) == stage:
                region = self._part(binding, place)
                if region is not None:
                    yield binding, region

    def _stage(self, binding: Binding) -> int:
        if binding.layer is None:
            return 0 if binding.split is Split.VOCAB and binding.native.startswith("embed") else len(self.stages) - 1
        return next(stage for stage, layers in enumerate(self.stages) if binding.layer in layers)

    def _part(self, binding: Binding, place: int) -> Region | None:
        cuts = self._cuts(binding)
        region = list(whole(binding.shape))
        for axis, ways in cuts:
            place, part = divmod(place, ways)
            size = binding.shape[axis]
            region[axis] = range(part * size // ways, (part + 1) * size // ways)
        return tuple(region) if place == 0 else None

    def _cuts(self, binding: Binding) -> list[tuple[int, int]]:
        """(axis, ways) of each cut; the first varies fastest with the rank."""
        if binding.split is Split.NONE:
            return []
        if binding.split is Split.ENGRAM_ROWS:
            return [(0, self.engram)]
        if binding.split is Split.EXPERTS:
            return [(2 if len(binding.via.lead) > 1 else len(binding.shape) - 1, self.etp), (0, self.ep)]
        return [(len(binding.shape) - 1 if binding.split in LAST_AXIS else 0, self.tp)]
