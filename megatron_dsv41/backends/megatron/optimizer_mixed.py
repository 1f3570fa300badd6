"""The published optimizer as Megatron sees one: clipping, fp32 copies, owners over data parallelism, checkpoints.

Megatron's own Muon path (`emerging-optimizers` through its layer-wise optimizer) knows neither heads of a projection,
nor stacks of experts, nor Sinkhorn balancing, and saves state for one data-parallel size only. DDP sums gradients as
for Megatron's plain optimizer; `overlap_grad_reduce` works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from megatron_dsv41.backends.megatron import cpu
from megatron_dsv41.backends.megatron.config import PEAK
from megatron_dsv41.backends.megatron.engram_tables import OwnedTable
from megatron_dsv41.backends.megatron.layout import Layout, cuts_of
from megatron_dsv41.backends.megatron.optimizer_parts import Part, assign_parts, share_parts, whole_shape
from megatron_dsv41.backends.megatron.state_dict import is_expert
from megatron_dsv41.checkpoint.mapping import parameter_bindings
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.optim.groups import ENGRAM_TABLE, ParameterGroup, group_parameters
from megatron_dsv41.optim.optimizer import MixedOptimizer, optimizer_group
from megatron_dsv41.run_config import Run

CLIP_EPS = 1e-6  # Megatron's, so that both optimizers clip alike


class MegatronMixedOptimizer(MegatronOptimizer):
    """MixedOptimizer over the parts that this rank owns, behind Megatron's optimizer interface.

    stages: unwrapped model stages, whose parameters have native names and gradients in `main_grad`. Engram rows that
    this rank updates have theirs in `master.grad`, in place of a `main_grad`; they are updated before everything else,
    and `tables_changed` is called when they are served, so that the rows of the next step cross during the rest.
    """

    is_stub_optimizer = False

    def __init__(
        self,
        config: OptimizerConfig,
        stages: Sequence[nn.Module],
        run: Run,
        layout: Layout,
        groups: ProcessGroupCollection,
    ):
        self.layout, self.tp_rank = layout, groups.tp.rank()
        parameters = {name: p for stage in stages for name, p in stage.named_parameters() if p.requires_grad}
        self.table = optimizer_table(run)
        self.parts = assign_parts(parameters, self.table, layout, groups)
        self.tables: list[OwnedTable] = [table for stage in stages for table in stage.engram_tables]  # type: ignore
        self.tables_changed: Callable[[], None] = _nothing
        self.frozen = {name for group in self.table if group.frozen for name in group.shapes}
        # An fp32 parameter is updated in place, any other through an fp32 copy of the part.
        self.mine: list[tuple[Part, Tensor]] = []
        param_groups = []
        for group in self.table:
            mine = [part for name in group.shapes for part in self.parts.get(name, []) if part.is_mine]
            tensors = [part.value.float() for part in mine]
            self.mine += zip(mine, tensors, strict=True)
            owned = [table for table in self.tables if table.name in group.shapes]
            places = [part.place for part in mine] + [table.place for table in owned]
            entry = optimizer_group(group, tensors + [table.master for table in owned], places)
            # What Megatron's scheduler reads: it sets `lr` and `weight_decay` before every step.
            entry |= {"max_lr": PEAK * group.lr, "min_lr": 0.0}
            entry |= {"wd_mult": float(group.decay > 0), "default_config": group.lr == 1.0}
            param_groups.append(entry)
        self.updates = MixedOptimizer(param_groups, run.optimizer, Ops(run.ops)["sinkhorn.update"])
        super().__init__(self.updates, config)
        self._one = torch.ones(1, device=next(iter(parameters.values())).device)

    # --- one step -----------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """DDP clears its gradient buffers itself."""
        for tensor in self._tensors():
            tensor.grad = None

    def get_loss_scale(self) -> Tensor:
        """Losses are not scaled."""
        return self._one

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Take the owned rows of the summed gradients. Returns whether something is not finite: the trainer checks."""
        for part, tensor in self.mine:
            grad: Tensor = part.parameter.main_grad  # type: ignore[attr-defined]
            tensor.grad = grad[part.begin : part.end].to(tensor.dtype)
        return False

    @torch.no_grad()
    def get_grad_norm(self) -> Tensor:
        """Norm of the whole gradient, fp32 []: every element counted by the one rank that owns it. Collective."""
        square = torch.zeros((), dtype=torch.float64, device=self._one.device)
        for part, tensor in self.mine:
            if tensor.grad is not None and self._counts(part):
                square += torch.linalg.vector_norm(tensor.grad).double().square()
        for table in self.tables:
            if table.master.grad is not None and table.name not in self.frozen:
                square += torch.linalg.vector_norm(table.master.grad.values()).double().square()
        dist.all_reduce(square)
        return square.sqrt().float()

    def _counts(self, part: Part) -> bool:
        """Not a copy: of a parameter that tensor parallelism keeps whole, or of another stage's."""
        copied = self._copy_index(part) > 0 or _is_shadow(part)
        return not copied and part.name not in self.frozen

    @torch.no_grad()
    def step(self) -> tuple[bool, float, None]:
        """Clip, update what this rank owns, share it."""
        self.prepare_grads()
        norm, limit = self.get_grad_norm(), self.config.clip_grad
        if limit > 0:
            factor = (limit / (norm + CLIP_EPS)).clamp_max(1.0)
            for tensor in self._tensors():
                if tensor.grad is not None:  # frozen tables have none
                    (tensor.grad.values() if tensor.grad.is_sparse else tensor.grad).mul_(factor)
        self.step_with_ready_grads()
        return True, float(norm), None

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Update and share."""
        groups = self.optimizer.param_groups
        for group in sorted(groups, key=lambda group: group["role"] != ENGRAM_TABLE):
            with cpu.bypass():
                self.updates.update(group)
            if group["role"] == ENGRAM_TABLE:
                self._publish()
        for part, tensor in self.mine:
            if part.parameter.dtype is not torch.float32:
                part.value.copy_(tensor)
        share_parts([part for parts in self.parts.values() for part in parts])
        return True

    def _publish(self) -> None:
        changed = [table for table in self.tables if table.master.grad is not None and table.name not in self.frozen]
        for table in changed:
            table.publish()
        self.tables_changed()

    def _tensors(self) -> Iterator[Tensor]:
        yield from (tensor for _, tensor in self.mine)
        yield from (table.master for table in self.tables)

    def reload_model_params(self, state_dict: Any = None) -> None:
        """The parameters were changed from outside: renew the fp32 copies."""
        for part, tensor in self.mine:
            tensor.copy_(part.value)
        for table in self.tables:
            table.renew_master()

    # --- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State of the owned parts, by checkpoint key."""
        return {_place(entry): entry.data for entry in self._entries()}

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: dict | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """State by native name as parts of whole tensors: any layout reads what another wrote."""
        return {_place(entry): entry for entry in self._entries()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take what `sharded_state_dict` described. Rates are the scheduler's, which Megatron loads beside it."""
        for entry in self._entries():
            assert entry.data is not None
            entry.data.copy_(state_dict[_place(entry)])

    def _entries(self) -> Iterator[ShardedTensor]:
        for part, tensor in self.mine:
            if tensor.numel() == 0:
                continue
            state = dict(self.optimizer.state[tensor])
            step = state.pop("step", None)
            if part.parameter.dtype is not torch.float32:
                state["weight"] = tensor
            for moment, value in state.items():
                yield self._entry(moment, part, value)
            if step is not None:
                yield self._step_entry(part, step)
        for table in self.tables:
            yield from self._table_entries(table)

    def _table_entries(self, table: OwnedTable) -> Iterator[ShardedTensor]:
        if not table.master.numel():
            return
        state = dict(self.optimizer.state[table.master])
        step = state.pop("step", None)
        if not table.aliased:
            state["weight"] = table.master
        for moment, value in state.items():
            yield table.state_entry(f"optimizer.{moment}.{table.name}", value)
        if step is not None:
            yield _counter(f"optimizer.step.{table.name}", step, (0, 0, int(table.first > 0)))

    def _entry(self, moment: str, part: Part, value: Tensor) -> ShardedTensor:
        offset = [part.begin] + [0] * (value.dim() - 1)
        for cut in cuts_of(part.parameter):
            offset[cut.dim] += getattr(self.layout, cut.axis).rank * part.parameter.shape[cut.dim]
        return ShardedTensor(
            key=f"optimizer.{moment}.{part.name}",
            data=value.detach(),
            dtype=value.dtype,
            local_shape=tuple(value.shape),
            global_shape=whole_shape(part.parameter, self.layout),
            global_offset=tuple(offset),
            axis_fragmentations=None,  # owners' parts need not be equal
            replica_id=(int(_is_shadow(part)), self._copy_index(part), 0),
        )

    def _step_entry(self, part: Part, step: Tensor) -> ShardedTensor:
        """One counter per parameter, written by the owner of its first element."""
        elsewhere = part.begin > 0 or any(getattr(self.layout, cut.axis).rank for cut in cuts_of(part.parameter))
        copy = (int(_is_shadow(part)), self._copy_index(part), int(elsewhere))
        return _counter(f"optimizer.step.{part.name}", step, copy)

    def _copy_index(self, part: Part) -> int:
        """0, or which copy of a parameter that tensor parallelism keeps whole this is."""
        return 0 if cuts_of(part.parameter) or is_expert(part.parameter) else self.tp_rank


def _place(entry: ShardedTensor) -> str:
    """A name of its own for every part: a rank may own several of one parameter."""
    return f"{entry.key}@{entry.global_offset[0]}"


def _counter(key: str, step: Tensor, copy: tuple[int, int, int]) -> ShardedTensor:
    return ShardedTensor(
        key=key,
        data=step,
        dtype=step.dtype,
        local_shape=(1,),
        global_shape=(1,),
        global_offset=(0,),
        axis_fragmentations=None,
        replica_id=copy,
    )


def _nothing() -> None:
    pass


def _is_shadow(part: Part) -> bool:
    """The parameter is another stage's, which has its own copy of the state."""
    return getattr(part.parameter, "shared", False)


def optimizer_table(run: Run) -> tuple[ParameterGroup, ...]:
    """The groups of every parameter of the run's whole model, on whatever stage it lies."""
    architecture = run.architecture()
    shapes = {binding.native: binding.shape for binding in parameter_bindings(architecture)}
    return group_parameters(shapes, architecture, run.phase, run.optimizer)
