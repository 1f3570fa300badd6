"""Triton kernels of the Engram gate. The hidden size D is BLOCKS blocks of BLOCK channels, unrolled.

Forward: a program owns one stream and walks over tokens, its product of gains held in registers. Backward: a program
owns whole tokens, because the value's gradient sums over streams and the gate's needs a full row before anything else.
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
    root = tl.sqrt(tl.maximum(tl.abs(dot), FLOOR))
    negative = dot.to(tl.int32, bitcast=True) < 0  # -0.0 too, as copysign has it
    return tl.where(is_open, tl.sigmoid(tl.where(negative, -root, root)), 0.0), root


@triton.jit
def gate_forward(
    x_ptr, key_ptr, value_ptr, q_ptr, k_ptr, open_ptr, out_ptr, stats_ptr, num_tokens, share,
    N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    RMS_EPS: tl.constexpr, FLOOR: tl.constexpr, SCALE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (N, programs). Writes the new streams and, for the backward, dot and both RMS factors [3, T, N]."""
    stream = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    gains = ()
    for b in tl.static_range(BLOCKS):
        gain = stream * D + b * BLOCK + lane
        gains = gains + (tl.load(q_ptr + gain).to(tl.float32) * tl.load(k_ptr + gain).to(tl.float32),)
    begin = tl.program_id(1) * share
    for t in tl.range(begin, tl.minimum(begin + share, num_tokens), num_stages=STAGES):
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
def gate_backward(
    grad_ptr, x_ptr, key_ptr, value_ptr, q_ptr, k_ptr, open_ptr, stats_ptr,
    grad_x_ptr, grad_key_ptr, grad_value_ptr, grad_gain_ptr, num_tokens, share,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    FLOOR: tl.constexpr, SCALE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (programs). Also writes this program's part of the gradient of the gains' product, fp32 [programs, 4, D]."""
    lane = tl.arange(0, BLOCK)
    of_gains = ()
    for _ in tl.static_range(4 * BLOCKS):
        of_gains = of_gains + (tl.zeros([BLOCK], dtype=tl.float32),)
    begin = tl.program_id(0) * share
    for t in tl.range(begin, tl.minimum(begin + share, num_tokens), num_stages=STAGES):
        row = tl.cast(t, tl.int64) * (4 * D)
        narrow = tl.cast(t, tl.int64) * D
        zero = tl.zeros([BLOCK], dtype=tl.float32)
        dots = (zero, zero, zero, zero)
        for b in tl.static_range(BLOCKS):
            at = b * BLOCK + lane
            value = tl.load(value_ptr + narrow + at).to(tl.float32)
            more = ()
            for i in tl.static_range(4):
                more = more + (dots[i] + value * tl.load(grad_ptr + row + i * D + at).to(tl.float32),)
            dots = more
        of_gate = tl.reduce(dots, 0, _add4)
        gates, crosses, of_x_norms, of_key_norms = (), (), (), ()
        for i in tl.static_range(4):
            stats = stats_ptr + t * 4 + i
            dot, x_rms, key_rms = tl.load(stats), tl.load(stats + num_tokens * 4), tl.load(stats + num_tokens * 8)
            gate, root = _gate(dot, tl.load(open_ptr + t) != 0, FLOOR)
            of_dot = tl.where(tl.abs(dot) >= FLOOR, of_gate[i] * gate * (1.0 - gate) * 0.5 / root, 0.0)
            gates = gates + (gate,)
            crosses = crosses + (of_dot * (SCALE * x_rms * key_rms),)
            of_x_norms = of_x_norms + (of_dot * dot * x_rms * x_rms / D,)
            of_key_norms = of_key_norms + (of_dot * dot * key_rms * key_rms / D,)
        sums = ()
        for b in tl.static_range(BLOCKS):
            at = b * BLOCK + lane
            of_value = tl.zeros([BLOCK], dtype=tl.float32)
            for i in tl.static_range(4):
                here = row + i * D + at
                grad = tl.load(grad_ptr + here).to(tl.float32)  # a second time, from the cache
                x, key = tl.load(x_ptr + here).to(tl.float32), tl.load(key_ptr + here).to(tl.float32)
                gain = tl.load(q_ptr + i * D + at, eviction_policy="evict_last").to(tl.float32)
                gain *= tl.load(k_ptr + i * D + at, eviction_policy="evict_last").to(tl.float32) * crosses[i]
                of_value += gates[i] * grad
                of_x = grad + gain * key - of_x_norms[i] * x
                tl.store(grad_x_ptr + here, of_x.to(grad_x_ptr.dtype.element_ty))
                of_key = gain * x - of_key_norms[i] * key
                tl.store(grad_key_ptr + here, of_key.to(grad_key_ptr.dtype.element_ty))
                sums = sums + (of_gains[4 * b + i] + crosses[i] * x * key,)
            tl.store(grad_value_ptr + narrow + at, of_value.to(grad_value_ptr.dtype.element_ty))
        of_gains = sums
    for b in tl.static_range(BLOCKS):
        for i in tl.static_range(4):
            tl.store(grad_gain_ptr + tl.program_id(0) * (4 * D) + i * D + b * BLOCK + lane, of_gains[4 * b + i])


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
