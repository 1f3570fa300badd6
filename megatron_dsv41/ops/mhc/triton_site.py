"""Single-pass mHC in Triton: providers "triton" of mhc.collapse, expand and site. For SM80 and later.

`site` does all three in one pass over the streams (the report's single-pass form makes that possible: the site input
needs the coefficients of the site before). The two single ops run the same kernels with the other parts left out.
"""

# Kernel launches take options (num_warps, maxnreg) that pyright does not see in the kernel's signature.
# pyright: reportCallIssue=none

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
from torch import Tensor

from megatron_dsv41.ops.mhc import triton_site_kernels as kernels
from megatron_dsv41.ops.triton_checks import check_tensors

NUM_STREAMS = 4
SUM_TOKENS = 4  # tokens of one program of the per-token kernels, one warp each
WIDTH = 32  # a row of partial sums: 24 projections, the sum of squares, padding


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tokens and channels of a tile, warps, load stages, blocks that share the tokens (at most), registers a thread."""

    tokens: int
    channels: int
    warps: int
    stages: int
    blocks: int
    registers: int | None = None


# Chosen by tools/bench_fused.py on one H200.
FORWARD = Tile(tokens=64, channels=64, warps=4, stages=1, blocks=13)
BACKWARD = Tile(tokens=16, channels=64, warps=4, stages=1, blocks=6)
EXACT = Tile(tokens=16, channels=64, warps=4, stages=1, blocks=3)  # fp32 streams: products in fp32, for tests


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one call does, and the constants of its coefficients."""

    update: bool
    project: bool
    collapse: bool
    iters: int = 1
    eps: float = 0.0
    rms_eps: float = 0.0

    @property
    def parts(self) -> dict[str, bool]:
        """Compile-time switches of both kernels."""
        return {"UPDATE": self.update, "PROJECT": self.project, "COLLAPSE": self.collapse}

    def constants(self, dim: int) -> dict[str, Any]:
        """Compile-time arguments of the coefficient kernels."""
        return {"CHANNELS": NUM_STREAMS * dim, "ITERS": self.iters, "EPS": self.eps, "RMS_EPS": self.rms_eps}


class _Site(torch.autograd.Function):
    """All operands flat over tokens and contiguous; None where the plan does not use them. Saves inputs and sums."""

    @staticmethod
    def forward(ctx, y, streams, post, comb, pre, fn, base, scale, plan):
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        num_tokens, dim = streams.shape[0], streams.shape[2]
        new = torch.empty_like(streams) if plan.update else None
        site_input = streams.new_empty(num_tokens, dim) if plan.collapse else None
        tile = EXACT if streams.dtype == torch.float32 else FORWARD
        chunks = dim // tile.channels
        wide = {"dtype": torch.float32, "device": streams.device}
        partial = torch.empty(chunks, num_tokens, 24, **wide) if plan.project else None
        squares = torch.empty(chunks, num_tokens, **wide) if plan.project else None
        grid, share = _grid(tile, num_tokens, chunks)
        kernels.site_forward[grid](
            y, streams, post, comb, pre, fn, new, site_input, partial, squares,
            num_tokens, share,
            D=dim, **plan.parts, BLOCK_T=tile.tokens, C=tile.channels, STAGES=tile.stages,
            num_warps=tile.warps, maxnreg=tile.registers,
        )  # fmt: skip
        sums = mix = None
        if plan.project:
            sums = torch.empty(num_tokens, WIDTH, **wide)
            mix = [torch.empty(num_tokens, *shape, **wide) for shape in ((4,), (4,), (4, 4))]
            kernels.predict_forward[(triton.cdiv(num_tokens, SUM_TOKENS),)](
                partial, squares, sums, base, scale, *mix, num_tokens, chunks,
                **plan.constants(dim), BLOCK_T=SUM_TOKENS, num_warps=1,
            )  # fmt: skip
        ctx.save_for_backward(y, streams, post, comb, pre, fn, base, scale, sums)
        return new, site_input, *(mix or (None, None, None))

    @staticmethod
    def backward(ctx, *grads):
        y, streams, post, comb, pre, fn, base, scale, sums = ctx.saved_tensors
        grad_new, grad_input, *grad_mix = (None if g is None else g.contiguous() for g in grads)
        plan, tokens = ctx.plan, streams.shape[0]
        project = plan.project and any(g is not None for g in grad_mix)
        plan = dataclasses.replace(plan, project=project, collapse=plan.collapse and grad_input is not None)
        weight, params = _weights(plan, sums, base, scale, grad_mix, streams.shape[2]) if project else (None, None)
        grad_x, grad_y, grad_fn, partial_mix = _gradients(
            plan, y, streams, post, comb, pre, fn, weight, grad_new, grad_input
        )
        wide = {"dtype": torch.float32, "device": streams.device}
        of_pre = torch.empty(tokens, 4, **wide) if plan.collapse else None
        of_post = torch.empty(tokens, 4, **wide) if plan.update else None
        of_comb = torch.empty(tokens, 4, 4, **wide) if plan.update else None
        if plan.collapse or plan.update:
            kernels.sum_mix_gradients[(triton.cdiv(tokens, SUM_TOKENS),)](
                partial_mix, of_pre, of_post, of_comb, tokens, partial_mix.shape[0],
                UPDATE=plan.update, COLLAPSE=plan.collapse, BLOCK_T=SUM_TOKENS, num_warps=1,
            )  # fmt: skip
        of_fn = of_base = of_scale = None
        if project:
            of_fn, of_base, of_scale = torch.empty_like(fn), torch.empty_like(base), torch.empty_like(scale)
            kernels.sum_fn_gradients[(triton.cdiv(fn.shape[1], 64) + 3,)](
                grad_fn, params, of_fn, of_base, of_scale, grad_fn.shape[0], params.shape[0],
                CHANNELS=fn.shape[1], BLOCK_C=64, num_warps=4,
            )  # fmt: skip
        return grad_y, grad_x, of_post, of_comb, of_pre, of_fn, of_base, of_scale, None


def _weights(plan: Plan, sums: Tensor, base: Tensor, scale: Tensor, grads: list[Tensor | None], dim: int):
    """Coefficient gradients -> per-token weights of fn's rows [T, WIDTH] and partial gradients of base and scale."""
    tokens, programs = sums.shape[0], triton.cdiv(sums.shape[0], SUM_TOKENS)
    weight, params = torch.empty_like(sums), sums.new_empty(programs, 2, WIDTH)
    has = {f"HAS_{name}": g is not None for name, g in zip(("PRE", "POST", "COMB"), grads, strict=True)}
    kernels.predict_backward[(programs,)](
        sums, base, scale, *grads, weight, params, tokens,
        **has, **plan.constants(dim), BLOCK_T=SUM_TOKENS, num_warps=1,
    )  # fmt: skip
    return weight, params


def _gradients(plan, y, streams, post, comb, pre, fn, weight, grad_new, grad_input):
    """Runs the backward kernel: gradients of streams and y, partial gradients of fn and of the coefficients."""
    tokens, _, dim = streams.shape
    tile = EXACT if streams.dtype == torch.float32 else BACKWARD
    chunks = dim // tile.channels
    grid, share = _grid(tile, tokens, chunks)
    wide = {"dtype": torch.float32, "device": streams.device}
    grad_x, grad_y = torch.empty_like(streams), torch.empty_like(y) if plan.update else None
    grad_fn = torch.empty(grid[1], NUM_STREAMS * dim, WIDTH, **wide) if plan.project else None
    partial_mix = torch.empty(chunks, tokens, 24, **wide) if plan.update or plan.collapse else None
    kernels.site_backward[grid](
        y, streams, post, comb, pre, fn, weight, grad_new, grad_input, grad_y, grad_x, grad_fn, partial_mix,
        tokens, share, D=dim, **plan.parts, HAS_NEW=grad_new is not None,
        BLOCK_T=tile.tokens, C=tile.channels, STAGES=tile.stages,
            num_warps=tile.warps, maxnreg=tile.registers,
    )  # fmt: skip
    return grad_x, grad_y, grad_fn, partial_mix


def _grid(tile: Tile, num_tokens: int, chunks: int) -> tuple[tuple[int, int], int]:
    """Grid (channel blocks, token blocks) and the tokens of one block."""
    steps = triton.cdiv(num_tokens, tile.tokens)
    share = triton.cdiv(steps, min(steps, tile.blocks)) * tile.tokens
    return (chunks, triton.cdiv(num_tokens, share)), share


def _check(op: str, streams: Tensor, *wide: Tensor | None) -> None:
    check_tensors(op, streams)
    check_tensors(op, *wide, dtypes=(torch.float32,))
    n, d = streams.shape[-2:]
    if n != NUM_STREAMS or d % FORWARD.channels:
        raise ValueError(
            f"{op}: provider 'triton' takes 4 streams of a width that is a multiple of {FORWARD.channels}, "
            f"got {n} of {d}; choose 'ref'"
        )


def site(
    y: Tensor | None,
    streams: Tensor,
    post: Tensor | None,
    comb: Tensor | None,
    pre: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    iters: int,
    eps: float,
    rms_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One site in one pass. Semantics, shapes and dtypes of `mhc.ref.site`."""
    _check("mhc.site", streams, post, comb, pre, fn, base, scale)
    plan = Plan(y is not None, True, True, iters, eps, rms_eps)
    new, *rest = _run(plan, streams, y=y, post=post, comb=comb, pre=pre, fn=fn, base=base, scale=scale)
    return streams if new is None else new, *rest


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Semantics, shapes and dtypes of `mhc.ref.collapse`."""
    _check("mhc.collapse", streams, pre)
    return _run(Plan(False, False, True), streams, pre=pre)[1]


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Semantics, shapes and dtypes of `mhc.ref.expand`."""
    _check("mhc.expand", streams, post, comb)
    return _run(Plan(True, False, False), streams, y=y, post=post, comb=comb)[0]


def _run(plan: Plan, streams: Tensor, **operands: Tensor | None) -> tuple[Tensor, ...]:
    """Flatten the leading dims, run, restore them. Outputs of `_Site`."""
    lead = streams.shape[:-2]
    if streams.numel() == 0:
        raise ValueError(f"mhc: provider 'triton' needs at least one token, got streams {list(streams.shape)}")
    own = {"y": 1, "post": 1, "comb": 2, "pre": 1}
    flat = {
        name: None if x is None else x.reshape(-1, *x.shape[x.dim() - own[name] :]).contiguous()
        for name in own
        for x in (operands.get(name),)
    }
    params = (None if p is None else p.contiguous() for p in map(operands.get, ("fn", "base", "scale")))
    streams = streams.reshape(-1, *streams.shape[-2:]).contiguous()
    outputs = _Site.apply(flat["y"], streams, flat["post"], flat["comb"], flat["pre"], *params, plan)
    return tuple(None if out is None else out.reshape(*lead, *out.shape[1:]) for out in outputs)
