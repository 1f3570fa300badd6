"""Triton kernels of joint sparse attention. `triton_attend` launches them; `ref.sparse_attend` defines the result.

One program works on one query token: its heads are the rows of every matrix product, its slots the columns. Slots
0 .. WINDOW-1 are the window (oldest first, dead ones before the document's start), then come the selected entries.
Logits are kept in units of log2 so that exp2 applies.
"""

# Triton's language is not Python's: its types are beyond pyright.
# pyright: reportArgumentType=none, reportAttributeAccessIssue=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAssignmentType=none, reportGeneralTypeIssues=none

import triton
import triton.language as tl


@triton.jit
def num_used_entries(topk_ptr, token, num_topk, MAX_TOPK: tl.constexpr):
    """One more than the last used position of the token's selection: everything behind it is skipped."""
    place = tl.arange(0, MAX_TOPK)
    chosen = tl.load(topk_ptr + token * num_topk + place, mask=place < num_topk, other=-1)
    return tl.max(tl.where(chosen >= 0, place + 1, 0), axis=0)


@triton.jit
def slot_rows(slot, topk_ptr, token, num_topk, num_used, first_row, start, WINDOW: tl.constexpr):
    """Row of window_kv or compressed_kv behind each slot, whether it is a window row, and whether it is in use."""
    in_window = slot < WINDOW
    place = slot - WINDOW
    chosen = tl.load(topk_ptr + token * num_topk + place, mask=(place >= 0) & (place < num_used), other=-1)
    near = first_row + slot
    row = tl.where(in_window, near, chosen.to(tl.int64))
    used = row >= tl.where(in_window, start, 0)
    return tl.where(used, row, 0), in_window, used


@triton.jit
def load_keys(window_ptr, compressed_ptr, row, in_window, used, D: tl.constexpr):
    """Rows of either latent, [slots, D]; unused slots are 0."""
    base = tl.where(in_window, window_ptr + row * D, compressed_ptr + row * D)
    return tl.load(base[:, None] + tl.arange(0, D)[None, :], mask=used[:, None], other=0.0)


@triton.jit(do_not_specialize=["num_heads", "num_topk", "window_offset"])
def attend_forward(
    q_ptr, window_ptr, compressed_ptr, topk_ptr, sink_ptr, start_ptr, out_ptr, lse_ptr,
    num_heads, num_topk, window_offset, scale_log2,
    WINDOW: tl.constexpr, MAX_TOPK: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Output [T, H, D] and natural-log softmax denominator with the sink, fp32 [T, H]. Grid: T."""
    LOG2E: tl.constexpr = 1.4426950408889634
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.arange(0, BLOCK_H), tl.arange(0, D)
    real = head < num_heads
    tile = (token * num_heads + head)[:, None] * D + dim[None, :]
    q = tl.load(q_ptr + tile, mask=real[:, None], other=0.0)
    start = tl.load(start_ptr + token)
    first_row = token + window_offset - (WINDOW - 1)
    num_used = num_used_entries(topk_ptr, token, num_topk, MAX_TOPK)
    # The sink is the first logit of the online softmax; it has no value. A sink of -inf is no logit at all.
    sink = tl.load(sink_ptr + head, mask=real, other=0.0) * LOG2E
    top = tl.maximum(sink, -1e30)
    denominator = tl.exp2(sink - top)
    acc = tl.zeros([BLOCK_H, D], tl.float32)
    for begin in range(0, WINDOW + num_used, BLOCK_S):
        slot = begin + tl.arange(0, BLOCK_S)
        row, in_window, used = slot_rows(slot, topk_ptr, token, num_topk, num_used, first_row, start, WINDOW)
        keys = load_keys(window_ptr, compressed_ptr, row, in_window, used, D)
        logits = tl.dot(q, tl.trans(keys)) * scale_log2
        logits = tl.where(used[None, :], logits, -float("inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(logits - new_top[:, None])
        denominator = denominator * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(keys.dtype), keys, acc * shrink[:, None])
        top = new_top
    empty = denominator == 0.0
    acc = acc / tl.where(empty, 1.0, denominator)[:, None]
    tl.store(out_ptr + tile, acc.to(out_ptr.dtype.element_ty), mask=real[:, None])
    lse = tl.where(empty, float("inf"), (top + tl.log2(tl.where(empty, 1.0, denominator))) / LOG2E)
    tl.store(lse_ptr + token * num_heads + head, lse, mask=real)


@triton.jit(do_not_specialize=["num_heads", "num_topk"])
def attend_teacher(
    q_ptr, compressed_ptr, topk_ptr, lse_ptr, teacher_ptr,
    num_heads, num_topk, scale_log2,
    MAX_TOPK: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Head-summed probabilities of the selected slots, fp32 [T, K], from the saved denominator. Grid: T."""
    LOG2E: tl.constexpr = 1.4426950408889634
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.arange(0, BLOCK_H), tl.arange(0, D)
    real = head < num_heads
    q = tl.load(q_ptr + (token * num_heads + head)[:, None] * D + dim[None, :], mask=real[:, None], other=0.0)
    lse = tl.load(lse_ptr + token * num_heads + head, mask=real, other=float("inf")) * LOG2E
    num_used = num_used_entries(topk_ptr, token, num_topk, MAX_TOPK)
    for begin in range(0, num_topk, BLOCK_S):
        place = begin + tl.arange(0, BLOCK_S)
        chosen = tl.load(topk_ptr + token * num_topk + place, mask=place < num_used, other=-1).to(tl.int64)
        used = chosen >= 0
        base = compressed_ptr + tl.where(used, chosen, 0) * D
        keys = tl.load(base[:, None] + dim[None, :], mask=used[:, None], other=0.0)
        p = tl.exp2(tl.dot(q, tl.trans(keys)) * scale_log2 - lse[:, None])
        share = tl.where(used, tl.sum(p, axis=0), 0.0)
        tl.store(teacher_ptr + token * num_topk + place, share, mask=place < num_topk)


@triton.jit(do_not_specialize=["num_rows"])
def output_dots(out_ptr, grad_out_ptr, delta_ptr, num_rows, D: tl.constexpr, ROWS: tl.constexpr):
    """delta = sum(out * grad_out) of every token and head, fp32 [num_rows]. Grid: num_rows / ROWS."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    real = row < num_rows
    out = tl.load(out_ptr + at, mask=real[:, None], other=0.0).to(tl.float32)
    grad_out = tl.load(grad_out_ptr + at, mask=real[:, None], other=0.0).to(tl.float32)
    tl.store(delta_ptr + row, tl.sum(out * grad_out, axis=1), mask=real)


@triton.jit(do_not_specialize=["num_heads", "num_topk", "window_offset", "begin_token"])
def attend_backward_query(
    q_ptr, window_ptr, compressed_ptr, topk_ptr, start_ptr, out_ptr, lse_ptr, grad_out_ptr,
    grad_q_ptr, delta_ptr, p_ptr, ds_ptr,
    begin_token, num_heads, num_topk, window_offset, scale,
    WINDOW: tl.constexpr, MAX_TOPK: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
    CHUNK_D: tl.constexpr,
):  # fmt: skip
    """grad_q, delta = sum(out * grad_out) fp32 [T, H], and for the key kernels P and dS, [tokens, slots, BLOCK_H].

    Grid: the tokens from begin_token on. P and dS are 0 for padded heads and for slots not in use.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    local = tl.program_id(0).to(tl.int64)
    token = begin_token + local
    head, dim = tl.arange(0, BLOCK_H), tl.arange(0, D)
    real = head < num_heads
    head_row = (token * num_heads + head)[:, None] * D
    delta = tl.zeros([BLOCK_H], tl.float32)
    for part in tl.static_range(0, D, CHUNK_D):
        some = head_row + part + tl.arange(0, CHUNK_D)[None, :]
        out = tl.load(out_ptr + some, mask=real[:, None], other=0.0).to(tl.float32)
        delta += tl.sum(out * tl.load(grad_out_ptr + some, mask=real[:, None], other=0.0).to(tl.float32), axis=1)
    tl.store(delta_ptr + token * num_heads + head, delta, mask=real)
    q = tl.load(q_ptr + head_row + dim[None, :], mask=real[:, None], other=0.0)
    grad_out = tl.load(grad_out_ptr + head_row + dim[None, :], mask=real[:, None], other=0.0)
    lse = tl.load(lse_ptr + token * num_heads + head, mask=real, other=float("inf")) * LOG2E
    start = tl.load(start_ptr + token)
    first_row = token + window_offset - (WINDOW - 1)
    num_used = num_used_entries(topk_ptr, token, num_topk, MAX_TOPK)
    slots = WINDOW + num_topk
    acc = tl.zeros([BLOCK_H, D], tl.float32)
    for begin in range(0, WINDOW + num_used, BLOCK_S):
        slot = begin + tl.arange(0, BLOCK_S)
        row, in_window, used = slot_rows(slot, topk_ptr, token, num_topk, num_used, first_row, start, WINDOW)
        keys = load_keys(window_ptr, compressed_ptr, row, in_window, used, D)
        logits = tl.dot(q, tl.trans(keys)) * (scale * LOG2E)
        p = tl.where(used[None, :] & real[:, None], tl.exp2(logits - lse[:, None]), 0.0)
        grad_p = tl.dot(grad_out, tl.trans(keys))
        ds = (p * (grad_p - delta[:, None]) * scale).to(keys.dtype)
        at = (local * slots + slot)[None, :] * BLOCK_H + head[:, None]
        tl.store(p_ptr + at, p.to(keys.dtype), mask=(slot < slots)[None, :])
        tl.store(ds_ptr + at, ds, mask=(slot < slots)[None, :])
        acc = tl.dot(ds, keys, acc)
    tl.store(grad_q_ptr + head_row + dim[None, :], acc.to(grad_q_ptr.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["num_heads", "num_topk", "begin_token"])
def attend_backward_entries(
    q_ptr, grad_out_ptr, topk_ptr, p_ptr, ds_ptr, target_ptr,
    begin_token, num_heads, num_topk,
    WINDOW: tl.constexpr, MAX_TOPK: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
    CHUNK_D: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """Gradient of the selected entries: dS^T q + P^T grad_out per token. Grid: tokens x D / CHUNK_D.

    ATOMIC: added to target fp32 [C, D]. Otherwise stored as the partial row target[local token * K + place].
    """
    local = tl.program_id(0).to(tl.int64)
    token = begin_token + local
    dim = tl.program_id(1) * CHUNK_D + tl.arange(0, CHUNK_D)
    head = tl.arange(0, BLOCK_H)
    tile = (token * num_heads + head)[:, None] * D + dim[None, :]
    q = tl.load(q_ptr + tile, mask=(head < num_heads)[:, None], other=0.0)
    grad_out = tl.load(grad_out_ptr + tile, mask=(head < num_heads)[:, None], other=0.0)
    num_used = num_used_entries(topk_ptr, token, num_topk, MAX_TOPK)
    for begin in range(0, num_used, BLOCK_S):
        place = begin + tl.arange(0, BLOCK_S)
        chosen = tl.load(topk_ptr + token * num_topk + place, mask=place < num_used, other=-1).to(tl.int64)
        at = (local * (WINDOW + num_topk) + WINDOW + place)[:, None] * BLOCK_H + head[None, :]
        ds = tl.load(ds_ptr + at, mask=(place < num_used)[:, None], other=0.0)
        p = tl.load(p_ptr + at, mask=(place < num_used)[:, None], other=0.0)
        grad = tl.dot(p, grad_out, tl.dot(ds, q))
        if ATOMIC:
            to = target_ptr + tl.where(chosen >= 0, chosen, 0)[:, None] * D + dim[None, :]
            tl.atomic_add(to, grad, mask=(chosen >= 0)[:, None], sem="relaxed")
        else:
            to = target_ptr + (local * num_topk + place)[:, None] * D + dim[None, :]
            tl.store(to, grad.to(target_ptr.dtype.element_ty), mask=(place < num_used)[:, None])


@triton.jit(
    do_not_specialize=[
        "num_heads", "num_topk", "window_offset", "begin_token", "end_token", "first_row", "num_rows"
    ]
)  # fmt: skip
def attend_backward_window(
    q_ptr, grad_out_ptr, p_ptr, ds_ptr, grad_window_ptr,
    begin_token, end_token, first_row, num_rows, num_heads, num_topk, window_offset,
    WINDOW: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_J: tl.constexpr, CHUNK_D: tl.constexpr,
):  # fmt: skip
    """Adds the window keys' gradient of the tokens begin_token .. end_token-1 to fp32 [J, D].

    Each program owns BLOCK_J rows (from first_row on) and CHUNK_D channels: no atomics. Grid: row blocks x D / CHUNK_D.
    """
    begin_row = first_row + tl.program_id(0).to(tl.int64) * BLOCK_J
    row = begin_row + tl.arange(0, BLOCK_J)
    dim = tl.program_id(1) * CHUNK_D + tl.arange(0, CHUNK_D)
    head = tl.arange(0, BLOCK_H)
    # Row j stands in the windows of tokens j - window_offset .. j - window_offset + WINDOW - 1.
    begin = tl.maximum(begin_token, begin_row - window_offset)
    end = tl.minimum(end_token, begin_row + BLOCK_J - window_offset + WINDOW - 1)
    to = grad_window_ptr + row[:, None] * D + dim[None, :]
    acc = tl.load(to, mask=(row < num_rows)[:, None], other=0.0)
    for token in range(begin, end):
        slot = row - (token + window_offset - (WINDOW - 1))
        inside = (slot >= 0) & (slot < WINDOW)
        at = ((token - begin_token) * (WINDOW + num_topk) + slot)[:, None] * BLOCK_H + head[None, :]
        ds = tl.load(ds_ptr + at, mask=inside[:, None], other=0.0)
        p = tl.load(p_ptr + at, mask=inside[:, None], other=0.0)
        tile = (token * num_heads + head)[:, None] * D + dim[None, :]
        q = tl.load(q_ptr + tile, mask=(head < num_heads)[:, None], other=0.0)
        grad_out = tl.load(grad_out_ptr + tile, mask=(head < num_heads)[:, None], other=0.0)
        acc = tl.dot(ds, q, acc)
        acc = tl.dot(p, grad_out, acc)
    tl.store(to, acc, mask=(row < num_rows)[:, None])


@triton.jit
def sum_partials(partial_ptr, order_ptr, offset_ptr, grad_ptr, D: tl.constexpr, ROWS: tl.constexpr):
    """Adds to grad fp32 [C, D] the partial rows of each entry, in the order given: deterministic. Grid: C."""
    entry = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, D)
    begin, end = tl.load(offset_ptr + entry), tl.load(offset_ptr + entry + 1)
    acc = tl.zeros([ROWS, D], tl.float32)
    for at in range(begin, end, ROWS):
        place = at + tl.arange(0, ROWS)
        source = tl.load(order_ptr + place, mask=place < end, other=0)
        acc += tl.load(partial_ptr + source[:, None] * D + dim[None, :], mask=(place < end)[:, None], other=0.0)
    to = grad_ptr + entry * D + dim
    tl.store(to, tl.load(to) + tl.sum(acc, axis=0))
