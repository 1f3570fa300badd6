"""The whole model in one process: the definition that every backend is compared with (SPEC 6)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.layer_plan import live_at, plan_layers
from megatron_dsv41.modules.batch import Batch
from megatron_dsv41.modules.block import Aux, Block
from megatron_dsv41.modules.engram import EngramHash
from megatron_dsv41.modules.hyper_connection import open_streams
from megatron_dsv41.modules.primitives import Primitives, TorchPrimitives
from megatron_dsv41.modules.shared_state import SharedState
from megatron_dsv41.ops.csa2.quality import probe_rows
from megatron_dsv41.ops.documents import Documents, documents_from_ids, shard_groups, whole_groups
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.phase import Phase


class Output(NamedTuple):
    """logits fp32 [b, s, vocab]; aux: per-layer values, leading layer axis; streams: those entering each layer."""

    logits: Tensor
    aux: Aux
    streams: list[Tensor]


@dataclasses.dataclass(frozen=True)
class SequenceShard:
    """Which of `count` equal contiguous pieces of the sequence a process holds."""

    index: int = 0
    count: int = 1


WHOLE = SequenceShard()


def make_batch(
    config: DSV41Config,
    engram_hash: Callable[[Tensor, Documents], dict[int, Tensor]],
    input_ids_BS: Tensor,
    documents: Documents,
    replay_start_T: Tensor | None = None,
    shard: SequenceShard = WHOLE,
    *,
    index_scale: float = 1.0,
    probes: int = 0,
) -> Batch:
    """Everything layers read about the micro-batch, or about one sequence shard of it.

    input_ids_BS, documents and replay_start_T describe the whole micro-batch. A shard needs a single row whose length
    the shard count divides, and shards no shorter than the window's halo.
    replay_start_T int64 [T]: flat index s of each token's replay boundary, for decoder layers: tokens at or after s see
    no window key before s. None, or a token's document start: no replay.
    probes: on how many rows of a shard selections are measured.
    """
    window_start_T = decoder_window_start_T = documents.window_start(config.sliding_window)
    if replay_start_T is not None:
        here_T = torch.arange(documents.num_tokens, device=replay_start_T.device)
        cut_T = torch.where(here_T >= replay_start_T, replay_start_T, 0)
        decoder_window_start_T = torch.maximum(window_start_T, cut_T)
    entries = {ratio: documents.entries(ratio) for ratio in sorted(set(config.backbone_ratios) - {0})}
    whole = Batch(
        documents=documents,
        total_tokens=documents.num_tokens,
        entries=entries,
        groups={ratio: whole_groups(e) for ratio, e in entries.items()},
        engram_rows=engram_hash(input_ids_BS.reshape(-1), documents),
        gate_open_T=documents.alive_T & ~documents.image_T,
        window_start_T=window_start_T,
        decoder_window_start_T=decoder_window_start_T,
        index_scale=index_scale,
        probe_P=probe_rows(documents.num_tokens // shard.count, probes, input_ids_BS.device) if probes else None,
    )
    return whole if shard.count == 1 else _shard_batch(config, whole, input_ids_BS.shape[0], shard)


def _shard_batch(config: DSV41Config, whole: Batch, num_rows: int, shard: SequenceShard) -> Batch:
    total, halo = whole.total_tokens, config.sliding_window - 1
    size = total // shard.count
    if num_rows != 1:
        raise ValueError(f"a sequence cut into {shard.count} shards needs micro-batches of one row, got {num_rows}")
    if total % shard.count or size < halo:
        raise ValueError(
            f"sequence length {total} must be a multiple of {shard.count} shards of at least {halo} tokens "
            "(the window's halo comes from one neighbour)"
        )
    begin, end = shard.index * size, (shard.index + 1) * size
    return Batch(
        documents=whole.documents.rows(begin, end),
        total_tokens=total,
        entries={
            ratio: dataclasses.replace(e, first_T=e.first_T[begin:end], num_visible_T=e.num_visible_T[begin:end])
            for ratio, e in whole.entries.items()
        },
        groups={ratio: shard_groups(e, total, shard.count, shard.index) for ratio, e in whole.entries.items()},
        engram_rows={layer: rows[begin:end] for layer, rows in whole.engram_rows.items()},
        gate_open_T=whole.gate_open_T[begin:end],
        window_start_T=whole.window_start_T[begin:end] - (begin - halo),
        decoder_window_start_T=whole.decoder_window_start_T[begin:end] - (begin - halo),
        index_scale=whole.index_scale,
        probe_P=whole.probe_P,
    )


def one_document_per_row(config: DSV41Config, input_ids_BS: Tensor) -> Documents:
    """Every row is one living document; image spans are found by image_token_id."""
    same = torch.zeros_like(input_ids_BS)
    return documents_from_ids(same, torch.ones_like(same, dtype=torch.bool), input_ids_BS == config.image_token_id)


class Transformer(nn.Module):
    """Embedding, blocks, final collapse, norm, fp32 head, in one process. Parameter names are the native names."""

    def __init__(
        self,
        config: DSV41Config,
        token_map: Tensor,
        *,
        phase: Phase | None = None,
        ops: Ops | None = None,
        primitives: Primitives | None = None,
    ):
        super().__init__()
        self.config, self.ops = config, ops or Ops()
        phase = phase or Phase()
        self.primitives = primitives = primitives or TorchPrimitives(config, self.ops)
        self.engram_hash = EngramHash(config, token_map, self.ops["engram.hash"])
        self.embed = primitives.embedding(config.vocab_size, config.hidden_size)
        plans = plan_layers(config)
        self.layers = nn.ModuleList(
            Block(config, plan, phase, primitives, self.ops, live_at(plans, plan.layer + 1)) for plan in plans
        )
        self.norm = primitives.norm("norm", config.hidden_size, config.rms_norm_eps)
        self.head = primitives.head(config.hidden_size, config.vocab_size)

    def forward(
        self,
        input_ids_BS: Tensor,
        documents: Documents | None = None,
        replay_start_T: Tensor | None = None,
        *,
        probes: int = 0,
    ) -> Output:
        """Raw token ids int64 [b, s] -> Output. `documents` defaults to one document per row; see `make_batch`."""
        documents = documents or one_document_per_row(self.config, input_ids_BS)
        batch = make_batch(self.config, self.engram_hash, input_ids_BS, documents, replay_start_T, probes=probes)
        hidden_SBD, aux, entering = self.hidden(input_ids_BS, batch)
        return Output(self.head(hidden_SBD).transpose(0, 1), aux, entering)

    def hidden(self, input_ids_BS: Tensor, batch: Batch) -> tuple[Tensor, Aux, list[Tensor]]:
        """What the head reads [s, b, d], values of all layers, and the streams that enter each layer."""
        embedded_SBD = self.embed(input_ids_BS).transpose(0, 1)
        streams_SBND, pre_mix_SBN = open_streams(embedded_SBD, self.config.hc_mult)
        state, entering, aux = SharedState(), [], []
        with self.primitives.forward_pass():
            for block in self.layers:
                entering.append(streams_SBND)
                streams_SBND, pre_mix_SBN, state, layer_aux = block(streams_SBND, pre_mix_SBN, state, batch)
                aux.append(layer_aux)
        hidden_SBD = self.norm(self.ops["mhc.collapse"](streams_SBND, pre_mix_SBN))
        return hidden_SBD, Aux.stack(aux), entering


def next_token_loss(logits_BSV: Tensor, labels_BS: Tensor, weight_BS: Tensor) -> Tensor:
    """Cross-entropy summed over weighted positions, divided by their weight.

    labels_BS[b, s] is the token that follows position s; weight 0 where none does (document ends, padding).
    """
    losses = F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="none")
    weight = weight_BS.flatten().to(losses.dtype)
    return (losses * weight).sum() / weight.sum().clamp_min(1.0)
