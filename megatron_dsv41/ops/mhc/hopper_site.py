"""Single-pass mHC in CUDA for Hopper: provider "hopper" of mhc.site.

The kernels are compiled when they are first called, in half a second each. Four bf16 streams of a width that is a
multiple of 64; what it does not take is left to the providers "triton" and "ref", by name.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import torch
from torch import Tensor

from megatron_dsv41.ops.cuda_kernels import launch
from megatron_dsv41.ops.hopper_checks import check_hopper

FORWARD, BACKWARD, FN_GRADIENT, COEFFICIENTS = (
    Path(__file__).with_name(f"hopper_{part}.cu") for part in ("forward", "backward", "fn_gradient", "coefficients")
)
THREADS, WARPS, ROWS, BLOCK, WIDTH = 256, 8, 16, 64, 32
NUM_STREAMS = 4
SUM_THREADS = 384
# As the kernels have them. Shared memory in bytes: copied units and tables of coefficients; a block's slice of fn.
FORWARD_STAGES, BACKWARD_STAGES, FN_STAGES, GROUP = 2, 2, 4, 4
ROUND = 64  # tokens: a tile of 8 for every warp, or a group of tiles of the gradient of fn
FORWARD_RING, FORWARD_FN = WARPS * (FORWARD_STAGES * 5 * 1024 + 4 * 96), 64 * 4 * 3 * 24 * 2
BACKWARD_RING, BACKWARD_FN = WARPS * (BACKWARD_STAGES * 10 * 1024 + 2 * 8 * 112), 4 * 12 * 512
# Blocks of 64 channels that a CTA owns, as the kernels have them. More of them leave fewer partial sums, but their
# slice of fn must fit.
FORWARD_BLOCKS, BACKWARD_BLOCKS = 4, 2
FN_COLUMNS = WARPS * 64  # columns of fn that a CTA of its gradient has
FN_RING = WARPS * FN_STAGES * 4 * 512 + 2 * GROUP * 96 * 16


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one call does, and the constants of its coefficients."""

    update: bool
    iters: int
    eps: float
    rms_eps: float

    def name(self, kernel: str, dim: int) -> str:
        """The kernel's instance for this plan."""
        return f"{kernel}<{str(self.update).lower()}, {dim}>"


@dataclasses.dataclass(frozen=True)
class Grid:
    """Chunks of channels, and CTAs, of which the device has a number of places: `shares` of them take turns over each
    chunk's tokens, a round of 64 at a time, up to round `limit`. Where rounds are left, one more per chunk does them,
    in the places without a share."""

    chunks: int
    shares: int
    limit: int
    ctas: int

    @classmethod
    def over(cls, tokens: int, chunks: int, places: int) -> Grid:
        """Grid of one call: as many shares as there are places for, and as few rounds for each as leave those left no
        longer a way."""
        rounds = _ceil(tokens, ROUND)
        shares = max(1, min(places // chunks, rounds))
        beyond = places - chunks * shares
        each = _ceil(rounds, shares)
        while beyond > 0 and _rounds_beyond(rounds - (each - 1) * shares, chunks, beyond) <= each - 1:
            each -= 1
        limit = each * shares
        return cls(chunks, shares, limit, chunks * (shares + (limit < rounds)))

    @classmethod
    def of_site(cls, streams: Tensor, blocks: int) -> Grid:
        """Of chunks of at most `blocks` blocks and one CTA on a multiprocessor."""
        tokens, _, dim = streams.shape
        return cls.over(tokens, _ceil(dim // BLOCK, blocks), _multiprocessors(streams.device.index))


def _rounds_beyond(left: int, chunks: int, places: int) -> int:
    """Rounds in a place for CTAs with `left` of them each; to start one costs as much as a round."""
    return _ceil(chunks, places) * (left + 1)


class _Site(torch.autograd.Function):
    """All operands flat over tokens and contiguous; None where the plan does not use them. Saves inputs and sums, and
    the new streams, which the next site saves too."""

    @staticmethod
    def forward(ctx, y, streams, post, comb, pre, fn, base, scale, plan):
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        tokens, _, dim = streams.shape
        grid = Grid.of_site(streams, FORWARD_BLOCKS)
        # Streams that stay as they are come back all the same: their gradient is then added by the backward kernel.
        new = torch.empty_like(streams) if plan.update else streams
        site_input, partial = streams.new_empty(tokens, dim), _wide(streams, tokens, grid.chunks, WIDTH)
        launch(
            FORWARD, plan.name("site_forward", dim), grid.ctas, THREADS, *_or(streams, y), streams,
            *_or(streams, post, comb), pre, fn, new, site_input, partial,
            tokens, grid.shares, grid.limit, shared_bytes=FORWARD_RING + FORWARD_BLOCKS * FORWARD_FN,
        )  # fmt: skip
        sums = _wide(streams, tokens, WIDTH)
        mix = [_wide(streams, tokens, *shape) for shape in ((4,), (4,), (4, 4))]
        launch(
            COEFFICIENTS, "predict_forward<8>", _ceil(tokens, 16), THREADS, partial, base, scale, sums, *mix,
            tokens, grid.chunks, NUM_STREAMS * dim, plan.iters, plan.eps, plan.rms_eps, early=True,
        )  # fmt: skip
        ctx.save_for_backward(y, streams, post, comb, pre, fn, base, scale, sums, new)
        return new, site_input, *mix

    @staticmethod
    def backward(ctx, *grads):
        y, streams, post, comb, pre, fn, base, scale, sums, new = ctx.saved_tensors
        grad_new, grad_input, *grad_mix = (None if g is None else g.contiguous() for g in grads)
        plan, (tokens, _, dim) = ctx.plan, streams.shape
        grid, tiles = Grid.of_site(streams, BACKWARD_BLOCKS), _ceil(tokens, ROWS)
        project = any(g is not None for g in grad_mix)
        param = partial_fn = grad_fn = grad_base = grad_scale = None
        shares = 0
        if project:
            weight, operand, param = _weights(plan, sums, base, scale, grad_mix, dim)
            partial_fn, shares = _fn_gradient(new, operand)
            grad_fn = torch.empty_like(fn) if shares > 1 else partial_fn[0]
            grad_base, grad_scale = torch.empty_like(base), torch.empty_like(scale)
        else:
            weight = torch.zeros_like(sums)
        grad_x, grad_y = torch.empty_like(streams), torch.empty_like(y) if plan.update else None
        partial_mix = _wide(streams, tokens, grid.chunks, 24)
        launch(
            BACKWARD, plan.name("site_backward", dim), grid.ctas, THREADS, *_or(streams, y), streams,
            *_or(streams, grad_new, grad_input, post, comb), pre, weight, fn, *_or(streams, grad_y),
            grad_x, partial_mix, tokens, grid.shares, grid.limit,
            int(grad_new is not None), int(grad_input is not None),
            shared_bytes=BACKWARD_RING + BACKWARD_BLOCKS * BACKWARD_FN, early=True,
        )  # fmt: skip
        grad_pre, grad_post, grad_comb = (_wide(streams, tokens, *shape) for shape in ((4,), (4,), (4, 4)))
        mix_ctas = _ceil(6 * tokens, SUM_THREADS)
        fn_ctas = _ceil(6 * NUM_STREAMS * dim, SUM_THREADS) if shares > 1 else 0
        launch(
            COEFFICIENTS, f"sum_gradients<{SUM_THREADS}>", mix_ctas + fn_ctas + project, SUM_THREADS, partial_mix,
            *_or(partial_mix, partial_fn, param), grad_pre, grad_post, grad_comb,
            *_or(partial_mix, grad_fn, grad_base, grad_scale),
            tokens, grid.chunks, NUM_STREAMS * dim, shares, tiles, mix_ctas, int(project), early=True,
        )  # fmt: skip
        if not plan.update:
            grad_post = grad_comb = None
        return grad_y, grad_x, grad_post, grad_comb, grad_pre, grad_fn, grad_base, grad_scale, None


def _weights(plan: Plan, sums: Tensor, base: Tensor, scale: Tensor, grads: list[Tensor | None], dim: int):
    """Coefficient gradients -> per-token weights of fn's rows [T, WIDTH], again as an operand, and partials of base and
    scale [tiles, 48]."""
    tokens, tiles = len(sums), _ceil(len(sums), ROWS)
    weight, param = torch.empty_like(sums), sums.new_empty(tiles, 48)
    operand = torch.empty(tiles, 24, 2 * ROWS, dtype=torch.bfloat16, device=sums.device)
    has = sum((g is not None) << i for i, g in enumerate(grads))
    launch(
        COEFFICIENTS, f"predict_backward<{ROWS}>", tiles, ROWS * 16, sums, base, scale, *_or(sums, *grads),
        weight, operand, param, tokens, NUM_STREAMS * dim, plan.iters, has, plan.eps, plan.rms_eps,
        shared_bytes=4 * (48 * ROWS + (2 * plan.iters - 1) * 16 * ROWS),
    )  # fmt: skip
    return weight, operand, param


def _fn_gradient(new: Tensor, operand: Tensor) -> tuple[Tensor, int]:
    """Partial gradients of fn [shares, 24, n * d], and how many."""
    tokens, columns = len(new), new[0].numel()
    grid = Grid.over(tokens, _ceil(columns, FN_COLUMNS), 2 * _multiprocessors(new.device.index))
    shares = grid.ctas // grid.chunks
    partial = _wide(new, shares, 24, columns)
    launch(
        FN_GRADIENT, f"fn_gradient<{FN_STAGES}>", grid.ctas, THREADS, new, operand, partial,
        tokens, columns, grid.chunks, grid.shares, grid.limit, shared_bytes=FN_RING, early=True,
    )  # fmt: skip
    return partial, shares


def _wide(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.float32, device=like.device)


def _or(instead: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """A kernel takes pointers: those that it does not use may point anywhere."""
    return [instead if tensor is None else tensor for tensor in tensors]


def _ceil(count: int, size: int) -> int:
    return -(-count // size)


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check(bf16: tuple[Tensor | None, ...], fp32: tuple[Tensor | None, ...], streams: Tensor) -> None:
    for dtype, tensors in ((torch.bfloat16, bf16), (torch.float32, fp32)):
        for tensor in tensors:
            if tensor is not None and (not tensor.is_cuda or tensor.dtype != dtype):
                raise ValueError(
                    "mhc.site: provider 'hopper' takes bfloat16 streams and float32 coefficients on a CUDA device, got "
                    f"{tensor.dtype} on {tensor.device}; choose 'triton' or 'ref'"
                )
    n, d = streams.shape[-2:]
    if n != NUM_STREAMS or d % BLOCK or streams.numel() == 0:
        raise ValueError(
            f"mhc.site: provider 'hopper' takes at least one token of 4 streams of a width that is a multiple of "
            f"{BLOCK}, got {list(streams.shape)}; choose 'ref'"
        )
    check_hopper("mhc.site", "hopper", streams.device, "triton")


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
    """One site in one pass. Semantics, shapes and dtypes of `mhc.ref.site`.

    ValueError: dtypes, devices or sizes that the kernels do not take.
    """
    _check((y, streams), (post, comb, pre, fn, base, scale), streams)
    lead, plan = streams.shape[:-2], Plan(y is not None, iters, eps, rms_eps)
    flat = (
        None if x is None else x.reshape(-1, *x.shape[x.dim() - own :]).contiguous()
        for x, own in ((y, 1), (streams, 2), (post, 1), (comb, 2), (pre, 1))
    )
    outputs = _Site.apply(*flat, fn.contiguous(), base.contiguous(), scale.contiguous(), plan)
    new, site_input, *mix = (out.reshape(*lead, *out.shape[1:]) for out in outputs)
    return new, site_input, *mix
