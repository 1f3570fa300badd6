"""The model's parts by role, for Megatron: which weight is split over which group, and where tokens move.

Names of splits (`precision.linear_roles`): a column is split along its output (heads, inner width), a row along its
input. What is neither is whole on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from megatron_dsv41.backends.megatron.config import DSV41TransformerConfig
from megatron_dsv41.backends.megatron.experts import DispatchedExperts, GatheredExperts, LocalExperts
from megatron_dsv41.backends.megatron.fused_gradient import FusedLinear
from megatron_dsv41.backends.megatron.layout import Cut, Layout, mark
from megatron_dsv41.backends.megatron.recompute import run_kept
from megatron_dsv41.backends.te.machine import low_precision
from megatron_dsv41.config import DSV41Config
from megatron_dsv41.modules.engram import draw_rows
from megatron_dsv41.modules.primitives import (
    GroupedLinear,
    Head,
    Linear,
    Norm,
    RoutedExperts,
    Table,
    TorchPrimitives,
)
from megatron_dsv41.ops.documents import Groups
from megatron_dsv41.ops.head.ref import VocabularyPart
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.parallel import sequence, tensor
from megatron_dsv41.parallel.engram_rows import FetchedTable
from megatron_dsv41.precision import Split, linear_roles

SIDES: dict[Split | None, int] = {"column": 0, "row": 1}
SPLIT_AXES = {"heads", "groups"}
# These meet tokens as they are kept between sites.
BETWEEN_SITES = ("attn_norm", "ffn_norm", "norm", "attn_hc.", "ffn_hc.", "engram.")


class MegatronPrimitives(TorchPrimitives):
    """Parts for one rank of a layout. Initial weights are drawn whole and then cut: every layout starts equal."""

    def __init__(
        self,
        config: DSV41Config,
        ops: Ops,
        layout: Layout,
        megatron: DSV41TransformerConfig,
        groups: ProcessGroupCollection,
    ):
        super().__init__(
            config, ops, substitute=low_precision(config, megatron.precision, getattr(groups, "tp_dp_cp", None))
        )
        self.layout, self.megatron, self.groups = layout, megatron, groups
        self.splits: dict[str, Split | None] = {role: row.split for role, row in linear_roles(config).items()}

    def local(self, axis: str, size: int) -> int:
        """Heads and output groups are split over tp."""
        return self.layout.tp.share(size) if axis in SPLIT_AXES else size

    def linear(self, role: str, d_in: int, d_out: int, fp32: bool = False) -> nn.Module:
        """See Primitives."""
        kind = FusedLinear if self.megatron.fused_gradients and not fp32 else Linear
        part = kind(d_in, d_out, self.dtype, self.config.initializer_range, self.ops, fp32)
        self._cut(part, role, SIDES.get(self.splits.get(role)))
        return self.substituted(role, part)

    def grouped_linear(self, role: str, groups: int, d_in: int, d_out: int) -> nn.Module:
        """Whole groups are split over tp."""
        part = super().grouped_linear(role, groups, d_in, d_out)
        assert isinstance(part, GroupedLinear)
        part.groups = self.layout.tp.share(groups)
        self._cut(part, role, 0)
        return part

    def norm(self, role: str, dim: int, eps: float) -> nn.Module:
        """See Primitives."""
        part = super().norm(role, dim, eps)
        assert isinstance(part, Norm)
        self._cut(part, role, None)
        return part

    def embedding(self, vocab_size: int, dim: int) -> nn.Module:
        """Rows are split over tp; a rank gives zeros for the ids of others, to be summed by `leave_site`."""
        part = SplitEmbedding(vocab_size, dim, self.dtype, self.config.initializer_range, self.layout.tp.rank)
        self._cut(part, "embed", 0)
        return part

    def engram_table(self, layer: int, rows: int, dim: int) -> nn.Module:
        """Whole on every rank, or a reader of fetched rows where tables have owners."""
        if self.megatron.engram_owners is not None:
            return FetchedTable()
        with torch.random.fork_rng(devices=[]):  # what is drawn below must not depend on where tables lie
            part = super().engram_table(layer, rows, dim)
        assert isinstance(part, Table)
        drawn = draw_rows(self.megatron.seed, layer, slice(0, rows), dim, self.config.initializer_range)
        part.weight.data.copy_(drawn)
        self._cut(part, "engram.embed", None)
        return part

    def head(self, dim: int, vocab_size: int) -> nn.Module:
        """Rows are split over tp; losses are those of the whole vocabulary."""
        head, tp = super().head(dim, vocab_size), self.layout.tp
        assert isinstance(head, Head)
        self._cut(head, "head", 0)
        if tp.group is not None:
            whole = {"maximum": tensor.max_parts, "total": tensor.sum_replicated}
            reduce = {name: functools.partial(function, group=tp.group) for name, function in whole.items()}
            head.part = VocabularyPart(tp.rank * head.weight.shape[0], **reduce)
        return head

    def experts(self, config: DSV41Config) -> RoutedExperts:
        """Experts are split over ep, their inner width over the expert tensor group."""
        if self.layout.ep.size == 1 and self.layout.etp.size == self.layout.tp.size:
            return LocalExperts(config, self.dtype, self.ops, self.layout)
        if self.megatron.gather_tokens:
            return GatheredExperts(config, self.dtype, self.ops, self.layout)
        return DispatchedExperts(config, self.dtype, self.ops, self.layout, self.megatron, self.groups)

    def parameter(self, value: Tensor, role: str) -> nn.Parameter:
        """Sinks come as the local heads; everything else is whole."""
        cuts = (Cut(0, "tp"),) if role == "attn.attn_sink" else ()
        return mark(nn.Parameter(value), self.layout, *cuts, between_sites=_between_sites(role))

    def enter_site(self, x_SBD: Tensor) -> Tensor:
        """See Primitives."""
        return tensor.enter_site(x_SBD, self.layout.tp.group, self.layout.sequence)

    def leave_site(self, y_SBD: Tensor) -> Tensor:
        """See Primitives."""
        return tensor.leave_site(y_SBD, self.layout.tp.group, self.layout.sequence)

    def fan_out(self, x: Tensor) -> Tensor:
        """See Primitives."""
        return tensor.fan_out(x, self.layout.tp.group)

    def sum_heads(self, x: Tensor) -> Tensor:
        """See Primitives."""
        return tensor.sum_parts(x, self.layout.tp.group)

    def left_halo(self, x_TD: Tensor, rows: int) -> Tensor:
        """See Primitives."""
        return sequence.left_halo(x_TD, rows, self.layout.cp.group)

    def gather_groups(self, x_CD: Tensor, groups: Groups) -> Tensor:
        """See Primitives."""
        gathered = sequence.gather_shards(x_CD, self.layout.cp.group)
        return gathered if groups.slot_C is None else gathered[groups.slot_C]

    def sum_sequence(self, x: Tensor) -> Tensor:
        """See Primitives."""
        return sequence.sum_shards(x, self.layout.cp.group)

    def recomputed[T](self, function: Callable[..., T], *values: Any) -> T:
        """Made again in backward with `train.recompute: selective`."""
        return run_kept(self.megatron.recompute_kind != "selective", function, *values)

    def _cut(self, part: nn.Module, role: str, dim: int | None) -> None:
        weight: Tensor = part.weight.data  # type: ignore[assignment]
        cuts = ()
        if dim is not None:
            weight, cuts = self.layout.tp.slice(weight, dim).clone(), (Cut(dim, "tp"),)
        part.weight = mark(nn.Parameter(weight), self.layout, *cuts, between_sites=_between_sites(role))


class SplitEmbedding(Table):
    """A contiguous part of the embedding's rows; zeros for ids outside it."""

    def __init__(self, rows: int, dim: int, dtype: torch.dtype, std: float, part: int):
        super().__init__(rows, dim, dtype, std)
        self.part = part

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [...] -> [..., dim]."""
        rows = self.weight.shape[0]
        local = ids - self.part * rows
        outside = (local < 0) | (local >= rows)
        return F.embedding(local.masked_fill(outside, 0), self.weight).masked_fill(outside[..., None], 0.0)


def _between_sites(role: str) -> bool:
    return any(role == name or (name.endswith(".") and role.startswith(name)) for name in BETWEEN_SITES)
