"""CSA2 attention of one layer: window and selected entries under one softmax (SPEC 8)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.layer_plan import LayerPlan
from megatron_dsv41.modules.batch import Batch
from megatron_dsv41.modules.compressor import Compressor
from megatron_dsv41.modules.indexer import Indexer
from megatron_dsv41.modules.layout import from_flat, to_flat
from megatron_dsv41.modules.primitives import Primitives
from megatron_dsv41.modules.shared_state import SharedState
from megatron_dsv41.ops.csa2.quality import QUALITY, selection_quality
from megatron_dsv41.ops.csa2.ref import in_candidates, visible_entries
from megatron_dsv41.ops.documents import Entries
from megatron_dsv41.ops.linear.ref import Turn
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.ops.rope.ref import cos_sin, plain_frequencies, yarn_frequencies
from megatron_dsv41.phase import Phase


def layer_frequencies(config: DSV41Config, ratio: int, yarn: bool) -> Tensor:
    """The one frequency table of a layer, fp32 [rope_dim/2]: plain base at ratio 0, compress base with YaRN above."""
    if ratio == 0:
        return plain_frequencies(config.qk_rope_head_dim, config.rope_theta)
    if not yarn:
        return plain_frequencies(config.qk_rope_head_dim, config.compress_rope_theta)
    return yarn_frequencies(
        config.qk_rope_head_dim,
        config.compress_rope_theta,
        config.rope_factor,
        config.rope_beta_fast,
        config.rope_beta_slow,
        config.rope_original_max_position_embeddings,
    )


class IndexReport(NamedTuple):
    """Of one layer's indexer: its weighted loss fp32 [], and `selection_quality` of the probed rows fp32 [5]."""

    loss: Tensor
    quality: Tensor


class Attention(nn.Module):
    """Attention site of one layer. x [s, b, d] and the shared state in; y [s, b, d], state and index report out.

    recorded: state fields in which a selecting layer leaves its query inputs, where a later stage selects again.
    """

    frequencies: Tensor

    def __init__(
        self,
        config: DSV41Config,
        plan: LayerPlan,
        phase: Phase,
        primitives: Primitives,
        ops: Ops,
        recorded: frozenset[str] = frozenset(),
    ):
        super().__init__()
        self.recorded = recorded
        self.config, self.plan, self.phase, self.primitives, self.ops = config, plan, phase, primitives, ops
        d, eps = config.hidden_size, config.rms_norm_eps
        heads, dim, groups = config.num_attention_heads, config.head_dim, config.o_groups
        self.wq_a = primitives.linear("attn.wq_a", d, config.q_lora_rank)
        self.q_norm = primitives.norm("attn.q_norm", config.q_lora_rank, eps)
        self.wq_b = primitives.linear("attn.wq_b", config.q_lora_rank, heads * dim)
        self.wkv = primitives.linear("attn.wkv", d, dim)
        self.kv_norm = primitives.norm("attn.kv_norm", dim, eps)
        self.wo_a = primitives.grouped_linear("attn.wo_a", groups, heads // groups * dim, config.o_lora_rank)
        self.wo_b = primitives.linear("attn.wo_b", groups * config.o_lora_rank, d)
        sinks = torch.zeros(primitives.local("heads", heads), dtype=torch.float32)
        self.attn_sink = primitives.parameter(sinks, "attn.attn_sink")
        if plan.owns_kv:
            self.compressor = Compressor(config, plan.ratio, primitives, ops)
        if plan.owns_selection:
            self.indexer = Indexer(config, plan, phase, primitives, ops)
        # Not a parameter and not in checkpoints: it follows from the config.
        self.register_buffer("frequencies", layer_frequencies(config, plan.ratio, phase.yarn), persistent=False)

    def forward(self, x_SBD: Tensor, state: SharedState, batch: Batch) -> tuple[Tensor, SharedState, IndexReport]:
        """See class. The state comes back with whatever this layer produces; nothing is modified in place."""
        x_SBD = self.primitives.enter_site(x_SBD)
        x_TD = to_flat(x_SBD)
        turn_T = cos_sin(batch.documents.position_T, self.frequencies)
        q_latent_TR = self.q_norm(self.wq_a(x_TD))
        window_kv_TD = self.ops["rope.rotate"](self.kv_norm(self.wkv(x_TD)), *turn_T)
        if self.phase.window_kv_fp8:
            window_kv_TD = self.ops["quant.fake_fp8"](window_kv_TD)

        if self.plan.owns_kv:
            state = self._compress(x_TD, batch)
        index_queries = None
        if self.plan.owns_selection:
            index_queries = self.indexer.queries(x_TD, q_latent_TR, turn_T)
            state = self._select(q_latent_TR, index_queries, state, batch.entries[self.plan.ratio])

        window = self.config.sliding_window
        window_kv_JD = self.primitives.left_halo(self.primitives.fan_out(window_kv_TD), window - 1)
        of_heads = (q_latent_TR, window_kv_JD, turn_T, index_queries, state, batch)
        grouped_TO, state, report = self.primitives.recomputed(self._heads, *of_heads)
        y_SBD = self.wo_b(from_flat(grouped_TO, x_SBD.shape[1]))
        return self.primitives.leave_site(y_SBD), state, report

    def _heads(
        self,
        q_latent_TR: Tensor,
        window_kv_JD: Tensor,
        turn_T: tuple[Tensor, Tensor],
        index_queries: tuple[Tensor, Tensor] | None,
        state: SharedState,
        batch: Batch,
    ) -> tuple[Tensor, SharedState, IndexReport]:
        """Whatever is as wide as all heads: a site's largest tensors, and cheap to make again from its narrow ones."""
        q_THD = self.wq_b(self.primitives.fan_out(q_latent_TR)).unflatten(-1, (-1, self.config.head_dim))
        state, quality = self._measure(q_THD, turn_T, window_kv_JD, state, batch)
        out_THD, index_loss = self._attend(q_THD, turn_T, window_kv_JD, index_queries, state, batch)
        turn = Turn(*turn_T, self.ops["rope.rotate"], self.ops["rope.rotate_owned"])
        return self.wo_a(out_THD, turn), state, IndexReport(index_loss, quality)

    def _compress(self, x_TD: Tensor, batch: Batch) -> SharedState:
        """A fresh state: what an earlier source left is dead from here on."""
        groups = batch.groups[self.plan.ratio]
        latent_CD = self.compressor(self.primitives.left_halo(x_TD, self.plan.ratio - 1), groups)
        turn_C = cos_sin(groups.position_C, self.frequencies)
        kv_CD = self.ops["rope.rotate"](latent_CD, *turn_C)
        if self.phase.main_kv_fp4:
            kv_CD = self.ops["quant.fake_fp4"](kv_CD)
        wide = torch.promote_types(kv_CD.dtype, torch.float32)
        kv_CD = self.primitives.gather_groups(kv_CD.to(wide), groups)
        keys_CD = self.primitives.gather_groups(self.indexer.keys(latent_CD, turn_C), groups)
        # Every reader's heads add to one gradient: it is summed over processes once, here.
        return SharedState(compressed_kv=self.primitives.fan_out(kv_CD), index_keys=keys_CD)

    def _select(
        self, q_latent_TR: Tensor, index_queries: tuple[Tensor, Tensor], state: SharedState, entries: Entries
    ) -> SharedState:
        candidates = state.need("candidates") if self.indexer.restricted else None
        topk, candidates = self.indexer.select(*index_queries, state.need("index_keys"), candidates, entries)
        state = dataclasses.replace(state, topk_indices=topk)
        if self.plan.is_candidate_source:
            state = dataclasses.replace(state, candidates=candidates)
        query = {name: torch.cat([q_latent_TR, index_queries[1]], dim=-1).detach() for name in self.recorded}
        return dataclasses.replace(state, **query)

    def _attend(
        self,
        q_THD: Tensor,
        turn_T: tuple[Tensor, Tensor],
        window_kv_JD: Tensor,
        index_queries: tuple[Tensor, Tensor] | None,
        state: SharedState,
        batch: Batch,
    ) -> tuple[Tensor, Tensor]:
        """Output, to be turned back, and the index loss. q, not turned yet, is given away: nobody may read it again."""
        window_start_T = batch.decoder_window_start_T if self.plan.in_decoder else batch.window_start_T
        compressed_kv = state.need("compressed_kv") if self.plan.ratio else None
        window = self.config.sliding_window
        offset = window_kv_JD.shape[0] - q_THD.shape[0]
        where = (self.attn_sink, window_start_T, offset, self.config.head_dim**-0.5)
        teaches = index_queries is not None and self.indexer.trained
        sparse = teaches and self.phase.index_loss == "sparse"
        teacher = slots = None
        if teaches and not sparse:
            allowed_TC = self._allowed(state, batch.entries[self.plan.ratio])
            teacher = self.ops["csa2.dense_teacher"](
                self.ops["rope.rotate"](q_THD.detach(), *turn_T),
                window_kv_JD.detach(),
                state.need("compressed_kv").detach(),
                allowed_TC,
                *where,
                window=window,
            )
            entry = torch.arange(allowed_TC.shape[1], device=allowed_TC.device)
            slots = torch.where(allowed_TC, entry, -1)
        attended = self.ops["csa2.sparse_attend"](
            q_THD,
            window_kv_JD,
            compressed_kv,
            state.need("topk_indices") if self.plan.ratio else None,
            *where,
            window=window,
            teacher=sparse,
            turn=turn_T,
        )
        if sparse:
            attended, teacher = attended
            slots = state.need("topk_indices")
        if index_queries is None or teacher is None:
            return attended, window_kv_JD.new_zeros((), dtype=torch.float32)
        divergence_T = self.ops["csa2.index_divergence"](
            *index_queries, state.need("index_keys"), slots, self.primitives.sum_heads(teacher)
        )
        # A sequence shard contributes its part of the mean over all tokens.
        return attended, divergence_T.sum() / batch.total_tokens * (self.phase.index_loss_weight * batch.index_scale)

    def _measure(
        self, q_THD: Tensor, turn_T: tuple[Tensor, Tensor], window_kv_JD: Tensor, state: SharedState, batch: Batch
    ) -> tuple[SharedState, Tensor]:
        """`selection_quality` of the probed rows, [P, C] at a time; zeros where nothing is selected or probed.

        q is not turned yet, and still there: `_attend` takes it over.
        """
        rows_P = batch.probe_P
        if rows_P is None or not self.plan.owns_selection:
            return state, q_THD.new_zeros(len(QUALITY), dtype=torch.float32)
        entries = batch.entries[self.plan.ratio]
        probed = dataclasses.replace(
            entries, first_T=entries.first_T[rows_P], num_visible_T=entries.num_visible_T[rows_P]
        )
        visible_PC = visible_entries(probed)
        start_T = batch.decoder_window_start_T if self.plan.in_decoder else batch.window_start_T
        offset = window_kv_JD.shape[0] - q_THD.shape[0]
        teacher_PC = self.ops["csa2.dense_teacher"](
            self.ops["rope.rotate"](q_THD.detach()[rows_P], *(part[rows_P] for part in turn_T)),
            window_kv_JD.detach(),
            state.need("compressed_kv").detach(),
            visible_PC,
            self.attn_sink.detach(),
            start_T[rows_P],
            rows_P - torch.arange(rows_P.shape[0], device=rows_P.device) + offset,
            self.config.head_dim**-0.5,
            window=self.config.sliding_window,
        )
        topk_PK = state.need("topk_indices")[rows_P]
        # A KV source starts anew: what was selected before it are other entries.
        before_PK = None if self.plan.owns_kv else state.probed_topk
        quality = selection_quality(self.primitives.sum_heads(teacher_PC), visible_PC, topk_PK, before_PK)
        return dataclasses.replace(state, probed_topk=topk_PK), quality

    def _allowed(self, state: SharedState, entries: Entries) -> Tensor:
        """Entries that this layer's indexer may choose from, bool [T, C]."""
        allowed_TC = visible_entries(entries)
        if self.plan.uses_candidates and self.phase.hsi:
            allowed_TC = allowed_TC & in_candidates(entries, state.need("candidates"), self.config.candidate_block_size)
        return allowed_TC
