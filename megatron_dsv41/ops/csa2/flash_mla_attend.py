"""Provider "flash_mla" of csa2.sparse_attend: FlashMLA's Hopper forward, our backward. Needs sgl-flash-mla (optional).

FlashMLA takes one table of rows, in blocks of 128 slots: the latents are concatenated and the window becomes indices.
"""

from __future__ import annotations

import torch
from flash_mla import flash_mla_sparse_fwd
from torch import Tensor

from megatron_dsv41.ops.csa2 import triton_attend
from megatron_dsv41.ops.csa2.attend import Problem, attend, slot_table
from megatron_dsv41.ops.csa2.checks import check_attend

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
    deterministic: bool | None = None,
    turn: tuple[Tensor, Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`ref.sparse_attend` with FlashMLA's forward: 64 heads of 512 channels in bf16 on SM90; gradients by "triton"."""
    check_attend(
        "flash_mla", q_THD, window_kv_JD, compressed_kv_CD, topk_TK, sink_H, window_start_T, (512,), range(64, 65)
    )
    return attend(
        forward, triton_attend.backward, triton_attend.teacher_probabilities, q_THD, window_kv_JD, compressed_kv_CD,
        topk_TK, sink_H, window_start_T, window_offset, scale, window, teacher, deterministic, turn,
    )  # fmt: skip
