"""CSA2: compression, selection and joint sparse attention, the definition (SPEC 8, 9).

T query tokens, H heads, D latent channels, C compressed entries, K selected slots, I index heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dsv41.ops.documents import Entries, Groups
from megatron_dsv41.ops.numerics import wide
from megatron_dsv41.ops.rope.ref import rotate

SCORE_ROWS = 256  # query rows scored at once: bounds the score tile to [SCORE_ROWS, I, C]


def pool(p_TD: Tensor, g_TD: Tensor, groups: Groups) -> Tensor:
    """Latent of every entry before its norm: per channel, softmax of the group's gates weighs the group's values.

    p_TD, g_TD: fp32 [T, D]. Returns fp32 [C, D]. Unused entries hold finite values that nobody may read.
    """
    members = groups.token_C[:, None] + torch.arange(groups.ratio, device=p_TD.device)
    return (p_TD[members] * g_TD[members].softmax(dim=1)).sum(dim=1)


def attention_slots(
    window_start_T: Tensor, window_offset: int | Tensor, window: int, num_keys: int, topk_TK: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Slots of every query as rows of [window_kv ; compressed_kv] and whether each is in use, both [T, window + K]."""
    here_T = torch.arange(window_start_T.shape[0], device=window_start_T.device) + window_offset
    slots_TS = here_T[:, None] - (window - 1) + torch.arange(window, device=here_T.device)
    used_TS = slots_TS >= window_start_T[:, None]
    if topk_TK is not None:
        slots_TS = torch.cat([slots_TS, topk_TK.long() + num_keys], dim=1)
        used_TS = torch.cat([used_TS, topk_TK >= 0], dim=1)
    return torch.where(used_TS, slots_TS, 0), used_TS


def sparse_attend(
    q_THD: Tensor,
    window_kv_JD: Tensor,
    compressed_kv_CD: Tensor | None,
    topk_TK: Tensor | None,
    sink_H: Tensor,
    window_start_T: Tensor,
    window_offset: int,
    scale: float,
    *,
    window: int,
    teacher: bool = False,
    turn: tuple[Tensor, Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """One softmax over window keys, selected entries and a valueless sink; keys are the values. Returns [T, H, D].

    Query t sees window rows window_start_T[t] .. t + window_offset, at most `window` of them, and compressed rows
    topk_TK[t] where not -1; a row in both counts twice. `sink_H` fp32 is a logit that `scale` does not touch.
    Logits and denominator are fp32; probabilities are rounded to q's dtype before they weigh the values. A query
    without any slot returns 0. compressed_kv may be fp32 beside a bf16 q, so that the gradients of its many readers add
    up in fp32: its values are then representable in q's dtype, its gradient comes in its own dtype.
    With `teacher`, also the head-summed probabilities of the selected slots, fp32 [T, K], without gradient.
    With `turn`, cos and sin fp32 [T, pairs], q is turned by `rope.rotate` first. It is then given away: a provider may
    turn it where it lies, so it must be nobody else's (a projection's output), and nobody may read it afterwards.
    """
    if turn is not None:
        q_THD = rotate(q_THD, *turn)
    keys = wide(window_kv_JD)
    if compressed_kv_CD is not None:
        keys = torch.cat([keys, wide(compressed_kv_CD)])
    slots_TS, used_TS = attention_slots(window_start_T, window_offset, window, window_kv_JD.shape[0], topk_TK)
    keys_TSD = keys[slots_TS]
    logits_THS = torch.einsum("thd,tsd->ths", wide(q_THD), keys_TSD) * scale
    logits_THS = logits_THS.masked_fill(~used_TS[:, None], -torch.inf)
    sink_TH1 = sink_H.to(keys.dtype)[None, :, None].expand(q_THD.shape[0], -1, 1)
    top_TH1 = torch.maximum(logits_THS.detach().amax(-1, keepdim=True), sink_TH1.detach())
    p_THS = (logits_THS - top_TH1).exp()
    denominator_TH1 = p_THS.sum(-1, keepdim=True) + (sink_TH1 - top_TH1).exp()
    out_THD = torch.einsum("ths,tsd->thd", wide(p_THS.to(q_THD.dtype)), keys_TSD) / denominator_TH1
    out_THD = out_THD.to(q_THD.dtype)
    if not teacher:
        return out_THD
    return out_THD, (p_THS / denominator_TH1).detach().sum(1)[:, window:]


def index_scores(q_TID: Tensor, weights_TI: Tensor, keys_CD: Tensor) -> Tensor:
    """I[t, j] = sum_h w[t, h] * relu(q[t, h] . k[j]), [T, C]. Dot, product and sum are each rounded to q's dtype."""
    dots_TIC = torch.einsum("tid,cd->tic", q_TID, keys_CD)
    return (weights_TI[:, :, None] * dots_TIC.relu()).sum(1, dtype=wide(q_TID[:0]).dtype).to(q_TID.dtype)


def _first_k(scores: Tensor, k: int) -> Tensor:
    """Positions of the k largest, ascending, -1 where the score is -inf. Equal scores: the smaller position."""
    top = torch.sort(scores, dim=-1, descending=True, stable=True)
    positions = torch.where(top.values[:, :k] == -torch.inf, scores.shape[-1], top.indices[:, :k])
    positions = positions.sort(-1).values
    return torch.where(positions == scores.shape[-1], -1, positions).to(torch.int32)


def visible_entries(entries: Entries, rows: slice = slice(None)) -> Tensor:
    """Whether each query may see each entry, bool [T, C]."""
    entry = torch.arange(entries.token_C.shape[0], device=entries.token_C.device)
    first, count = entries.first_T[rows, None], entries.num_visible_T[rows, None]
    return (entry >= first) & (entry < first + count)


def in_candidates(entries: Entries, candidates_TB: Tensor, block_size: int, rows: slice = slice(None)) -> Tensor:
    """Whether each entry stands in a candidate block of each query, bool [T, C]. Blocks are document-local."""
    num_entries = entries.token_C.shape[0]
    num_blocks = -(-num_entries // block_size)
    chosen = torch.zeros(candidates_TB.shape[0], num_blocks + 1, dtype=torch.bool, device=candidates_TB.device)
    chosen.scatter_(1, torch.where(candidates_TB < 0, num_blocks, candidates_TB).long(), True)
    local = torch.arange(num_entries, device=candidates_TB.device) - entries.first_T[rows, None]
    return chosen.gather(1, local.clamp_min(0) // block_size) & (local >= 0)


def _candidate_blocks(scores_TC: Tensor, entries: Entries, rows: slice, block_size: int, num_blocks: int) -> Tensor:
    """The best document-local blocks of every query, int32 [T, min(num_blocks, blocks)], ascending, -1 = none.

    A block scores its best visible entry; the block of the newest visible entry always stays.
    """
    num_entries = scores_TC.shape[1]
    blocks = -(-num_entries // block_size)
    local = torch.arange(blocks * block_size, device=scores_TC.device)
    first, count = entries.first_T[rows, None], entries.num_visible_T[rows, None]
    local_scores = scores_TC.gather(1, (first + local).clamp_max(max(num_entries - 1, 0)))
    local_scores = local_scores.masked_fill(local >= count, -torch.inf)
    best = local_scores.unflatten(1, (blocks, block_size)).amax(-1)
    newest = torch.arange(blocks, device=scores_TC.device) == (count - 1) // block_size
    best = best.masked_fill(newest & (count > 0), torch.inf)
    return _first_k(best, min(num_blocks, blocks))


def select(
    q_TID: Tensor,
    weights_TI: Tensor,
    keys_CD: Tensor,
    entries: Entries,
    topk: int,
    candidates_TB: Tensor | None = None,
    block_size: int = 0,
    num_blocks: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """The entries every query attends to, and with `num_blocks` > 0 the pool for later layers.

    Returns flat entry ids int32 [T, min(topk, C)], ascending, -1 = none at the end; and document-local block ids
    int32 [T, min(num_blocks, blocks)], likewise, or None. With `candidates_TB` only entries of those blocks are scored.
    Only visible entries are selected; among equal scores the smaller index wins. No gradient.
    """
    topk_rows, pool_rows = [], []
    with torch.no_grad():
        for begin in range(0, max(q_TID.shape[0], 1), SCORE_ROWS):
            rows = slice(begin, begin + SCORE_ROWS)
            scores_TC = index_scores(q_TID[rows], weights_TI[rows], keys_CD)
            allowed_TC = visible_entries(entries, rows)
            if candidates_TB is not None:
                allowed_TC = allowed_TC & in_candidates(entries, candidates_TB[rows], block_size, rows)
            scores_TC = scores_TC.masked_fill(~allowed_TC, -torch.inf)
            topk_rows.append(_first_k(scores_TC, min(topk, scores_TC.shape[1])))
            if num_blocks:
                pool_rows.append(_candidate_blocks(scores_TC, entries, rows, block_size, num_blocks))
    return torch.cat(topk_rows), torch.cat(pool_rows) if num_blocks else None


def dense_teacher(
    q_THD: Tensor,
    window_kv_JD: Tensor,
    compressed_kv_CD: Tensor,
    allowed_TC: Tensor,
    sink_H: Tensor,
    window_start_T: Tensor,
    window_offset: int | Tensor,
    scale: float,
    *,
    window: int,
) -> Tensor:
    """Head-summed attention probabilities over every allowed entry, fp32 [T, C], without gradient (SPEC 9, dense).

    The softmax runs over the window, all allowed entries and the sink. The queries may be any rows: `window_offset`
    [T] is then each one's own distance to its window row.
    """
    with torch.no_grad():
        slots_TS, used_TS = attention_slots(window_start_T, window_offset, window, window_kv_JD.shape[0], None)
        q = wide(q_THD)
        near_THS = torch.einsum("thd,tsd->ths", q, wide(window_kv_JD)[slots_TS]) * scale
        near_THS = near_THS.masked_fill(~used_TS[:, None], -torch.inf)
        far_THC = torch.einsum("thd,cd->thc", q, wide(compressed_kv_CD)) * scale
        far_THC = far_THC.masked_fill(~allowed_TC[:, None], -torch.inf)
        sink_TH1 = sink_H.to(q.dtype)[None, :, None].expand(q.shape[0], -1, 1)
        p = torch.cat([far_THC, near_THS, sink_TH1], dim=-1).softmax(-1)
        return p[:, :, : allowed_TC.shape[1]].sum(1)


def index_divergence(
    q_TID: Tensor, weights_TI: Tensor, keys_CD: Tensor, slots_TK: Tensor, teacher_TK: Tensor
) -> Tensor:
    """KL(teacher || softmax of index scores) of every query over its slots, fp32 [T] (SPEC 9).

    q, weights, keys: unquantized, scored in fp32. slots_TK: entry ids, -1 = none. teacher_TK: non-negative weights,
    renormalised here over the used slots; a query without used slots, or without teacher mass, has divergence 0.
    """
    used_TK = slots_TK >= 0
    keys_TKD = wide(keys_CD)[slots_TK.clamp_min(0).long()]
    dots_TIK = torch.einsum("tid,tkd->tik", wide(q_TID), keys_TKD)
    scores_TK = (wide(weights_TI)[:, :, None] * dots_TIK.relu()).sum(1)
    target_TK = teacher_TK.detach() * used_TK
    mass_T1 = target_TK.sum(-1, keepdim=True)
    target_TK = target_TK / mass_T1.clamp_min(torch.finfo(mass_T1.dtype).tiny)
    # A finite floor instead of -inf keeps rows without slots free of NaN, in the gradient too.
    log_p_TK = scores_TK.masked_fill(~used_TK, torch.finfo(scores_TK.dtype).min / 2).log_softmax(-1)
    return (target_TK * (target_TK.clamp_min(1e-10).log() - log_p_TK)).sum(-1)
