"""This rank's place in a layout: process groups, as plain values that model parts take as arguments."""

from __future__ import annotations

import dataclasses
from typing import Self

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_dsv41.modules.transformer import SequenceShard


@dataclasses.dataclass(frozen=True)
class Axis:
    """One parallel axis; `group` is None where it is not split."""

    group: ProcessGroup | None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: ProcessGroup | None) -> Self:
        """The axis of a group; a group of one is no split."""
        if group is None or group.size() == 1:
            return cls(None)
        return cls(group, group.rank(), group.size())

    def share(self, size: int) -> int:
        """Equal part of `size` units; the layout was checked to divide it."""
        assert size % self.size == 0, (size, self.size)
        return size // self.size

    def slice(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of `tensor` along `dim`."""
        return tensor.chunk(self.size, dim)[self.rank] if self.size > 1 else tensor


@dataclasses.dataclass(frozen=True)
class Layout:
    """All axes that model parts look at."""

    tp: Axis = Axis(None)
    cp: Axis = Axis(None)
    ep: Axis = Axis(None)
    etp: Axis = Axis(None)
    sequence: bool = False  # tokens are split over tp between sites

    @classmethod
    def of(cls, groups: ProcessGroupCollection, sequence: bool) -> Self:
        """The layout of Megatron's groups."""
        return cls(
            tp=Axis.of(groups.tp),
            cp=Axis.of(groups.cp),
            ep=Axis.of(groups.ep),
            etp=Axis.of(groups.expt_tp),
            sequence=sequence,
        )

    @property
    def shard(self) -> SequenceShard:
        """This rank's piece of the sequence inside sites."""
        return SequenceShard(self.cp.rank, self.cp.size)

    def context_slice(self, x_BS: Tensor) -> Tensor:
        """[b, s, ...] -> this rank's context shard of it."""
        return self.cp.slice(x_BS, 1)

    def stream_slice(self, x_T: Tensor, batch_size: int) -> Tensor:
        """Flat tokens inside sites -> flat tokens as kept between sites."""
        if not self.sequence or self.tp.size == 1:
            return x_T
        return self.tp.slice(x_T.unflatten(0, (batch_size, -1)), 1).flatten(0, 1)


@dataclasses.dataclass(frozen=True)
class Cut:
    """A parameter's dimension that is split over an axis."""

    dim: int
    axis: str  # "tp", "etp" or "ep"


def mark(parameter: nn.Parameter, layout: Layout, *cuts: Cut, between_sites: bool = False) -> nn.Parameter:
    """Tell Megatron's optimizer and our checkpoints how a parameter is split, and whose gradients add up."""
    cuts = tuple(cut for cut in cuts if getattr(layout, cut.axis).size > 1)
    parameter.cuts = cuts  # type: ignore[attr-defined]
    tensor_cut = next((cut for cut in cuts if cut.axis in ("tp", "etp")), None)
    if tensor_cut is not None:
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]  # counted on every rank of the norm
        parameter.partition_dim, parameter.partition_stride = tensor_cut.dim, 1  # type: ignore[attr-defined]
    # Megatron sums the gradients of such parameters over tp: each rank saw only its tokens.
    parameter.sequence_parallel = between_sites and layout.sequence  # type: ignore[attr-defined]
    return parameter


def cuts_of(parameter: Tensor) -> tuple[Cut, ...]:
    """What `mark` recorded; nothing for buffers, which are whole everywhere."""
    return getattr(parameter, "cuts", ())
