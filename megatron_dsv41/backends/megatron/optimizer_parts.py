"""Which data-parallel rank updates which part of a parameter: every part has one owner, who alone keeps its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_dsv41.backends.megatron.layout import Layout, cuts_of
from megatron_dsv41.backends.megatron.state_dict import is_expert
from megatron_dsv41.optim.groups import Algorithm, ParameterGroup
from megatron_dsv41.optim.optimizer import Place
from megatron_dsv41.optim.shards import MatrixView, Shard, matrix_view

GATHER_ELEMENTS = 1 << 26  # of one all-gather of updated parameters


@dataclasses.dataclass
class Part:
    """Rows begin..end (first axis) of this rank's copy of a parameter, owned by data-parallel rank `owner`."""

    name: str
    parameter: nn.Parameter
    begin: int
    end: int
    owner: int
    place: Place
    group: ProcessGroup  # the data-parallel group of the parameter

    @property
    def value(self) -> Tensor:
        """The rows, as a view of the parameter."""
        return self.parameter.data[self.begin : self.end]

    @property
    def is_mine(self) -> bool:
        """This rank is the owner."""
        return self.group.rank() == self.owner


def whole_shape(parameter: Tensor, layout: Layout) -> tuple[int, ...]:
    """Shape of the parameter before the layout cut it."""
    shape = list(parameter.shape)
    for cut in cuts_of(parameter):
        shape[cut.dim] *= getattr(layout, cut.axis).size
    return tuple(shape)


def assign_parts(
    parameters: Mapping[str, nn.Parameter],
    table: Sequence[ParameterGroup],
    layout: Layout,
    groups: ProcessGroupCollection,
) -> dict[str, list[Part]]:
    """Native name -> the parts of the parameter on this rank's data-parallel group. The same on every rank.

    Whole logical matrices go to one owner; tables are cut by rows over all ranks; vectors are not cut. Pieces that are
    fewer than ranks go, largest first, to the rank that owns least so far.
    """
    by_name = {name: group for group in table for name in group.shapes}
    load: dict[bool, list[int]] = {}
    parts = {}
    for name in sorted(parameters, key=lambda name: (-parameters[name].numel(), name)):
        parameter, expert = parameters[name], is_expert(parameters[name])
        data = groups.expt_dp if expert else groups.dp_cp
        owned = load.setdefault(expert, [0] * data.size())
        group = by_name[name]
        place = _place(parameter, group, layout, data)
        unit = _unit(parameter, group, place.view)
        units = parameter.shape[0] // unit
        if units >= data.size() or group.algorithm is Algorithm.SINKHORN:
            bounds = [unit * (units * rank // data.size()) for rank in range(data.size() + 1)]
            ranges = [(bounds[rank], bounds[rank + 1], rank) for rank in range(data.size())]
        else:
            ranges = []
            for index in range(units):
                owner = min(range(data.size()), key=lambda rank: owned[rank])
                owned[owner] += parameter.numel() // units
                ranges.append((unit * index, unit * (index + 1), owner))
        parts[name] = [Part(name, parameter, begin, end, owner, place, data) for begin, end, owner in ranges]
    return {name: parts[name] for name in parameters}


def _place(parameter: nn.Parameter, group: ParameterGroup, layout: Layout, data: ProcessGroup) -> Place:
    cuts = cuts_of(parameter)
    if group.algorithm is Algorithm.MUON:
        shards = [Shard(cut.dim, getattr(layout, cut.axis).group) for cut in cuts]
        return Place(view=matrix_view(tuple(parameter.shape), group.matrices, shards))
    if group.algorithm is Algorithm.SINKHORN:
        others = tuple(getattr(layout, cut.axis).group for cut in cuts)
        shared = (data, *others) if data.size() > 1 else others
        return Place(total_rows=whole_shape(parameter, layout)[0], row_groups=shared)
    return Place()


def _unit(parameter: nn.Parameter, group: ParameterGroup, view: MatrixView | None) -> int:
    """The fewest rows of the first axis that an owner can have."""
    if parameter.dim() > 2:
        return 1  # experts: the first axis counts them
    if view is None:
        return 1 if parameter.dim() == 2 else parameter.shape[0]
    return view.rows


@torch.no_grad()
def share_parts(parts: Sequence[Part]) -> None:
    """Give every rank the owners' values. Parts in the same order on every rank of their group. Collective."""
    batches: dict[tuple[int, torch.dtype], list[list[Part]]] = {}
    for part in parts:
        if part.group.size() == 1:
            continue
        queue = batches.setdefault((id(part.group), part.parameter.dtype), [[]])
        if queue[-1] and sum(p.value.numel() for p in queue[-1]) + part.value.numel() > GATHER_ELEMENTS:
            queue.append([])
        queue[-1].append(part)
    for queue in batches.values():
        for batch in queue:
            _share_batch(batch)


def _share_batch(parts: Sequence[Part]) -> None:
    group = parts[0].group
    owned: list[list[Part]] = [[] for _ in range(group.size())]
    for part in parts:
        owned[part.owner].append(part)
    width = max(sum(part.value.numel() for part in some) for some in owned)
    mine = owned[group.rank()]
    sent = parts[0].value.new_zeros(width)
    if mine:
        flat = torch.cat([part.value.reshape(-1) for part in mine])
        sent[: flat.numel()] = flat
    received = sent.new_empty(group.size() * width)
    dist.all_gather_into_tensor(received, sent, group=group)
    for rank, row in enumerate(received.view(group.size(), width)):
        if rank == group.rank():
            continue
        begin = 0
        for part in owned[rank]:
            end = begin + part.value.numel()
            part.value.copy_(row[begin:end].view(part.value.shape))
            begin = end
