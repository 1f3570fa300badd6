"""Provider "cudnn" of csa2.sparse_attend: our Hopper forward, cuDNN-frontend's SM90 backward (optional packages).

cuDNN-frontend takes one table of rows: the latents are concatenated and the window becomes indices. Its kernels are
compiled at the first backward, in some ten seconds for every number of heads and of slots. They sum the latents'
gradients by atomics and hand them out in bf16, a wide compressed_kv's too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dsv41.ops.csa2 import hopper_attend, triton_attend
from megatron_dsv41.ops.csa2.attend import Problem, Provider, slot_table

try:
    from cudnn.deepseek_sparse_attention import sparse_attention_backward_wrapper
except ImportError as error:
    raise ImportError(
        f"pip install 'nvidia-cudnn-frontend>=1.32' 'nvidia-cutlass-dsl[cu13]>=4.8' ({error})",
        name="nvidia-cudnn-frontend",
    ) from error

SLOT_BLOCK = 64  # slots that the kernel takes at once; a multiple spares compiling it for every number of slots


def backward(
    problem: Problem, q: Tensor, window_kv: Tensor, keys: Tensor, topk: Tensor, start: Tensor, out: Tensor,
    lse: Tensor, grad_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """grad_q, the latents' gradients (summed in fp32, handed out in bf16), and delta."""
    delta = triton_attend.output_dots(out, grad_out)
    rows = torch.cat([window_kv, keys])
    if not problem.num_tokens:
        return torch.empty_like(q), torch.zeros_like(window_kv), torch.zeros_like(keys), delta
    table = slot_table(problem, topk, start, len(window_kv), SLOT_BLOCK)
    # cuDNN adds the sink to the denominator that it gets. Ours has it already, so there is none to add.
    no_sink = lse.new_full((problem.num_heads,), -torch.inf)
    grads = sparse_attention_backward_wrapper(q, rows, out, grad_out, lse, no_sink, table, problem.scale)
    grad_rows = grads["dkv"]
    return grads["dq"], grad_rows[: len(window_kv)], grad_rows[len(window_kv) :], delta


sparse_attend = Provider(
    "cudnn", hopper_attend.forward, backward, triton_attend.teacher_probabilities,
    dims=(512,), heads=range(2, 65), hopper=True, repeatable=False,
)  # fmt: skip
