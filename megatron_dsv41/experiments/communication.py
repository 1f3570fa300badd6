"""Bytes that a rank of a pipeline stage sends per micro-batch over its tensor, context and expert groups, and its cuts.

Averages over the ranks of a group, as rings send: an all-gather or a reduce-scatter of parts sends a part n - 1 times,
an all-reduce is both, a halo goes to one neighbour, which the last shard lacks. Without recomputation, which repeats
what goes forward; without the gradients of parameters, which are summed once per step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.layer_plan import LayerPlan
from megatron_dsv41.parallel.payload import ITEM_BYTES, Crossing, Field, Lengths
from megatron_dsv41.phase import Phase
from megatron_dsv41.run_config import Parallel

FP32, INT64 = 4, 8


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes sent in the forward and in the backward pass of a micro-batch."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.forward + other.forward, self.backward + other.backward)


@dataclasses.dataclass(frozen=True)
class Stage:
    """One pipeline stage: its layers, the cuts around it, and the bytes of every hop where all have one length."""

    layers: Sequence[LayerPlan]
    before: Crossing | None
    after: Crossing | None
    hop_bytes: int | None = None


def pipeline_traffic(stage: Stage) -> Traffic:
    """To the next stage forward, to the previous one backward."""
    forward = (stage.hop_bytes or stage.after.forward_bytes) if stage.after else 0
    backward = (stage.hop_bytes or stage.before.backward_bytes) if stage.before else 0
    return Traffic(forward, backward)


def tensor_traffic(config: DSV41Config, phase: Phase, lengths: Lengths, stage: Stage) -> Traffic:
    """Over the tensor group."""
    if lengths.tensor == 1:
        return Traffic()
    sites = _TensorSites(config, phase, lengths)
    total = sum((sites.layer(plan) for plan in stage.layers), Traffic())
    if stage.before is None:
        total += sites.leave()  # the embedding's
    if stage.after is None:
        total += sites.head()
    arriving, leaving = (_copied(cut, "tensor_copies") for cut in (stage.before, stage.after))
    others = lengths.tensor - 1
    return total + Traffic(
        forward=others * sum(field.wire_bytes for field in arriving),
        backward=others * sum(field.wire_bytes for field in arriving if field.has_gradient and field.adds_over_tensor)
        + others * sum(field.wire_bytes for field in leaving if field.has_gradient and not field.adds_over_tensor),
    )


def context_traffic(config: DSV41Config, phase: Phase, lengths: Lengths, stage: Stage) -> Traffic:
    """Over the context group."""
    others, itemsize = lengths.context - 1, ITEM_BYTES[config.dtype]
    if not others:
        return Traffic()
    neighbours = others / lengths.context  # the share of ranks that have one
    halo = neighbours * (config.sliding_window - 1) * config.head_dim * itemsize
    balance = 2 * neighbours * lengths.batch * (config.n_routed_experts + 1) * FP32
    total = Traffic(len(stage.layers) * (halo + balance), len(stage.layers) * halo)
    for plan in stage.layers:
        if plan.owns_kv:
            pooled = neighbours * (plan.ratio - 1) * config.hidden_size * itemsize
            rows = others * -(-lengths.shard // plan.ratio) * lengths.batch
            latents, keys = rows * config.head_dim * FP32, rows * config.index_head_dim * itemsize
            learns = phase.index_loss != "off"
            total += Traffic(pooled + latents + keys, pooled + latents + keys * learns)
    arriving = _copied(stage.before, "context_copies")
    return total + Traffic(
        forward=others * sum(field.wire_bytes * field.tensor_copies for field in arriving),
        backward=others * sum(field.wire_bytes * field.tensor_copies for field in arriving if field.has_gradient),
    )


def expert_traffic(config: DSV41Config, parallel: Parallel, lengths: Lengths, stage: Stage) -> Traffic | None:
    """Over the expert group, where tokens are gathered; None where they are not: the routing then decides."""
    others = parallel.ep - 1
    if not others:
        return Traffic()
    if not parallel.gathers_tokens(config.num_experts_per_tok):
        return None
    tokens = lengths.batch * lengths.shard / lengths.tensor * parallel.expert_tp
    there_and_back = 2 * config.hidden_size * ITEM_BYTES[config.dtype]
    weights, numbers = config.num_experts_per_tok * FP32, config.num_experts_per_tok * INT64
    sent = len(stage.layers) * others * tokens
    return Traffic(sent * (there_and_back + weights + numbers), sent * (there_and_back + weights))


class _TensorSites:
    def __init__(self, config: DSV41Config, phase: Phase, lengths: Lengths):
        self.config, self.phase, self.lengths = config, phase, lengths
        self.itemsize, self.tokens = ITEM_BYTES[config.dtype], lengths.batch * lengths.shard
        self.others = lengths.tensor - 1
        self.piece = lengths.batch * lengths.piece * config.hidden_size * self.itemsize

    def layer(self, plan: LayerPlan) -> Traffic:
        config, itemsize = self.config, self.itemsize
        attention = config.q_lora_rank * itemsize + config.head_dim * itemsize
        experts = config.hidden_size * itemsize + config.num_experts_per_tok * FP32
        backward = self._summed(self.tokens * (attention + experts))
        entries = self.lengths.batch * self.lengths.seq // plan.ratio if plan.ratio else 0
        if plan.owns_kv:
            backward += self._summed(entries * config.head_dim * FP32)
        forward = 0.0
        if plan.owns_selection and self.phase.index_loss != "off":
            slots = min(config.index_topk, entries) if self.phase.index_loss == "sparse" else entries
            forward = self._summed(self.tokens * slots * FP32)
        return Traffic(forward, backward) + self.enter() + self.leave() + self.enter() + self.leave()

    def head(self) -> Traffic:
        softmax = 3 * self.tokens * FP32  # maximum, label's logit, sum
        hidden = self.tokens * self.config.hidden_size * self.itemsize
        return self.enter() + Traffic(self._summed(softmax), self._summed(hidden))

    def enter(self) -> Traffic:
        return Traffic(self.others * self.piece if self.lengths.sequence else 0.0)

    def leave(self) -> Traffic:
        if self.lengths.sequence:
            return Traffic(self.others * self.piece, self.others * self.piece)
        return Traffic(self._summed(self.piece))

    def _summed(self, num_bytes: float) -> float:
        return 2 * self.others / self.lengths.tensor * num_bytes


def _copied(crossing: Crossing | None, axis: str) -> list[Field]:
    return [field for field in crossing.fields if getattr(field, axis) > 1] if crossing else []
