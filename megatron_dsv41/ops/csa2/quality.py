"""How good a selection is, on a few query rows: against the true Top-k of its own layer, and against the layer before.

P probed queries, C compressed entries, K selected slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

# What `selection_quality` sums up. Ratios of the sums are the metrics.
QUALITY = ("queries", "recall", "mass", "compared", "overlap")


def probe_rows(num_tokens: int, probes: int, device: torch.device) -> Tensor:
    """At most `probes` evenly spaced rows of `num_tokens`, the last one included; int64."""
    count = min(probes, num_tokens)
    return (torch.arange(1, count + 1, device=device) * num_tokens) // max(count, 1) - 1


def chosen_entries(topk_PK: Tensor, num_entries: int) -> Tensor:
    """Entry ids with -1 for none -> bool [P, C]."""
    chosen = torch.zeros(topk_PK.shape[0], num_entries + 1, dtype=torch.bool, device=topk_PK.device)
    return chosen.scatter_(1, torch.where(topk_PK < 0, num_entries, topk_PK).long(), True)[:, :num_entries]


@torch.no_grad()
def selection_quality(teacher_PC: Tensor, visible_PC: Tensor, topk_PK: Tensor, previous_PK: Tensor | None) -> Tensor:
    """Sums over the queries that see more than K entries, so that there is something to choose; fp32 [5], QUALITY.

    teacher_PC: attention probabilities over all visible entries, summed over heads (`dense_teacher`). queries: how
    many. recall: share of the K entries with most attention that are selected. mass: attention on the selection over
    attention on those K, which is the most that K entries can have. compared, overlap: the same for the share of the
    selection that `previous_PK`, the selection in force before over the same entries, had too.
    """
    num_entries, k = teacher_PC.shape[1], topk_PK.shape[1]
    has_choice_P = visible_PC.sum(1) > k
    chosen_PC = chosen_entries(topk_PK, num_entries)
    best = teacher_PC.masked_fill(~visible_PC, -1.0).topk(k, dim=1)
    best_PC = torch.zeros_like(visible_PC).scatter_(1, best.indices, True)
    recall_P = (chosen_PC & best_PC).sum(1) / k
    mass_P = (teacher_PC * chosen_PC).sum(1) / best.values.sum(1).clamp_min(torch.finfo(teacher_PC.dtype).tiny)
    overlap_P = torch.zeros_like(mass_P)
    if previous_PK is not None:
        overlap_P = (chosen_PC & chosen_entries(previous_PK, num_entries)).sum(1) / k
    compared_P = has_choice_P if previous_PK is not None else torch.zeros_like(has_choice_P)
    judged = ((recall_P, has_choice_P), (mass_P, has_choice_P), (overlap_P, compared_P))
    recall, mass, overlap = (torch.where(counts_P, value_P, 0.0).sum() for value_P, counts_P in judged)
    return torch.stack([has_choice_P.sum().float(), recall, mass, compared_P.sum().float(), overlap]).float()
