"""Estimated memory of one rank from the config and the layout, as stated formulas. For planning, not for accounting.

Per parameter: weights in the training dtype; gradients fp32; AdamW state 12 bytes for bf16 weights (fp32 main copy
and two moments), 8 for fp32 weights, or what the layout says; divided over the ranks that share the parameter when
the optimizer is distributed. Tensor parallelism leaves what is small whole (`WHOLE`). Engram rows divide over their
own group and are counted in `engram_memory`, activations in `activations`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.experiments.activations import (
    Division,
    activation_bytes,
    dtype_bytes,
    gradient_working_bytes,
    head_working_bytes,
    layer_working_bytes,
)
from megatron_dsv41.experiments.engram_memory import TableMemory, Tables, owner_memory, tables_of_stage
from megatron_dsv41.experiments.flops import layer_parameters
from megatron_dsv41.experiments.pipeline_order import pipeline_order, waiting_chunks
from megatron_dsv41.layer_plan import LayerPlan, plan_layers
from megatron_dsv41.ops.registry import choose
from megatron_dsv41.parallel.stages import even_stages, parse_layout
from megatron_dsv41.run_config import TURN, Recompute, Run

# Kinds of parameters that tensor parallelism does not cut; nor the latents of attention (wq_a, wkv and their norms).
WHOLE = ("routers", "mhc", "norms", "compressors", "indexers", "engram projections")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a run is spread: group sizes along each axis, and what one micro-batch is."""

    data: int = 1
    tensor: int = 1
    sequence: bool = False  # sequence parallelism over the tensor group
    pipeline: int = 1
    virtual: int = 1  # model chunks per pipeline rank
    turn: int | None = None  # micro-batches of a chunk before the rank's next one; None: as many as pipeline stages
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    gathered: bool = False  # tokens are gathered over the expert group (`parallel.dispatcher`)
    engram: int = 1
    tables: Tables | None = None  # how owners of Engram rows keep them; None: tables are parameters
    micro_batch: int = 1
    num_micro_batches: int = 1
    seq_length: int = 4096
    recompute: Recompute = "none"
    distributed_optimizer: bool = True
    state_bytes: float | None = None  # optimizer state per parameter, on average; None: AdamW's
    cut: str | None = None  # Megatron's pipeline layout string; None: even
    whole_logits: bool = True  # as the definition of head.losses makes them

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ValueError(f"layout.{field.name} must be at least 1, got {value}")

    @classmethod
    def of(cls, run: Run, ranks: int) -> Layout:
        """Of a run on so many ranks, which fit it."""
        parallel = run.parallel
        data = ranks // (parallel.tp * parallel.pp * parallel.cp)
        return cls(
            data=data,
            tensor=parallel.tp,
            sequence=parallel.sp,
            pipeline=parallel.pp,
            virtual=parallel.vpp,
            turn=run.of_megatron(TURN) if parallel.vpp > 1 else None,
            context=parallel.cp,
            expert=parallel.ep,
            expert_tensor=parallel.expert_tp,
            gathered=parallel.ep > 1 and parallel.gathers_tokens(run.architecture().num_experts_per_tok),
            engram=parallel.engram or 1,
            tables=Tables.of(run),
            micro_batch=run.batch.micro,
            num_micro_batches=run.sequences_per_step // (run.batch.micro * data),
            seq_length=run.data.seq_length,
            recompute=run.train.recompute,
            cut=parallel.layout,
            whole_logits=choose(run.ops)["head.losses"] == "ref",
        )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.data * self.tensor * self.pipeline * self.context

    def stage_ranks(self, stage: int) -> range:
        """Ranks of the world that run a pipeline stage."""
        size = self.world // self.pipeline
        return range(stage * size, (stage + 1) * size)

    def stage_chunks(self, num_layers: int) -> tuple[tuple[range, ...], ...]:
        """Layer ids of every chunk of every pipeline rank. Chunk c of the layer order lies on rank c mod `pipeline`."""
        num_chunks = self.pipeline * self.virtual
        chunks = (
            even_stages(num_layers, num_chunks) if self.cut is None else parse_layout(self.cut, num_layers, num_chunks)
        )
        return tuple(tuple(chunks[rank :: self.pipeline]) for rank in range(self.pipeline))

    def stage_layers(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """Layer ids of every pipeline rank."""
        return tuple(tuple(layer for chunk in chunks for layer in chunk) for chunks in self.stage_chunks(num_layers))


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """Bytes that one rank of a pipeline stage holds."""

    layers: tuple[int, ...]
    parameters: int  # held by this rank
    weights: float
    gradients: float
    optimizer: float
    activations: float
    engram: TableMemory  # owned rows

    @property
    def total(self) -> float:
        """All of it on the rank's device."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.engram.on_device

    @property
    def host(self) -> float:
        """Owned Engram rows in host memory."""
        return self.engram.rows if self.engram.in_host else 0.0


def memory_per_rank(config: DSV41Config, layout: Layout) -> tuple[StageMemory, ...]:
    """One entry per pipeline stage, of its fullest rank. Vision and DSpark are not trained here and not counted."""
    plans, tables = plan_layers(config), owner_memory(config, layout)
    return tuple(
        _stage_memory(config, layout, stage, [plans[layer] for layer in layers], tables_of_stage(tables, layout, stage))
        for stage, layers in enumerate(layout.stage_layers(len(plans)))
    )


def _stage_memory(
    c: DSV41Config, layout: Layout, stage: int, plans: Sequence[LayerPlan], owned: TableMemory
) -> StageMemory:
    dense = whole = experts = tables = 0  # whole: part of dense that every tensor rank keeps
    for plan in plans:
        count = layer_parameters(c, plan)
        whole += sum(count[kind] for kind in WHOLE) + (c.hidden_size + 1) * (c.q_lora_rank + c.head_dim)
        experts += count["routed experts"]
        tables += 0 if layout.tables else count["engram tables"]
        dense += count.total() - count["routed experts"] - count["engram tables"]
    is_last = stage == layout.pipeline - 1
    dense += c.vocab_size * c.hidden_size * ((stage == 0) + is_last) + c.hidden_size * is_last
    whole += c.hidden_size * is_last

    # (parameters on this rank, ranks that share them): the optimizer divides its state over the latter.
    expert_group = layout.expert * layout.expert_tensor
    parts = (
        (math.ceil((dense - whole) / layout.tensor) + whole, layout.data * layout.context),
        (math.ceil(experts / expert_group), max(layout.world // layout.pipeline // expert_group, 1)),
        (math.ceil(tables / layout.engram), max(layout.data * layout.context // layout.engram, 1)),
    )
    held = sum(size for size, _ in parts)
    adamw = 8 if dtype_bytes(c) == 4 else 12
    state = adamw if layout.state_bytes is None else layout.state_bytes
    shared = (size / (sharers if layout.distributed_optimizer else 1) for size, sharers in parts)
    return StageMemory(
        layers=tuple(plan.layer for plan in plans),
        parameters=held,
        weights=held * dtype_bytes(c),
        gradients=held * 4,
        optimizer=state * sum(shared),
        activations=_stage_activations(c, layout, stage, plans),
        engram=owned,
    )


def _stage_activations(c: DSV41Config, layout: Layout, stage: int, plans: Sequence[LayerPlan]) -> float:
    """What is kept for backward passes to come, and what the one that runs needs."""
    between_sites, gathered = layout.tensor if layout.sequence else 1, layout.expert if layout.gathered else 0
    divided = Division(layout.tensor, between_sites, layout.expert_tensor, gathered)
    tokens = layout.micro_batch * layout.seq_length / layout.context
    head = head_working_bytes(c, layout.whole_logits, divided) if stage == layout.pipeline - 1 else 0.0
    if not plans:  # the embedding or the head alone
        return tokens * head
    known = {plan.layer: plan for plan in plans}
    chunks = layout.stage_chunks(c.num_hidden_layers)[stage]
    chunk_bytes = [_chunk_bytes(c, layout.recompute, [known[layer] for layer in chunk], divided) for chunk in chunks]
    kept, working = [kept for kept, _ in chunk_bytes], [working for _, working in chunk_bytes]
    if stage == 0 and not chunks[0]:
        kept[0] = 0.0  # the embedding alone receives nothing
    working[-1] = max(working[-1], head)
    order = pipeline_order(stage, layout.pipeline, layout.virtual, layout.num_micro_batches, layout.turn)
    most = max(
        sum(number * bytes_ for number, bytes_ in zip(waiting, kept, strict=True)) + working[chunk]
        for chunk, waiting in waiting_chunks(order, layout.virtual)
    )
    experts = math.ceil(c.n_routed_experts / (layout.expert * layout.expert_tensor))
    return tokens * most + gradient_working_bytes(c, experts)


def _chunk_bytes(
    c: DSV41Config, recompute: Recompute, plans: Sequence[LayerPlan], divided: Division
) -> tuple[float, float]:
    """Bytes per token that a chunk keeps until its backward pass, and that this pass needs beside them."""
    if not plans:  # what it received
        return activation_bytes(c, "full", None, divided), 0.0
    keeps = [activation_bytes(c, recompute, plan, divided) for plan in plans]
    everything = [activation_bytes(c, "none", plan, divided) for plan in plans]
    if recompute == "full":  # one input per chunk, and everything while the chunk runs backward
        return keeps[0], layer_working_bytes(c, divided) + sum(everything) - keeps[0]
    again = max(whole - part for whole, part in zip(everything, keeps, strict=True))  # of one layer at a time
    return sum(keeps), layer_working_bytes(c, divided) + again
