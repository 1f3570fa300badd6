"""Joint sparse attention in CUDA for Hopper: provider "hopper" of csa2.sparse_attend.

hopper_attend.cu is compiled at the first call, in about 5 s. Deterministic gradients are left to the Triton kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dsv41.ops.csa2 import triton_attend
from megatron_dsv41.ops.csa2.attend import Problem, attend
from megatron_dsv41.ops.csa2.checks import check_attend
from megatron_dsv41.ops.csa2.cuda_kernels import launch

FILE = "hopper_attend.cu"
THREADS, FORWARD_THREADS = 256, 384
MAX_SLOTS = 1024
TILE_BYTES = 64 * 512 * 2
SLOT_BYTES = (MAX_SLOTS + 64) * 4
# As the kernels lay it out: keys (x3), P (x2), a part of q, rescaling; q, grad_out, keys, P (x2), dS, row statistics.
FORWARD_BYTES = 3 * TILE_BYTES + 3 * 64 * 128 + (3 * 64 + 8) * 4 + 7 * 8 + 14 * 4 + SLOT_BYTES
BACKWARD_BYTES = 3 * TILE_BYTES + 3 * 64 * 128 + 2 * 64 * 4 + 64 + SLOT_BYTES


def latent_table(window_kv: Tensor, keys: Tensor, sums: Tensor | None = None) -> Tensor:
    """Rows of both latents in the kernels' channel order, bf16 [J + C, 512]; `sums` fp32 of that shape is zeroed."""
    rows = len(window_kv) + len(keys)
    table = window_kv.new_empty(rows, window_kv.shape[1])
    blocks = -(-rows * window_kv.shape[1] // (16 * THREADS))
    target, clear = (table, 0) if sums is None else (sums, 1)
    launch(FILE, "pack_rows", blocks, THREADS, window_kv, keys, table, target, len(window_kv), rows, clear)
    return table


def forward(
    problem: Problem, q: Tensor, window_kv: Tensor, keys: Tensor, topk: Tensor, sink: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and the log of the denominator, fp32 [T, H]."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    if problem.num_tokens:
        launch(
            FILE, "attend_forward", problem.num_tokens, FORWARD_THREADS, q, latent_table(window_kv, keys), topk, sink,
            start, out, lse, problem.num_tokens, problem.num_heads, problem.window, problem.num_topk,
            problem.window_offset, len(window_kv), problem.scale, shared_bytes=FORWARD_BYTES,
        )  # fmt: skip
    return out, lse


def backward(
    problem: Problem, q: Tensor, window_kv: Tensor, keys: Tensor, topk: Tensor, start: Tensor, out: Tensor,
    lse: Tensor, grad_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """grad_q, the latents' gradients in fp32, and delta."""
    if problem.deterministic:
        return triton_attend.backward(problem, q, window_kv, keys, topk, start, out, lse, grad_out)
    grad_q, delta = torch.empty_like(q), torch.empty_like(lse)
    grad_table = q.new_empty(len(window_kv) + len(keys), problem.dim, dtype=torch.float32)
    table = latent_table(window_kv, keys, grad_table)
    if problem.num_tokens:
        launch(
            FILE, "attend_backward", problem.num_tokens, THREADS, q, out, grad_out, table, topk, lse, start,
            grad_q, grad_table, delta, problem.num_tokens, problem.num_heads, problem.window, problem.num_topk,
            problem.window_offset, len(window_kv), problem.scale, shared_bytes=BACKWARD_BYTES,
        )  # fmt: skip
    return grad_q, grad_table[: len(window_kv)], grad_table[len(window_kv) :], delta


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
) -> Tensor | tuple[Tensor, Tensor]:
    """`ref.sparse_attend` on Hopper: 512 channels, up to 64 heads (always padded to 64), up to 1024 slots.

    ValueError: dtypes, devices or sizes that the kernels do not take. See triton_attend for `deterministic`.
    """
    check_attend("hopper", q_THD, window_kv_JD, compressed_kv_CD, topk_TK, sink_H, window_start_T, (512,))
    slots = window + (0 if topk_TK is None else topk_TK.shape[1])
    if slots > MAX_SLOTS:
        raise ValueError(f"csa2.sparse_attend: provider 'hopper' takes {MAX_SLOTS} slots, got window + topk = {slots}")
    if torch.cuda.get_device_capability(q_THD.device) != (9, 0):
        raise ValueError(
            "csa2.sparse_attend: provider 'hopper' needs compute capability 9.0, "
            f"{torch.cuda.get_device_name(q_THD.device)} has {torch.cuda.get_device_capability(q_THD.device)}"
        )
    return attend(
        forward, backward, triton_attend.teacher_probabilities, q_THD, window_kv_JD, compressed_kv_CD, topk_TK, sink_H,
        window_start_T, window_offset, scale, window, teacher, deterministic,
    )  # fmt: skip
