"""Triton kernels of the Engram gate. The hidden size D is BLOCKS blocks of BLOCK channels, unrolled.

Forward: a program owns one stream and walks over tokens, its product of gains held in registers. Backward: the gate's
gradient needs a full row before anything else, the gains' a sum over tokens. One kernel that holds both has room for
eight warps on a multiprocessor and waits (0.387 ms at 4096 tokens); two read the output's gradient twice and do not.
"""

# Triton's language is not Python's: its types are beyond pyright.
# pyright: reportArgumentType=none, reportAttributeAccessIssue=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAssignmentType=none, reportGeneralTypeIssues=none

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _gate(dot, is_open, FLOOR: tl.constexpr):
    """Sigmoid of the signed square root, 0 where closed; and the root."""
    root = tl.sqrt(tl.maximum(tl.abs(dot), FLOOR, propagate_nan=tl.PropagateNan.ALL))
    negative = dot.to(tl.int32, bitcast=True) < 0  # -0.0 too, as copysign has it
    return tl.where(is_open, tl.sigmoid(tl.where(negative, -root, root)), 0.0), root


@triton.jit
def gate_forward(
    x_ptr, key_ptr, value_ptr, q_ptr, k_ptr, open_ptr, out_ptr, stats_ptr, num_tokens, share,
    N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    RMS_EPS: tl.constexpr, FLOOR: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Grid (N, programs). Writes the new streams and, for the backward, dot and both RMS factors [3, T, N]."""
    stream = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    gains = ()
    for b in tl.static_range(BLOCKS):
        gain = stream * D + b * BLOCK + lane
        gains = gains + (tl.load(q_ptr + gain).to(tl.float32) * tl.load(k_ptr + gain).to(tl.float32),)
    begin = tl.program_id(1) * share
    for t in range(begin, tl.minimum(begin + share, num_tokens)):
        row = (tl.cast(t, tl.int64) * N + stream) * D
        dots = tl.zeros([BLOCK], dtype=tl.float32)
        x_squares = tl.zeros([BLOCK], dtype=tl.float32)
        key_squares = tl.zeros([BLOCK], dtype=tl.float32)
        rows, values = (), ()
        for b in tl.static_range(BLOCKS):
            at = b * BLOCK + lane
            narrow = tl.load(x_ptr + row + at)
            key = tl.load(key_ptr + row + at).to(tl.float32)
            values = values + (tl.load(value_ptr + tl.cast(t, tl.int64) * D + at),)
            rows = rows + (narrow,)
            x = narrow.to(tl.float32)
            dots += x * gains[b] * key
            x_squares += x * x
            key_squares += key * key
        dot, x_square, key_square = tl.reduce((dots, x_squares, key_squares), 0, _add3)
        x_rms = 1.0 / tl.sqrt(x_square / D + RMS_EPS)
        key_rms = 1.0 / tl.sqrt(key_square / D + RMS_EPS)
        dot = dot * x_rms * key_rms * SCALE
        gate, _ = _gate(dot, tl.load(open_ptr + t) != 0, FLOOR)
        stats = stats_ptr + t * N + stream
        tl.store(stats, dot)
        tl.store(stats + num_tokens * N, x_rms)
        tl.store(stats + 2 * num_tokens * N, key_rms)
        for b in tl.static_range(BLOCKS):
            new = rows[b].to(tl.float32) + gate * values[b].to(tl.float32)
            tl.store(out_ptr + row + b * BLOCK + lane, new.to(out_ptr.dtype.element_ty))


@triton.jit
def gate_backward_rows(
    grad_ptr, value_ptr, open_ptr, stats_ptr, grad_value_ptr, factors_ptr, num_tokens, share,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, FLOOR: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Grid (programs). The value's gradient, and what needs whole rows: three factors per token and stream [3, T, 4].

    With them the gradients of stream and key are sums of products: grad + f0 gain key - f1 x, and f0 gain x - f2 key.
    """
    lane = tl.arange(0, BLOCK)
    begin = tl.program_id(0) * share
    for t in range(begin, tl.minimum(begin + share, num_tokens)):
        row = tl.cast(t, tl.int64) * (4 * D)
        narrow = tl.cast(t, tl.int64) * D
        is_open = tl.load(open_ptr + t) != 0
        saved, gates = (), ()
        for i in tl.static_range(4):
            stats = stats_ptr + t * 4 + i
            one = (tl.load(stats), tl.load(stats + num_tokens * 4), tl.load(stats + num_tokens * 8))
            gate, root = _gate(one[0], is_open, FLOOR)
            saved = saved + ((one[0], one[1], one[2], root),)
            gates = gates + (gate,)
        zero = tl.zeros([BLOCK], dtype=tl.float32)
        dots = (zero, zero, zero, zero)
        for b in tl.static_range(BLOCKS):
            at = b * BLOCK + lane
            value = tl.load(value_ptr + narrow + at).to(tl.float32)
            of_value = zero
            more = ()
            for i in tl.static_range(4):
                grad = tl.load(grad_ptr + row + i * D + at).to(tl.float32)
                of_value += gates[i] * grad
                more = more + (dots[i] + value * grad,)
            dots = more
            tl.store(grad_value_ptr + narrow + at, of_value.to(grad_value_ptr.dtype.element_ty))
        of_gate = tl.reduce(dots, 0, _add4)
        for i in tl.static_range(4):
            dot, x_rms, key_rms, root = saved[i]
            of_dot = tl.where(tl.abs(dot) < FLOOR, 0.0, of_gate[i] * gates[i] * (1.0 - gates[i]) * 0.5 / root)
            factors = factors_ptr + t * 4 + i
            tl.store(factors, of_dot * (SCALE * x_rms * key_rms))
            tl.store(factors + num_tokens * 4, of_dot * dot * x_rms * x_rms / D)
            tl.store(factors + num_tokens * 8, of_dot * dot * key_rms * key_rms / D)


@triton.jit
def gate_backward_streams(
    grad_ptr, x_ptr, key_ptr, q_ptr, k_ptr, factors_ptr, grad_x_ptr, grad_key_ptr, grad_gain_ptr, num_tokens, share,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Grid (4 D / BLOCK, programs): some channels of one stream over some tokens, the last first.

    Last first, because the kernel before left the end of `grad` in the cache. Also writes this program's part of the
    gradient of the gains' product, fp32 [programs, 4, D].
    """
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stream = tl.program_id(0) // (D // BLOCK)
    gain = (tl.load(q_ptr + channel).to(tl.float32) * tl.load(k_ptr + channel).to(tl.float32))[None, :]
    of_gain = tl.zeros([BLOCK_T, BLOCK], dtype=tl.float32)
    end = num_tokens - tl.program_id(1) * share
    begin = tl.maximum(end - share, 0)
    for back in range(0, end - begin, BLOCK_T):
        t = end - 1 - back - tl.arange(0, BLOCK_T)
        inside = t >= begin
        factors = factors_ptr + t * 4 + stream
        cross = tl.load(factors, mask=inside, other=0.0)[:, None]
        of_x_norm = tl.load(factors + num_tokens * 4, mask=inside, other=0.0)[:, None]
        of_key_norm = tl.load(factors + num_tokens * 8, mask=inside, other=0.0)[:, None]
        at, mask = t[:, None].to(tl.int64) * (4 * D) + channel[None, :], inside[:, None]
        grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        key = tl.load(key_ptr + at, mask=mask, other=0.0).to(tl.float32)
        of_x = grad + gain * cross * key - of_x_norm * x
        tl.store(grad_x_ptr + at, of_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        of_key = gain * cross * x - of_key_norm * key
        tl.store(grad_key_ptr + at, of_key.to(grad_key_ptr.dtype.element_ty), mask=mask)
        of_gain += cross * x * key
    at = tl.program_id(1) * (4 * D) + channel
    tl.store(grad_gain_ptr + at, tl.sum(of_gain, axis=0))


@triton.jit
def sum_gain_gradients(
    partial_ptr, q_ptr, k_ptr, grad_q_ptr, grad_k_ptr, programs, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Partials [programs, SIZE] -> gradients of q_weight and k_weight, in a fixed order."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < SIZE
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, programs, 16):
        program = begin + tl.arange(0, 16)
        mask = (program < programs)[:, None] & inside[None, :]
        total += tl.sum(tl.load(partial_ptr + program[:, None] * SIZE + cols[None, :], mask=mask, other=0.0), axis=0)
    q = tl.load(q_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad_q_ptr + cols, (total * k).to(grad_q_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_k_ptr + cols, (total * q).to(grad_k_ptr.dtype.element_ty), mask=inside)
