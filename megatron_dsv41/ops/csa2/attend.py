"""What the GPU providers of csa2.sparse_attend share: the call, and the autograd node around its kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_dsv41.ops.csa2.checks import check_attend
from megatron_dsv41.ops.hopper_checks import check_hopper
from megatron_dsv41.ops.rope.triton_rotate import check_owned, rotate_owned


@dataclasses.dataclass(frozen=True)
class Problem:
    """The numbers of one call."""

    num_tokens: int
    num_heads: int
    dim: int
    window: int
    num_topk: int
    window_offset: int
    scale: float
    deterministic: bool


# (problem, q, window_kv, keys, topk, sink, start) -> output [T, H, D], lse: log of the denominator, sink included, fp32
Forward = Callable[..., tuple[Tensor, Tensor]]
# (problem, q, window_kv, keys, topk, start, out, lse, grad_out)
#   -> grad_q, window gradient [J, D] and entry gradient [C, D], both summed in fp32, delta = sum(out * grad_out) fp32
#      [T, H]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
# (problem, q, keys, topk, lse) -> head-summed probabilities of the selected slots, fp32 [T, K]
Teacher = Callable[..., Tensor]


def slot_table(problem: Problem, topk: Tensor, start: Tensor, num_window_rows: int, block: int) -> Tensor:
    """Rows of [window_kv ; compressed_kv] per token, int32 [T, slots padded to a multiple of block], -1 = none."""
    here = torch.arange(problem.num_tokens, device=start.device) + problem.window_offset
    near = here[:, None] - (problem.window - 1) + torch.arange(problem.window, device=start.device)
    near = torch.where(near >= start[:, None], near, -1).to(torch.int32)
    far = torch.where(topk >= 0, topk + num_window_rows, -1)
    padding = -(problem.window + problem.num_topk) % block
    return torch.nn.functional.pad(torch.cat([near, far], dim=1), (0, padding), value=-1)


class SparseAttention(torch.autograd.Function):
    """Saves q, latents, slots, output and the denominator [T, H]; the backward kernel recomputes the probabilities.

    With cos and sin, q is turned by them where it lies, and its gradient turned back as it is made here. That happens
    inside of the node: autograd has then noted who made q. Of a view that has changed before, it would instead take the
    gradient through its base, which is two passes over all of q and an error where the base came out of another node.
    """

    @staticmethod
    def forward(
        ctx, kernels: tuple[Forward, Backward], problem: Problem, q, window_kv, wide_keys, topk, sink, start, cos, sin
    ):
        """Output [T, H, D] bf16 and the denominator's log, fp32 [T, H]."""
        if cos is not None:
            q = rotate_owned(q, cos, sin)
        keys = window_kv[:0] if wide_keys is None else wide_keys.to(q.dtype).contiguous()
        out, lse = kernels[0](problem, q, window_kv, keys, topk, sink, start)
        ctx.save_for_backward(q, window_kv, keys, topk, sink, start, out, lse, cos, sin)
        ctx.plan = (kernels[1], problem, None if wide_keys is None else wide_keys.dtype)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, _grad_lse):  # type: ignore[override]
        """Gradients of q, of both latents (accumulated in fp32) and of the sink."""
        q, window_kv, keys, topk, sink, start, out, lse, cos, sin = ctx.saved_tensors
        kernel, problem, keys_dtype = ctx.plan
        grad_q, grad_window, grad_keys, delta = kernel(
            problem, q, window_kv, keys, topk, start, out, lse, grad_out.contiguous()
        )
        if cos is not None:
            grad_q = rotate_owned(grad_q, cos, sin, inverse=True)
        # The sink has no value, so its logit's gradient is -p_sink * delta. lse is +inf where nothing was there.
        grad_sink = -((sink - lse).exp() * delta).sum(0)
        grad_keys = None if keys_dtype is None else grad_keys.to(keys_dtype)
        return None, None, grad_q, grad_window.to(window_kv.dtype), grad_keys, None, grad_sink, None, None, None


@dataclasses.dataclass(frozen=True)
class Provider:
    """A GPU provider of csa2.sparse_attend: its kernels, and the numbers of channels and heads that they take.

    hopper: they run on compute capability 9.0 alone. repeatable: gradients can be deterministic.
    """

    name: str
    forward: Forward
    backward: Backward
    teacher: Teacher
    dims: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    heads: range = range(1, 65)
    hopper: bool = False
    repeatable: bool = True

    def __call__(
        self,
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
        """`ref.sparse_attend` on a CUDA device: bf16 q and latents, fp32 accumulation (SPEC 8.7).

        `deterministic` (default: torch.are_deterministic_algorithms_enabled()) makes every gradient bitwise repeatable,
        at the price of partial rows in memory. compressed_kv may be fp32; its gradient is then fp32 too. With `turn`,
        q is turned where it lies: its memory is overwritten. ValueError: dtypes, devices, sizes or a request for
        deterministic gradients that the kernels cannot serve.
        """
        deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        check_attend(
            self.name, q_THD, window_kv_JD, compressed_kv_CD, topk_TK, sink_H, window_start_T, self.dims, self.heads
        )
        self._check_use(q_THD.device, deterministic)
        topk = q_THD.new_empty(q_THD.shape[0], 0, dtype=torch.int32) if topk_TK is None else topk_TK.contiguous()
        num_tokens, num_heads, dim = q_THD.shape
        problem = Problem(num_tokens, num_heads, dim, window, topk.shape[1], window_offset, scale, deterministic)
        q = q_THD.contiguous()
        if turn is not None:
            check_owned("csa2.sparse_attend with turn", q)  # from the node below on, q has other values
        out, lse = SparseAttention.apply(
            (self.forward, self.backward), problem, q, window_kv_JD.contiguous(), compressed_kv_CD, topk, sink_H,
            window_start_T, *(turn or (None, None)),
        )  # fmt: skip
        if not teacher:
            return out
        if compressed_kv_CD is None:
            return out, q.new_zeros(q.shape[0], 0, dtype=torch.float32)
        with torch.no_grad():
            return out, self.teacher(problem, q, compressed_kv_CD.to(q.dtype).contiguous(), topk, lse)

    def _check_use(self, device: torch.device, deterministic: bool) -> None:
        if self.hopper:
            check_hopper("csa2.sparse_attend", self.name, device, "triton")
        if deterministic and not self.repeatable:
            raise ValueError(
                f"csa2.sparse_attend: provider {self.name!r} has no deterministic gradients; 'hopper' and 'triton' have"
            )
