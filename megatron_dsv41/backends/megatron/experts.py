"""Routed experts of one rank: a part of the experts, a part of their inner width.

Tokens of other ranks reach them in one of two ways, `parallel.dispatcher`: every token goes to every rank once, or, by
Megatron, to the ranks of its experts, once for each of them.
"""

from __future__ import annotations

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
from megatron_dsv41.modules.primitives import Experts
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


def route_own_tokens(
    layout: Layout, route: Callable[..., Tensor], x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """`route` of the tokens that this rank has to bring to their experts: fp32 [T, d].

    Where experts are not split over the ranks of a tensor group, each of those ranks brings its own part of the tokens
    and returns zeros for the others, which `leave_site` sums.
    """
    tp, num_tokens = layout.tp, x_TD.shape[0]
    if tp.size == 1 or layout.etp.size > 1:
        return route(x_TD, indices_TK, weights_TK)
    own = (tp.rank * num_tokens // tp.size, (tp.rank + 1) * num_tokens // tp.size)
    y_tD = route(*(t[own[0] : own[1]] for t in (x_TD, indices_TK, weights_TK)))
    return F.pad(y_tD, (0, 0, own[0], num_tokens - own[1]))


class GatheredExperts(LocalExperts):
    """Experts split over the expert group; every rank has the tokens of all and sums what its own experts make of them.

    Same signature and result as `Experts`. Sums of a rank are rounded to the dtype of x where they leave it, and added
    in fp32. Ranks of an expert group have equally many tokens. Forward waits for the device once, for the number of
    rows; until then everything that does not depend on it is queued.
    """

    def __init__(self, config: DSV41Config, dtype: torch.dtype, ops: Ops, layout: Layout):
        super().__init__(config, dtype, ops, layout)
        self.layout = layout

    def forward(self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """x [T, d], chosen experts and their weights [T, k] -> weighted sum, fp32 [T, d]."""
        route = super().forward if self.layout.ep.group is None else self._route
        return route_own_tokens(self.layout, route, x_TD, indices_TK, weights_TK)

    def _route(self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> Tensor:
        ep, count = self.layout.ep, self.w13.shape[0]
        assert ep.group is not None
        all_indices_TK = gather_numbers(indices_TK, ep.group)
        all_weights_TK, all_x_TD = (GatheredTokens(t, ep.group, self.ops) for t in (weights_TK, x_TD))
        part = PartOfPermutation(all_indices_TK, range(ep.rank * count, (ep.rank + 1) * count), self.ops)
        rows = part.wait()
        parts_TD = rows.combine(self.multiply(rows, rows.dispatch(all_x_TD.wait()), all_weights_TK.wait()), x_TD.dtype)
        return add_at_owners(parts_TD, ep.group, weights_TK.dtype, self.ops)


class DispatchedExperts(nn.Module):
    """Experts split over the expert group, fed by Megatron's all-to-all. Same signature and result as `Experts`."""

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
        """x [T, d], chosen experts and their weights [T, k] -> weighted sum, fp32 [T, d]."""
        return route_own_tokens(self.layout, self._route, x_TD, indices_TK, weights_TK)

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
