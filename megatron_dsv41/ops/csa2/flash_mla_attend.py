"""Provider "flash_mla" of csa2.sparse_attend: FlashMLA's Hopper forward, our backward. Needs sgl-flash-mla (optional).

FlashMLA takes one table of rows, in blocks of 128 slots: the latents are concatenated and the window becomes indices.
"""

from __future__ import annotations

import torch
from flash_mla import flash_mla_sparse_fwd
from torch import Tensor

from megatron_dsv41.ops.csa2 import triton_attend
from megatron_dsv41.ops.csa2.attend import Problem, Provider, slot_table

SLOT_BLOCK = 128


def forward(
    problem: Problem, q: Tensor, window_kv: Tensor, keys: Tensor, topk: Tensor, sink: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and the log of the denominator, fp32 [T, H]."""
    table = slot_table(problem, topk, start, len(window_kv), SLOT_BLOCK).unsqueeze(1)
    rows = torch.cat([window_kv, keys]).unsqueeze(1)
    out, _, lse = flash_mla_sparse_fwd(q, rows, table, problem.scale, attn_sink=sink, use_legacy=True)
    assert lse is not None
    # FlashMLA leaves the sink out of its lse, and says +inf where a query has no slot.
    return out, torch.where(lse == torch.inf, sink.expand_as(lse), torch.logaddexp(lse, sink.expand_as(lse)))


sparse_attend = Provider(
    "flash_mla", forward, triton_attend.backward, triton_attend.teacher_probabilities,
    dims=(512,), heads=range(64, 65),
)  # fmt: skip
