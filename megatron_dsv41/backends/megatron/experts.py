"""Routed experts of one rank: a part of the experts, a part of their inner width.

Tokens of other ranks reach them in one of two ways, `parallel.dispatcher`: every token goes to every rank once, or, by
Megatron, to the ranks of its experts, once for each of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor, nn

from megatron_dsv41.backends.megatron.layout import Cut, Layout, mark
from megatron_dsv41.config import DSV41Config
from megatron_dsv41.modules.primitives import Experts, RoutedExperts
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.ops.routing.permutation import PartOfPermutation
from megatron_dsv41.parallel.experts import GatheredTokens, add_at_owners, gather_numbers

EXPERT_STRIDE = 1009


def draw_experts(config: DSV41Config, layout: Layout, dtype: torch.dtype) -> tuple[nn.Parameter, nn.Parameter]:
    """(w13, w2) of this rank. Every expert has a generator of its own: weights depend on seed and expert alone."""
    count, inner, dim = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
    local, width = layout.ep.share(count), layout.etp.share(inner)
    w13, w2 = torch.empty(local, 2, width, dim, dtype=dtype), torch.empty(local, dim, width, dtype=dtype)
    for index in range(local):
        expert = layout.ep.rank * local + index
        generator = torch.Generator().manual_seed(torch.initial_seed() * EXPERT_STRIDE + expert)
        for target, shape in ((w13[index], (2, inner, dim)), (w2[index], (dim, inner))):
            whole = torch.empty(shape, dtype=dtype).normal_(std=config.initializer_range, generator=generator)
            target.copy_(layout.etp.slice(whole, 1))
    parameters = (nn.Parameter(w13), nn.Parameter(w2))
    for parameter in parameters:
        mark(parameter, layout, Cut(0, "ep"), Cut(2, "etp"))
        # Gradients add up over the expert groups, even where these equal the others: Megatron then always keeps one
        # optimizer for experts and one for the rest, and a checkpoint fits every layout.
        parameter.allreduce = False  # type: ignore[attr-defined]
    return parameters


class LocalExperts(Experts):
    """All experts on this rank, perhaps a part of their width: no dispatch."""

    def __init__(self, config: DSV41Config, dtype: torch.dtype, ops: Ops, layout: Layout):
        nn.Module.__init__(self)
        self.limit, self.ops, self.dense = config.swiglu_limit, ops, False
        self.w13, self.w2 = draw_experts(config, layout, dtype)


def own_tokens(layout: Layout, num_tokens: int) -> tuple[int, int]:
    """First and end of the tokens that this rank has to bring to their experts.

    Where experts are not split over the ranks of a tensor group, each of those ranks brings its own part of the tokens
    and returns zeros for the others (`among_all`), which `leave_site` sums.
    """
    tp = layout.tp
    if tp.size == 1 or layout.etp.size > 1:
        return 0, num_tokens
    return tp.rank * num_tokens // tp.size, (tp.rank + 1) * num_tokens // tp.size


def part_of(own: tuple[int, int], *tensors: Tensor) -> tuple[Tensor, ...]:
    """These tokens alone, of tensors of all [T, ...]."""
    return tuple(t if own == (0, len(t)) else t[own[0] : own[1]] for t in tensors)


def among_all(y_tD: Tensor, own: tuple[int, int], num_tokens: int) -> Tensor:
    """Rows of these tokens among zeros for all others: [T, d]."""
    return y_tD if own == (0, num_tokens) else F.pad(y_tD, (0, 0, own[0], num_tokens - own[1]))


@dataclasses.dataclass(frozen=True)
class Gathering:
    """What is on its way to all ranks of the expert group: tokens, routing weights, and which pairs are here."""

    x_TD: GatheredTokens
    weights_TK: GatheredTokens
    pairs: PartOfPermutation


class GatheredExperts(LocalExperts):
    """Experts split over the expert group; every rank has the tokens of all and sums what its own experts make of them.

    Sums of a rank are rounded to the dtype of x where they leave it, and added in fp32. Ranks of an expert group have
    equally many tokens. The host waits for the device once, for the number of rows: what is queued between `begin` and
    the call, such as the shared expert, runs beside the exchange.
    """

    def __init__(self, config: DSV41Config, dtype: torch.dtype, ops: Ops, layout: Layout):
        super().__init__(config, dtype, ops, layout)
        self.layout = layout

    def begin(self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> Callable[[], Tensor]:
        """See RoutedExperts. The host waits for nothing."""
        gathering = None if self.layout.ep.group is None else self._gather(x_TD, indices_TK, weights_TK)
        return functools.partial(self, x_TD, indices_TK, weights_TK, gathering)

    def forward(
        self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor, gathering: Gathering | None = None
    ) -> Tensor:
        """See RoutedExperts. gathering: what `begin` started."""
        own, group = own_tokens(self.layout, len(x_TD)), self.layout.ep.group
        if group is None:
            y_tD = super().forward(*part_of(own, x_TD, indices_TK, weights_TK))
        else:
            gathering = gathering or self._gather(x_TD, indices_TK, weights_TK)
            rows = gathering.pairs.wait()
            outputs_PD = self.multiply(rows, rows.dispatch(gathering.x_TD.wait()), gathering.weights_TK.wait())
            y_tD = add_at_owners(rows.combine(outputs_PD, x_TD.dtype), group, weights_TK.dtype, self.ops)
        return among_all(y_tD, own, len(x_TD))

    def _gather(self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> Gathering:
        ep, count = self.layout.ep, self.w13.shape[0]
        assert ep.group is not None
        x_tD, indices_tK, weights_tK = part_of(own_tokens(self.layout, len(x_TD)), x_TD, indices_TK, weights_TK)
        all_indices_TK = gather_numbers(indices_tK, ep.group)
        all_weights_TK, all_x_TD = (GatheredTokens(t, ep.group, self.ops) for t in (weights_tK, x_tD))
        here = range(ep.rank * count, (ep.rank + 1) * count)
        return Gathering(all_x_TD, all_weights_TK, PartOfPermutation(all_indices_TK, here, self.ops))


class DispatchedExperts(RoutedExperts):
    """Experts split over the expert group, fed by Megatron's all-to-all."""

    def __init__(
        self,
        config: DSV41Config,
        dtype: torch.dtype,
        ops: Ops,
        layout: Layout,
        megatron: TransformerConfig,
        groups: ProcessGroupCollection,
    ):
        super().__init__()
        self.limit, self.ops, self.layout, self.megatron = config.swiglu_limit, ops, layout, megatron
        self.num_experts, self.num_local = config.n_routed_experts, layout.ep.share(config.n_routed_experts)
        self.w13, self.w2 = draw_experts(config, layout, dtype)
        # A split inner width gives parts of sums, which need no exchange inside the expert group.
        self.groups = ProcessGroupCollection(ep=groups.ep, expt_tp=None, tp_ep=groups.ep)

    def forward(self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """See RoutedExperts."""
        own = own_tokens(self.layout, len(x_TD))
        return among_all(self._route(*part_of(own, x_TD, indices_TK, weights_TK)), own, len(x_TD))

    def _route(self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> Tensor:
        probs_TE = weights_TK.new_zeros(x_TD.shape[0], self.num_experts).scatter(1, indices_TK, weights_TK)
        chosen_TE = torch.zeros_like(probs_TE, dtype=torch.bool).scatter(1, indices_TK, True)
        # Dispatchers keep what they need between calls on themselves: one per forward pass, so nothing outlives it.
        dispatcher = self._dispatcher()
        tokens, probs = dispatcher.dispatch_preprocess(x_TD, chosen_TE, probs_TE)
        tokens, probs = dispatcher.token_dispatch(tokens, probs)
        tokens, counts, probs = dispatcher.dispatch_postprocess(tokens, probs)
        multiply, swiglu = self.ops["routing.experts"], self.ops["routing.swiglu"]
        outputs = multiply(tokens, counts, probs, self.w13, self.w2, self.limit, swiglu)
        # Rows travel in the model's dtype and are summed in the dtype of the weights.
        combined = dispatcher.token_combine(dispatcher.combine_preprocess(outputs))
        return dispatcher.combine_postprocess(combined.to(probs.dtype))

    def _dispatcher(self) -> Any:
        first = self.layout.ep.rank * self.num_local
        here = list(range(first, first + self.num_local))
        return MoEAlltoAllTokenDispatcher(self.num_local, here, self.megatron, self.groups)
