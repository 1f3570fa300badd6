"""The three updates as one torch optimizer over fp32 tensors, whole or parts of sharded ones."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dsv41.ops.row_blocks import gradient_rows, row_blocks
from megatron_dsv41.ops.sinkhorn import ref
from megatron_dsv41.optim.groups import Algorithm, ParameterGroup
from megatron_dsv41.optim.muon import muon_direction, muon_update
from megatron_dsv41.optim.settings import Optimizer
from megatron_dsv41.optim.shards import MatrixView, matrix_view, on_whole_matrices, sum_over

# What each algorithm remembers of a tensor, with the shape of the tensor; AdamW also counts its steps.
MOMENTS = {
    Algorithm.MUON: ("momentum",),
    Algorithm.SINKHORN: ("momentum",),
    Algorithm.ADAMW: ("exp_avg", "exp_avg_sq"),
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an optimizer tensor lies in its logical matrices or in its table.

    view: of Muon's tensors. total_rows, row_groups: of balanced tables, all rows and the groups that share them.
    """

    view: MatrixView | None = None
    total_rows: int = 0
    row_groups: tuple[ProcessGroup, ...] = ()


class MixedOptimizer(torch.optim.Optimizer):
    """Muon, Sinkhorn-balanced momentum and AdamW, each on the groups that name it (SPEC 17).

    A group is a dict with `params`, `places` (one Place per tensor), `algorithm`, `weight_decay`, `frozen`, and `lr`.
    Tensors are float32 or float64; one without gradient is left alone, and so is a frozen group, but both have state.
    Tables may also be bfloat16, and their gradients row-sparse; both are then updated a block of rows at a time.
    balanced_update: a provider of sinkhorn.update. `step` is collective over the groups of the places: every rank must
    hold its part of the same tensors in one order.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        settings: Optimizer,
        balanced_update: Callable[..., None] = ref.sinkhorn_update,
    ):
        self.settings, self.balanced_update = settings, balanced_update
        super().__init__([dict(group) for group in groups], {"lr": settings.lr, "weight_decay": 0.0, "frozen": False})
        for group in self.param_groups:
            for tensor in group["params"]:
                self.state[tensor] = self._initial_state(group["algorithm"], tensor)

    def _initial_state(self, algorithm: Algorithm, tensor: Tensor) -> dict[str, Tensor]:
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        if algorithm is not Algorithm.ADAMW and dtype is torch.float32:
            dtype = getattr(torch, self.settings.momentum_dtype)
        pinned = tensor.is_pinned()  # a table in host memory: its state lies beside it
        state = {
            moment: torch.zeros(tensor.shape, dtype=dtype, device=tensor.device, pin_memory=pinned)
            for moment in MOMENTS[algorithm]
        }
        if algorithm is Algorithm.ADAMW:
            state["step"] = torch.zeros(1, device="cpu")  # read at every step: never on a GPU
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of everything that has a gradient."""
        for group in self.param_groups:
            self.update(group)

    @torch.no_grad()
    def update(self, group: dict[str, Any]) -> None:
        """One update of the tensors of one group that have a gradient."""
        if group["frozen"]:
            return
        updates = {Algorithm.MUON: self._muon, Algorithm.SINKHORN: self._sinkhorn, Algorithm.ADAMW: self._adamw}
        for tensor, place in zip(group["params"], group["places"], strict=True):
            if tensor.grad is not None:
                updates[group["algorithm"]](group, tensor, place, self.state[tensor])

    def _muon(self, group: dict[str, Any], tensor: Tensor, place: Place, state: dict[str, Tensor]) -> None:
        s = self.settings
        assert place.view is not None and tensor.grad is not None
        orthogonal = functools.partial(
            muon_direction,
            rms=s.update_rms,
            steps=s.newton_schulz,
            eps=s.ns_eps,
            dtype=None if tensor.dtype is torch.float64 else getattr(torch, s.ns_dtype),
        )
        muon_update(
            tensor,
            tensor.grad,
            state["momentum"],
            functools.partial(on_whole_matrices, view=place.view, direction=orthogonal),
            lr=group["lr"],
            decay=group["weight_decay"],
            beta=s.momentum,
            nesterov=s.nesterov,
        )

    def _sinkhorn(self, group: dict[str, Any], tensor: Tensor, place: Place, state: dict[str, Tensor]) -> None:
        s = self.settings
        assert tensor.grad is not None
        # Rows in host memory cross a block at a time, as the definition reads them.
        update = self.balanced_update if tensor.device == tensor.grad.device else ref.sinkhorn_update
        update(
            tensor,
            tensor.grad,
            state["momentum"],
            lr=group["lr"],
            beta=s.sinkhorn_momentum,
            rms=s.sinkhorn_rms,
            total_rows=place.total_rows or None,
            steps=s.sinkhorn_steps,
            threshold=s.sinkhorn_threshold,
            eps=s.sinkhorn_eps,
            reduce=sum_over(place.row_groups),
        )

    def _adamw(self, group: dict[str, Any], tensor: Tensor, place: Place, state: dict[str, Tensor]) -> None:
        grad = tensor.grad
        assert grad is not None
        state["step"] += 1
        if grad.layout is not torch.sparse_coo:
            self._adamw_part(group, tensor, grad, state, slice(None))
            return
        gradient = gradient_rows(grad)
        for rows in row_blocks(tensor.shape[0], tensor.shape[1]):
            self._adamw_part(group, tensor, gradient(rows), state, rows)

    def _adamw_part(
        self, group: dict[str, Any], tensor: Tensor, grad: Tensor, state: dict[str, Tensor], rows: slice
    ) -> None:
        s, step, stored = self.settings, int(state["step"]), (tensor, state["exp_avg"], state["exp_avg_sq"])
        weight, mean, square = (
            part[rows].to(grad.device, torch.promote_types(part.dtype, grad.dtype)) for part in stored
        )
        mean.lerp_(grad, 1 - s.beta1)
        square.mul_(s.beta2).addcmul_(grad, grad, value=1 - s.beta2)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        root = square.sqrt().div_(math.sqrt(1 - s.beta2**step)).add_(s.eps)
        weight.addcdiv_(mean, root, value=-group["lr"] / (1 - s.beta1**step))
        for part, new in zip(stored, (weight, mean, square), strict=True):
            if new.data_ptr() != part[rows].data_ptr():
                part[rows] = new.to(part.device, part.dtype)


def optimizer_group(group: ParameterGroup, tensors: Sequence[Tensor], places: Sequence[Place]) -> dict[str, Any]:
    """The param_group of a row of the table. `lr_multiplier` is for whoever sets the rates."""
    return {
        "params": list(tensors),
        "places": list(places),
        "algorithm": group.algorithm,
        "weight_decay": group.decay,
        "lr_multiplier": group.lr,
        "frozen": group.frozen,
        "role": group.role,
    }


def whole_optimizer(
    parameters: Mapping[str, Tensor], groups: Sequence[ParameterGroup], settings: Optimizer
) -> MixedOptimizer:
    """The optimizer of one process that holds every parameter whole, at the settings' learning rate."""
    built = []
    for group in groups:
        tensors = [parameters[name] for name in group.shapes]
        views = [
            matrix_view(tuple(t.shape), group.matrices) if group.algorithm is Algorithm.MUON else None for t in tensors
        ]
        built.append(optimizer_group(group, tensors, [Place(view) for view in views]) | {"lr": settings.lr * group.lr})
    return MixedOptimizer(built, settings)
