"""The parts that a backend may swap: linears, norms, embedding, experts, Engram table.

Modules ask for them by role (`"attn.wq_b"`), so that a backend decides per role how a weight is sharded and in which
precision it multiplies. `TorchPrimitives` is the plain single-process choice and the oracle of the others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.ops.documents import Groups
from megatron_dsv41.ops.head.ref import WHOLE, VocabularyPart
from megatron_dsv41.ops.linear.ref import Turn, block_diagonal
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.ops.routing.permutation import Permutation


class Primitives(Protocol):
    """What modules need from a backend. Every module it returns maps plain tensors to plain tensors.

    Between sites tokens may be sharded (sequence parallelism). Inside a site a process sees all tokens of its context
    shard, computes its share of heads, groups or inner width, and returns a part that `leave_site` sums.
    """

    def local(self, axis: str, size: int) -> int:
        """How many of `size` units of `axis` ("heads", "groups", "index_heads") this process computes."""
        ...

    def linear(self, role: str, d_in: int, d_out: int, fp32: bool = False) -> nn.Module:
        """x [..., d_in] -> [..., d_out (or its local part)]; weight [d_out, d_in]; `fp32`: fp32 operands and result."""
        ...

    def grouped_linear(self, role: str, groups: int, d_in: int, d_out: int) -> nn.Module:
        """x [..., groups * d_in] -> [..., groups * d_out], block-diagonal; weight [groups * d_out, d_in].

        Also (x [T, heads, D], Turn): heads side by side, turned back first.
        """
        ...

    def norm(self, role: str, dim: int, eps: float) -> nn.Module:
        """RMSNorm over the last axis with weight [dim]."""
        ...

    def embedding(self, vocab_size: int, dim: int) -> nn.Module:
        """ids int64 [...] -> [..., dim]; weight [vocab_size, dim]."""
        ...

    def head(self, dim: int, vocab_size: int) -> nn.Module:
        """x [..., dim] -> fp32 logits [..., local part of the vocabulary]; (x [T, dim], labels int64 [T]) -> fp32
        losses [T]; weight [vocab_size, dim]. Its input passes `enter_site` and `fan_out`."""
        ...

    def experts(self, config: DSV41Config) -> RoutedExperts:
        """(x [T, d], indices int64 [T, k], weights fp32 [T, k]) -> fp32 [T, d]; parameters w13 [E, 2, F, d], w2."""
        ...

    def engram_table(self, layer: int, rows: int, dim: int) -> nn.Module:
        """row ids int64 [T, columns] -> [T, columns, dim]; weight [rows, dim]."""
        ...

    def enter_site(self, x_SBD: Tensor) -> Tensor:
        """Site input as sharded between sites -> all tokens of this process's context shard."""
        ...

    def leave_site(self, y_SBD: Tensor) -> Tensor:
        """This process's part of a site output, all tokens -> the summed output as sharded between sites."""
        ...

    def fan_out(self, x: Tensor) -> Tensor:
        """A replicated tensor on its way into sharded work: identity forward, summed gradient backward.

        Linears with a sharded output do not sum their input's gradient: what feeds them passes here.
        """
        ...

    def sum_heads(self, x: Tensor) -> Tensor:
        """Add up over the processes that hold other heads; no gradient."""
        ...

    def left_halo(self, x_TD: Tensor, rows: int) -> Tensor:
        """[T, D] -> [rows + T, D]: preceded by the left neighbour's last rows, zeros on the first shard.

        Unchanged where the sequence is not sharded.
        """
        ...

    def gather_groups(self, x_CD: Tensor, groups: Groups) -> Tensor:
        """Latents of this process's groups -> of every entry of the micro-batch [C, D]."""
        ...

    def sum_sequence(self, x: Tensor) -> Tensor:
        """Add up over the shards of a sequence; no gradient."""
        ...

    def recomputed[T](self, function: Callable[..., T], *values: Any) -> T:
        """`function(*values)`; what it keeps for backward may be made again there instead."""
        ...

    def forward_pass(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around the layers of one forward pass."""
        ...

    def parameter(self, value: Tensor, role: str) -> nn.Parameter:
        """Wrap a bare parameter (sink, mHC coefficients, Engram weights)."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Parameter dtype of ordinary weights."""
        ...


class Linear(nn.Module):
    """Bias-free linear. `fp32` asks for fp32 results, as the definition does for head and pooled compressor."""

    def __init__(self, d_in: int, d_out: int, dtype: torch.dtype, std: float, ops: Ops, fp32: bool = False):
        super().__init__()
        self.ops, self.fp32 = ops, fp32
        self.weight = nn.Parameter(torch.empty(d_out, d_in, dtype=dtype))
        nn.init.normal_(self.weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d_in] -> [..., d_out]."""
        if self.fp32:
            return self.ops["linear.wide"](x, self.weight)
        return F.linear(x, self.weight)


class Head(Linear):
    """Output projection with fp32 logits, or the losses of labels straight from the hidden state."""

    part: VocabularyPart = WHOLE

    def __init__(self, dim: int, vocab_size: int, dtype: torch.dtype, std: float, ops: Ops):
        super().__init__(dim, vocab_size, dtype, std, ops, fp32=True)

    def forward(self, x: Tensor, labels_T: Tensor | None = None) -> Tensor:
        """x [..., dim] -> logits [..., vocab]; with labels int64 [T], x [T, dim] -> losses fp32 [T]."""
        if labels_T is None:
            return super().forward(x)
        return self.ops["head.losses"](x, self.weight, labels_T, self.part)


class GroupedLinear(nn.Module):
    """Block-diagonal linear: group g of the input meets rows g*d_out .. (g+1)*d_out of the weight."""

    def __init__(self, groups: int, d_in: int, d_out: int, dtype: torch.dtype, std: float):
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(groups * d_out, d_in, dtype=dtype))
        nn.init.normal_(self.weight, std=std)

    def forward(self, x: Tensor, turn: Turn | None = None) -> Tensor:
        """x [..., groups * d_in] -> [..., groups * d_out]; with `turn`, x [T, heads, D] is turned back first."""
        return block_diagonal(x, self.weight.unflatten(0, (self.groups, -1)), turn)


class Norm(nn.Module):
    """RMSNorm through the chosen `norm.rms_norm`."""

    def __init__(self, dim: int, eps: float, dtype: torch.dtype, ops: Ops):
        super().__init__()
        self.eps, self.ops = eps, ops
        self.weight = nn.Parameter(torch.ones(dim, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., dim] -> the same shape and dtype."""
        return self.ops["norm.rms_norm"](x, self.weight, self.eps)


class Table(nn.Module):
    """Rows looked up by id: token embedding and Engram table."""

    def __init__(self, rows: int, dim: int, dtype: torch.dtype, std: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, dim, dtype=dtype))
        nn.init.normal_(self.weight, std=std)

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [...] -> [..., dim]."""
        return F.embedding(ids, self.weight)


class RoutedExperts(nn.Module):
    """Of a layer: x [T, d], the chosen experts and their weights [T, k] -> weighted sum, fp32 [T, d]."""

    def begin(self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> Callable[[], Tensor]:
        """Start what crosses between processes. Called, the result calls the module; work in between runs beside it."""
        return functools.partial(self, x_TD, indices_TK, weights_TK)


class Experts(RoutedExperts):
    """All routed experts of a layer: w13 [E, 2, F, d] (gate, up), w2 [E, d, F].

    `dense` evaluates every expert on every token: the result of a token then does not depend on its neighbours'
    routing, bit for bit. Otherwise each expert multiplies the tokens routed to it.
    """

    def __init__(self, config: DSV41Config, dtype: torch.dtype, ops: Ops, dense: bool = False):
        super().__init__()
        experts, inner, dim = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.limit, self.ops, self.dense = config.swiglu_limit, ops, dense
        self.w13 = nn.Parameter(torch.empty(experts, 2, inner, dim, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(experts, dim, inner, dtype=dtype))
        for weight in (self.w13, self.w2):
            nn.init.normal_(weight, std=config.initializer_range)

    def forward(self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Weighted sum of the chosen experts, fp32 [T, d], added in expert order."""
        if self.dense:
            return self._dense(x_TD, indices_TK, weights_TK)
        rows = Permutation.of(indices_TK, self.w13.shape[0], self.ops)
        return rows.combine(self.multiply(rows, rows.dispatch(x_TD), weights_TK), weights_TK.dtype)

    def multiply(self, rows: Permutation, x_PD: Tensor, weights_TK: Tensor) -> Tensor:
        """Every expert on its rows, times their pairs' weights: [P, d] -> [P, d]."""
        share_P = weights_TK.flatten()[rows.pair_P]
        multiply, swiglu = self.ops["routing.experts"], self.ops["routing.swiglu"]
        return multiply(x_PD, rows.counts_E, share_P, self.w13, self.w2, self.limit, swiglu)

    def _dense(self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> Tensor:
        share_TE = torch.zeros(x_TD.shape[0], self.w13.shape[0], dtype=weights_TK.dtype, device=x_TD.device)
        share_TE = share_TE.scatter(1, indices_TK, weights_TK)
        y_TD = torch.zeros_like(x_TD, dtype=weights_TK.dtype)
        for (w1, w3), w2, share_T in zip(self.w13, self.w2, share_TE.T, strict=True):
            hidden_TF = self.ops["routing.swiglu"](F.linear(x_TD, w1), F.linear(x_TD, w3), self.limit, share_T)
            y_TD = y_TD + F.linear(hidden_TF, w2).to(y_TD.dtype)
        return y_TD


class Substitute(Protocol):
    """What may take the place of linears, such as products in low precision."""

    def __call__(self, role: str, linear: Linear) -> nn.Module:
        """A module with the parameter of `linear`, or `linear` itself."""
        ...

    def forward_pass(self) -> contextlib.AbstractContextManager[Any]:
        """See Primitives."""
        ...


class TorchPrimitives:
    """Plain torch modules of one process; `substitute` may replace linears by role."""

    def __init__(
        self, config: DSV41Config, ops: Ops, *, dense_experts: bool = False, substitute: Substitute | None = None
    ):
        self.config, self.ops, self.dense_experts, self.substitute = config, ops, dense_experts, substitute

    @property
    def dtype(self) -> torch.dtype:
        """config.dtype as a torch dtype."""
        return getattr(torch, self.config.dtype)

    def local(self, axis: str, size: int) -> int:
        """All of them."""
        return size

    def linear(self, role: str, d_in: int, d_out: int, fp32: bool = False) -> nn.Module:
        """See Primitives."""
        return self.substituted(role, Linear(d_in, d_out, self.dtype, self.config.initializer_range, self.ops, fp32))

    def substituted(self, role: str, linear: Linear) -> nn.Module:
        """What multiplies in the place of `linear`."""
        return linear if self.substitute is None else self.substitute(role, linear)

    def forward_pass(self) -> contextlib.AbstractContextManager[Any]:
        """See Primitives."""
        return contextlib.nullcontext() if self.substitute is None else self.substitute.forward_pass()

    def grouped_linear(self, role: str, groups: int, d_in: int, d_out: int) -> nn.Module:
        """See Primitives."""
        return GroupedLinear(groups, d_in, d_out, self.dtype, self.config.initializer_range)

    def norm(self, role: str, dim: int, eps: float) -> nn.Module:
        """See Primitives."""
        return Norm(dim, eps, self.dtype, self.ops)

    def embedding(self, vocab_size: int, dim: int) -> nn.Module:
        """See Primitives."""
        return Table(vocab_size, dim, self.dtype, self.config.initializer_range)

    def head(self, dim: int, vocab_size: int) -> nn.Module:
        """See Primitives."""
        return Head(dim, vocab_size, self.dtype, self.config.initializer_range, self.ops)

    def experts(self, config: DSV41Config) -> RoutedExperts:
        """See Primitives."""
        return Experts(config, self.dtype, self.ops, self.dense_experts)

    def engram_table(self, layer: int, rows: int, dim: int) -> nn.Module:
        """See Primitives."""
        return Table(rows, dim, self.dtype, self.config.initializer_range)

    def enter_site(self, x_SBD: Tensor) -> Tensor:
        """Nothing is sharded: identity."""
        return x_SBD

    def leave_site(self, y_SBD: Tensor) -> Tensor:
        """Nothing is sharded: identity."""
        return y_SBD

    def fan_out(self, x: Tensor) -> Tensor:
        """Nothing is sharded: identity."""
        return x

    def sum_heads(self, x: Tensor) -> Tensor:
        """Nothing is sharded: identity."""
        return x

    def left_halo(self, x_TD: Tensor, rows: int) -> Tensor:
        """Nothing is sharded: unchanged."""
        return x_TD

    def gather_groups(self, x_CD: Tensor, groups: Groups) -> Tensor:
        """This process compressed them all: identity."""
        return x_CD

    def sum_sequence(self, x: Tensor) -> Tensor:
        """Nothing is sharded: identity."""
        return x

    def recomputed[T](self, function: Callable[..., T], *values: Any) -> T:
        """Everything is kept."""
        return function(*values)

    def parameter(self, value: Tensor, role: str) -> nn.Parameter:
        """See Primitives."""
        return nn.Parameter(value)
