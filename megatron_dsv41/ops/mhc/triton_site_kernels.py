"""Triton kernels of the single-pass mHC site. Four streams; hidden size a multiple of the channel block C.

Forward and backward are tiled alike: a program owns C channels of all four streams and walks over its share of the
tokens, so that its slice of `fn` is read once and its slice of the gradient of `fn` stays in registers. What is summed
over channels (24 projections, the sum of squares, 24 coefficient gradients) leaves as one partial per channel block
and is summed in a fixed order by a small second kernel: results are the same on every run.
"""

# Triton's language is not Python's: its types are beyond pyright.
# pyright: reportArgumentType=none, reportAttributeAccessIssue=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAssignmentType=none, reportGeneralTypeIssues=none, reportReturnType=none

from __future__ import annotations

import triton
import triton.language as tl

from megatron_dsv41.ops.triton_checks import INTERPRETED

# A row of sums holds 24 projections, then the sum of squares, padded to what a tensor core tile takes.
WIDTH: tl.constexpr = tl.constexpr(32)
SQUARES: tl.constexpr = tl.constexpr(24)
SIMULATED: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def _split(x):
    """fp32 -> three bf16 whose sum is x: products with bf16 streams are then exact to fp32."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _once(x):
    """x, computed once: without this the compiler computes the new streams again in the tensor core's layout."""
    if SIMULATED or x.dtype == tl.float32:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def _beside(a, b, c, d):
    """Four streams [T, C] -> [T, 4 C], joined in registers: one product takes them all, and is waited for once."""
    four = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(tl.permute(four, (0, 2, 3, 1)), [a.shape[0], 4 * a.shape[1]])


@triton.jit
def _load_fn(fn_ptr, chunk, D: tl.constexpr, C: tl.constexpr):
    """fn of all streams for this program's channels, fp32 [4 C, WIDTH], columns past 24 zero."""
    row, k = tl.arange(0, 4 * C), tl.arange(0, WIDTH)
    at = k[None, :] * (4 * D) + ((row // C) * D + chunk * C + row % C)[:, None]
    return tl.load(fn_ptr + at, mask=(k < SQUARES)[None, :], other=0.0)


@triton.jit
def _load_stream(fn_ptr, cols, D: tl.constexpr, stream: tl.constexpr):
    """fn of one stream for this program's channels, fp32 [C, WIDTH], columns past 24 zero."""
    k = tl.arange(0, WIDTH)
    return tl.load(fn_ptr + k[None, :] * (4 * D) + stream * D + cols[:, None], mask=(k < SQUARES)[None, :], other=0.0)


@triton.jit
def _rows_of(table_ptr, rows, live, COUNT: tl.constexpr):
    """COUNT fp32 coefficients of every token, as columns [T, 1]."""
    columns = ()
    for k in tl.static_range(COUNT):
        columns = columns + (tl.load(table_ptr + rows * COUNT + k, mask=live, other=0.0)[:, None],)
    return columns


@triton.jit
def _updated(x, y, post, comb):
    """New streams X'_j = post_j y + sum_i comb[i, j] X_i, each rounded to the streams' dtype."""
    wide = y.to(tl.float32)
    new0, new1, new2, new3 = post[0] * wide, post[1] * wide, post[2] * wide, post[3] * wide
    for i in tl.static_range(4):  # source by source, so that one widened X_i is alive at a time
        wide = x[i].to(tl.float32)
        new0 += comb[4 * i] * wide
        new1 += comb[4 * i + 1] * wide
        new2 += comb[4 * i + 2] * wide
        new3 += comb[4 * i + 3] * wide
    dtype = x[0].dtype
    return _once(new0.to(dtype)), _once(new1.to(dtype)), _once(new2.to(dtype)), _once(new3.to(dtype))


@triton.jit
def site_forward(
    y_ptr, x_ptr, post_ptr, comb_ptr, pre_ptr, fn_ptr, new_ptr, input_ptr, sums_ptr, squares_ptr,
    num_tokens, block_tokens,
    D: tl.constexpr, UPDATE: tl.constexpr, PROJECT: tl.constexpr, COLLAPSE: tl.constexpr,
    BLOCK_T: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Streams in, new streams, site input and partial sums [D / C, T, 24] and [D / C, T] out.
    Grid (D / C, token blocks)."""
    chunk = tl.program_id(0)
    cols = chunk * C + tl.arange(0, C)
    wide = tl.arange(0, WIDTH)
    dtype = x_ptr.dtype.element_ty
    begin = tl.program_id(1) * block_tokens
    end = tl.minimum(begin + block_tokens, num_tokens)
    if PROJECT:
        fn = _load_fn(fn_ptr, chunk, D, C)
        if dtype != tl.float32:
            high, middle, low = _split(fn)
    for t in tl.range(begin, end, BLOCK_T, num_stages=STAGES):
        rows = t + tl.arange(0, BLOCK_T)
        live = rows < end
        tile = tl.arange(0, BLOCK_T)[:, None] * (4 * D) + cols[None, :]
        origin = tl.cast(t, tl.int64) * (4 * D)
        x = (tl.load(x_ptr + origin + tile, mask=live[:, None], other=0.0),
             tl.load(x_ptr + origin + D + tile, mask=live[:, None], other=0.0),
             tl.load(x_ptr + origin + 2 * D + tile, mask=live[:, None], other=0.0),
             tl.load(x_ptr + origin + 3 * D + tile, mask=live[:, None], other=0.0))  # fmt: skip
        narrow = tl.cast(t, tl.int64) * D + tl.arange(0, BLOCK_T)[:, None] * D + cols[None, :]
        news = x
        if UPDATE:
            y = tl.load(y_ptr + narrow, mask=live[:, None], other=0.0)
            post, comb = _rows_of(post_ptr, rows, live, 4), _rows_of(comb_ptr, rows, live, 16)
            news = _updated(x, y, post, comb)
        if COLLAPSE:
            pre = _rows_of(pre_ptr, rows, live, 4)
        squares = tl.zeros([BLOCK_T], dtype=tl.float32)
        site_input = tl.zeros([BLOCK_T, C], dtype=tl.float32)
        for j in tl.static_range(4):
            new = news[j]
            if UPDATE:
                tl.store(new_ptr + origin + j * D + tile, new, mask=live[:, None])
            if PROJECT:
                squares += tl.sum(new.to(tl.float32) * new.to(tl.float32), axis=1)
            if COLLAPSE:
                site_input += pre[j] * new.to(tl.float32)
        if COLLAPSE:
            tl.store(input_ptr + narrow, site_input.to(dtype), mask=live[:, None])
        if PROJECT:
            new = _beside(news[0], news[1], news[2], news[3])
            if dtype == tl.float32:
                u = tl.dot(new, fn, input_precision="ieee")
            else:
                u = tl.dot(new, low)
                u = tl.dot(new, middle, u)
                u = tl.dot(new, high, u)
            place = tl.cast(chunk, tl.int64) * num_tokens + rows
            tl.store(sums_ptr + place[:, None] * 24 + wide[None, :], u, mask=live[:, None] & (wide < 24)[None, :])
            tl.store(squares_ptr + place, squares, mask=live)


@triton.jit
def _sum_chunks(partial_ptr, rows, live, num_tokens, chunks, COLUMNS: tl.constexpr):
    """Partials [chunks, T, COLUMNS] -> [rows, WIDTH], zero past COLUMNS. Sixteen loads are in flight at a time."""
    wide = tl.arange(0, WIDTH)
    at = rows[:, None] * COLUMNS + wide[None, :]
    inside = live[:, None] & (wide < COLUMNS)[None, :]
    total = tl.zeros([rows.shape[0], WIDTH], dtype=tl.float32)
    for begin in range(0, chunks, 16):
        chunk = begin + tl.arange(0, 16)
        start = chunk.to(tl.int64) * num_tokens * COLUMNS
        mask = inside[None] & (chunk < chunks)[:, None, None]
        total += tl.sum(tl.load(partial_ptr + start[:, None, None] + at[None], mask=mask, other=0.0), axis=0)
    return total


@triton.jit
def _sinkhorn_start(logits, EPS: tl.constexpr):
    """Row softmax of [T, 4, 4]; the matrix after its first column step and that step's divisors."""
    weight = tl.exp(logits - tl.max(logits, axis=2)[:, :, None])
    soft = weight / tl.sum(weight, axis=2)[:, :, None]
    comb = soft + EPS
    columns = tl.sum(comb, axis=1) + EPS
    return soft, comb / columns[:, None, :], columns


@triton.jit
def _logits(sums_ptr, base_ptr, scale_ptr, rows, live, CHANNELS: tl.constexpr, RMS_EPS: tl.constexpr):
    """RMS factor [T] and projections u [T, 4], [T, 4], [T, 4, 4] of complete sums, before scale and base."""
    four = tl.arange(0, 4)
    at = sums_ptr + rows * WIDTH
    squares = tl.load(at + SQUARES, mask=live, other=1.0)
    rms = 1.0 / tl.sqrt(squares / CHANNELS + RMS_EPS)
    pre = tl.load(at[:, None] + four[None, :], mask=live[:, None], other=0.0) * rms[:, None]
    post = tl.load(at[:, None] + 4 + four[None, :], mask=live[:, None], other=0.0) * rms[:, None]
    cell = 4 * four[:, None] + four[None, :]
    comb = tl.load(at[:, None, None] + 8 + cell[None], mask=live[:, None, None], other=0.0) * rms[:, None, None]
    return rms, pre, post, comb


@triton.jit
def predict_forward(
    partial_ptr, squares_ptr, sums_ptr, base_ptr, scale_ptr, pre_ptr, post_ptr, comb_ptr, num_tokens, chunks,
    CHANNELS: tl.constexpr, ITERS: tl.constexpr, EPS: tl.constexpr, RMS_EPS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Sum the partial projections; RMS, scale, base, sigmoids and Sinkhorn. Writes sums [T, WIDTH] and coefficients."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = rows < num_tokens
    wide, four = tl.arange(0, WIDTH), tl.arange(0, 4)
    total = _sum_chunks(partial_ptr, rows, live, num_tokens, chunks, 24)
    squares = tl.zeros([BLOCK_T], dtype=tl.float32)
    for begin in range(0, chunks, 32):
        chunk = begin + tl.arange(0, 32)
        at = chunk.to(tl.int64)[:, None] * num_tokens + rows[None, :]
        mask = (chunk < chunks)[:, None] & live[None, :]
        squares += tl.sum(tl.load(squares_ptr + at, mask=mask, other=0.0), axis=0)
    total = tl.where((wide == SQUARES)[None, :], squares[:, None], total)
    tl.store(sums_ptr + rows[:, None] * WIDTH + wide[None, :], total, mask=live[:, None])
    tl.debug_barrier()  # the sums come back in another layout
    _, pre, post, comb = _logits(sums_ptr, base_ptr, scale_ptr, rows, live, CHANNELS, RMS_EPS)
    cell = 4 * four[:, None] + four[None, :]
    pre = tl.sigmoid(pre * tl.load(scale_ptr) + tl.load(base_ptr + four)[None, :]) + EPS
    post = 2.0 * tl.sigmoid(post * tl.load(scale_ptr + 1) + tl.load(base_ptr + 4 + four)[None, :])
    comb = comb * tl.load(scale_ptr + 2) + tl.load(base_ptr + 8 + cell)[None]
    _, comb, _ = _sinkhorn_start(comb, EPS)
    for _ in range(ITERS - 1):
        comb = comb / (tl.sum(comb, axis=2) + EPS)[:, :, None]
        comb = comb / (tl.sum(comb, axis=1) + EPS)[:, None, :]
    tl.store(pre_ptr + rows[:, None] * 4 + four[None, :], pre, mask=live[:, None])
    tl.store(post_ptr + rows[:, None] * 4 + four[None, :], post, mask=live[:, None])
    tl.store(comb_ptr + rows[:, None, None] * 16 + cell[None], comb, mask=live[:, None, None])


@triton.jit
def _sinkhorn_backward(logits, grad, ITERS: tl.constexpr, EPS: tl.constexpr):
    """Gradient of the logits [T, 4, 4]. Keeps every step's divisors and undoes the steps one by one."""
    soft, comb, columns = _sinkhorn_start(logits, EPS)
    divisors = (columns,)
    for _ in tl.static_range(ITERS - 1):
        sums = tl.sum(comb, axis=2) + EPS
        comb = comb / sums[:, :, None]
        columns = tl.sum(comb, axis=1) + EPS
        comb = comb / columns[:, None, :]
        divisors = divisors + (sums, columns)
    for back in tl.static_range(ITERS - 1):
        sums, columns = divisors[2 * (ITERS - 2 - back) + 1], divisors[2 * (ITERS - 2 - back) + 2]
        grad = (grad - tl.sum(grad * comb, axis=1)[:, None, :]) / columns[:, None, :]
        comb = comb * columns[:, None, :]
        grad = (grad - tl.sum(grad * comb, axis=2)[:, :, None]) / sums[:, :, None]
        comb = comb * sums[:, :, None]
    grad = (grad - tl.sum(grad * comb, axis=1)[:, None, :]) / divisors[0][:, None, :]
    return soft * (grad - tl.sum(grad * soft, axis=2)[:, :, None])


@triton.jit
def predict_backward(
    sums_ptr, base_ptr, scale_ptr, grad_pre_ptr, grad_post_ptr, grad_comb_ptr, weight_ptr, param_ptr,
    num_tokens,
    HAS_PRE: tl.constexpr, HAS_POST: tl.constexpr, HAS_COMB: tl.constexpr,
    CHANNELS: tl.constexpr, ITERS: tl.constexpr, EPS: tl.constexpr, RMS_EPS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Gradients of the coefficients -> weight [T, WIDTH]: what multiplies fn's rows, then (SQUARES) what multiplies X'.


    param [programs, 2, WIDTH]: this program's part of the gradients of base and, before summing groups, of scale.
    """
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = rows < num_tokens
    four = tl.arange(0, 4)
    cell = 4 * four[:, None] + four[None, :]
    rms, u_pre, u_post, u_comb = _logits(sums_ptr, base_ptr, scale_ptr, rows, live, CHANNELS, RMS_EPS)
    scale_pre, scale_post, scale_comb = tl.load(scale_ptr), tl.load(scale_ptr + 1), tl.load(scale_ptr + 2)
    flat, cube = rows[:, None] * 4 + four[None, :], rows[:, None, None] * 16 + cell[None]
    pre, post = tl.zeros_like(u_pre), tl.zeros_like(u_post)
    comb = tl.zeros_like(u_comb)
    if HAS_PRE:
        s = tl.sigmoid(u_pre * scale_pre + tl.load(base_ptr + four)[None, :])
        pre = tl.load(grad_pre_ptr + flat, mask=live[:, None], other=0.0) * s * (1.0 - s)
    if HAS_POST:
        s = tl.sigmoid(u_post * scale_post + tl.load(base_ptr + 4 + four)[None, :])
        post = 2.0 * tl.load(grad_post_ptr + flat, mask=live[:, None], other=0.0) * s * (1.0 - s)
    if HAS_COMB:
        logits = u_comb * scale_comb + tl.load(base_ptr + 8 + cell)[None]
        grad = tl.load(grad_comb_ptr + cube, mask=live[:, None, None], other=0.0)
        comb = _sinkhorn_backward(logits, grad, ITERS, EPS)
    part = param_ptr + tl.program_id(0) * 2 * WIDTH
    tl.store(part + four, tl.sum(pre, axis=0))
    tl.store(part + 4 + four, tl.sum(post, axis=0))
    tl.store(part + 8 + cell, tl.sum(comb, axis=0))
    tl.store(part + WIDTH + four, tl.sum(pre * u_pre, axis=0))
    tl.store(part + WIDTH + 4 + four, tl.sum(post * u_post, axis=0))
    tl.store(part + WIDTH + 8 + cell, tl.sum(comb * u_comb, axis=0))
    pre, post, comb = pre * scale_pre, post * scale_post, comb * scale_comb
    through_rms = tl.sum(pre * u_pre, axis=1) + tl.sum(post * u_post, axis=1)
    through_rms += tl.sum(tl.sum(comb * u_comb, axis=2), axis=1)
    own = tl.where((four == 0)[None, :], (-through_rms * rms * rms / CHANNELS)[:, None], 0.0)
    narrow, row = live[:, None], weight_ptr + rows[:, None] * WIDTH + four[None, :]
    tl.store(row, pre * rms[:, None], mask=narrow)
    tl.store(row + 4, post * rms[:, None], mask=narrow)
    at = weight_ptr + rows[:, None, None] * WIDTH + 8 + cell[None]
    tl.store(at, comb * rms[:, None, None], mask=live[:, None, None])
    tl.store(row + SQUARES, own, mask=narrow)
    tl.store(row + SQUARES + 4, tl.zeros_like(pre), mask=narrow)


@triton.jit
def _pairs(columns, HALF: tl.constexpr):
    joined = ()
    for k in tl.static_range(HALF):
        joined = joined + (tl.join(columns[k], columns[HALF + k]),)
    return joined


@triton.jit
def _table(columns):
    """32 columns [T] -> [T, 32]: joined in registers, so that one store writes them all."""
    columns = _pairs(_pairs(_pairs(_pairs(_pairs(columns, 16), 8), 4), 2), 1)
    return tl.reshape(columns[0], [columns[0].shape[0], 32])


@triton.jit
def site_backward(
    y_ptr, x_ptr, post_ptr, comb_ptr, pre_ptr, fn_ptr, weight_ptr, grad_new_ptr, grad_input_ptr,
    grad_y_ptr, grad_x_ptr, grad_fn_ptr, grad_mix_ptr, num_tokens, block_tokens,
    D: tl.constexpr, UPDATE: tl.constexpr, PROJECT: tl.constexpr, COLLAPSE: tl.constexpr, HAS_NEW: tl.constexpr,
    BLOCK_T: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Recomputes X', then gradients of y and the streams, and partial sums: of fn [blocks, 4 D, WIDTH], of the
    coefficients [D / C, T, 24 (pre, post, comb by destination)]. Grid (D / C, token blocks)."""
    chunk = tl.program_id(0)
    cols = chunk * C + tl.arange(0, C)
    wide = tl.arange(0, WIDTH)
    dtype = x_ptr.dtype.element_ty
    begin = tl.program_id(1) * block_tokens
    end = tl.minimum(begin + block_tokens, num_tokens)
    if PROJECT:
        fn = (_load_stream(fn_ptr, cols, D, 0), _load_stream(fn_ptr, cols, D, 1),
              _load_stream(fn_ptr, cols, D, 2), _load_stream(fn_ptr, cols, D, 3))  # fmt: skip
        if dtype != tl.float32:
            fn = (_split(fn[0]), _split(fn[1]), _split(fn[2]), _split(fn[3]))
    acc0 = tl.zeros([C, WIDTH], dtype=tl.float32)
    acc1 = tl.zeros([C, WIDTH], dtype=tl.float32)
    acc2 = tl.zeros([C, WIDTH], dtype=tl.float32)
    acc3 = tl.zeros([C, WIDTH], dtype=tl.float32)
    mix_ptr = grad_mix_ptr
    if UPDATE or COLLAPSE:
        mix_ptr += tl.cast(chunk, tl.int64) * 24 * num_tokens
    for t in tl.range(begin, end, BLOCK_T, num_stages=STAGES):
        rows = t + tl.arange(0, BLOCK_T)
        live = rows < end
        tile = tl.arange(0, BLOCK_T)[:, None] * (4 * D) + cols[None, :]
        origin = tl.cast(t, tl.int64) * (4 * D)
        narrow = tl.cast(t, tl.int64) * D + tl.arange(0, BLOCK_T)[:, None] * D + cols[None, :]
        x = (tl.load(x_ptr + origin + tile, mask=live[:, None], other=0.0),
             tl.load(x_ptr + origin + D + tile, mask=live[:, None], other=0.0),
             tl.load(x_ptr + origin + 2 * D + tile, mask=live[:, None], other=0.0),
             tl.load(x_ptr + origin + 3 * D + tile, mask=live[:, None], other=0.0))  # fmt: skip
        news = x
        if UPDATE:
            y = tl.load(y_ptr + narrow, mask=live[:, None], other=0.0)
            post, comb = _rows_of(post_ptr, rows, live, 4), _rows_of(comb_ptr, rows, live, 16)
            news = _updated(x, y, post, comb)
        if COLLAPSE:
            pre = _rows_of(pre_ptr, rows, live, 4)
            grad_input = tl.load(grad_input_ptr + narrow, mask=live[:, None], other=0.0)
        if PROJECT:
            weight = tl.load(weight_ptr + rows[:, None] * WIDTH + wide[None, :], mask=live[:, None], other=0.0)
            own = tl.load(weight_ptr + rows * WIDTH + SQUARES, mask=live, other=0.0)
            high, low, _ = _split(weight)
        grad_y = tl.zeros([BLOCK_T, C], dtype=tl.float32)
        dx0, dx1 = tl.zeros([BLOCK_T, C], dtype=tl.float32), tl.zeros([BLOCK_T, C], dtype=tl.float32)
        dx2, dx3 = tl.zeros([BLOCK_T, C], dtype=tl.float32), tl.zeros([BLOCK_T, C], dtype=tl.float32)
        zero = tl.zeros([BLOCK_T], dtype=tl.float32)
        of_pre, of_post, of_comb = (), (), ()
        for j in tl.static_range(4):
            new = news[j]
            if PROJECT:
                acc = acc0 if j == 0 else (acc1 if j == 1 else (acc2 if j == 2 else acc3))
                if dtype == tl.float32:
                    through_fn = tl.dot(fn[j], tl.trans(weight), input_precision="ieee")
                    acc = tl.dot(tl.trans(new), weight, acc, input_precision="ieee")
                else:
                    through_fn = tl.dot(fn[j][0], tl.trans(high))
                    through_fn = tl.dot(fn[j][0], tl.trans(low), through_fn)
                    through_fn = tl.dot(fn[j][1], tl.trans(high), through_fn)
                    acc = tl.dot(tl.trans(new), high, acc)
                    acc = tl.dot(tl.trans(new), low, acc)
                if j == 0:
                    acc0 = acc
                elif j == 1:
                    acc1 = acc
                elif j == 2:
                    acc2 = acc
                else:
                    acc3 = acc
            # Loaded after the products in program order: the compiler then keeps the load's layout for what follows.
            grad = tl.zeros([BLOCK_T, C], dtype=tl.float32)
            if HAS_NEW:
                grad = tl.load(grad_new_ptr + origin + j * D + tile, mask=live[:, None], other=0.0).to(tl.float32)
            if COLLAPSE:
                of_input = grad_input.to(tl.float32)
                of_pre = of_pre + (tl.sum(of_input * new.to(tl.float32), axis=1),)
                grad += pre[j] * of_input
            if PROJECT:
                grad += own[:, None] * new.to(tl.float32) + tl.trans(through_fn)
            if UPDATE:
                of_post = of_post + (tl.sum(grad * y.to(tl.float32), axis=1),)
                for i in tl.static_range(4):
                    of_comb = of_comb + (tl.sum(grad * x[i].to(tl.float32), axis=1),)
                grad_y += post[j] * grad
                dx0 += comb[j] * grad
                dx1 += comb[4 + j] * grad
                dx2 += comb[8 + j] * grad
                dx3 += comb[12 + j] * grad
            else:
                tl.store(grad_x_ptr + origin + j * D + tile, grad.to(dtype), mask=live[:, None])
        if UPDATE:
            tl.store(grad_y_ptr + narrow, grad_y.to(dtype), mask=live[:, None])
            tl.store(grad_x_ptr + origin + tile, dx0.to(dtype), mask=live[:, None])
            tl.store(grad_x_ptr + origin + D + tile, dx1.to(dtype), mask=live[:, None])
            tl.store(grad_x_ptr + origin + 2 * D + tile, dx2.to(dtype), mask=live[:, None])
            tl.store(grad_x_ptr + origin + 3 * D + tile, dx3.to(dtype), mask=live[:, None])
        if UPDATE or COLLAPSE:
            none = (zero, zero, zero, zero)
            if not COLLAPSE:
                of_pre = none
            if not UPDATE:
                of_post, of_comb = none, none + none + none + none
            by_source = ()
            for k in tl.static_range(16):
                by_source = by_source + (of_comb[4 * (k % 4) + k // 4],)
            table = _table(of_pre + of_post + by_source + none + none)
            out = mix_ptr + rows[:, None] * 24 + wide[None, :]
            tl.store(out, table, mask=live[:, None] & (wide < 24)[None, :])
    if PROJECT:
        at = grad_fn_ptr + (tl.program_id(1) * 4 * D + cols)[:, None] * WIDTH + wide[None, :]
        tl.store(at, acc0)
        tl.store(at + D * WIDTH, acc1)
        tl.store(at + 2 * D * WIDTH, acc2)
        tl.store(at + 3 * D * WIDTH, acc3)


@triton.jit
def sum_mix_gradients(
    partial_ptr, grad_pre_ptr, grad_post_ptr, grad_comb_ptr, num_tokens, chunks,
    UPDATE: tl.constexpr, COLLAPSE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Partials [chunks, T, 24] -> gradients of pre [T, 4], post [T, 4], comb [T, source, destination]."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = rows < num_tokens
    total = _sum_chunks(partial_ptr, rows, live, num_tokens, chunks, 24)
    live, column = live[:, None], tl.arange(0, WIDTH)[None, :]
    if COLLAPSE:
        tl.store(grad_pre_ptr + rows[:, None] * 4 + column, total, mask=live & (column < 4))
    if UPDATE:
        tl.store(grad_post_ptr + rows[:, None] * 4 + column - 4, total, mask=live & (column >= 4) & (column < 8))
        tl.store(grad_comb_ptr + rows[:, None] * 16 + column - 8, total, mask=live & (column >= 8) & (column < 24))


@triton.jit
def sum_fn_gradients(
    partial_ptr, param_ptr, grad_fn_ptr, grad_base_ptr, grad_scale_ptr, blocks, programs,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Partials [blocks, CHANNELS, WIDTH] -> gradient of fn [24, CHANNELS]; the last three sum base and scale."""
    wide = tl.arange(0, WIDTH)
    group = tl.num_programs(0) - 1 - tl.program_id(0)
    if group < 3:  # pre, post, comb
        column = tl.arange(0, 16)
        known = column < tl.where(group == 2, 16, 4)
        base = tl.zeros([16], dtype=tl.float32)
        scale = tl.zeros([16], dtype=tl.float32)
        for begin in range(0, programs, 128):
            program = begin + tl.arange(0, 128)
            part = param_ptr + program[:, None] * 2 * WIDTH + (4 * group + column)[None, :]
            valid = (program < programs)[:, None] & known[None, :]
            base += tl.sum(tl.load(part, mask=valid, other=0.0), axis=0)
            scale += tl.sum(tl.load(part + WIDTH, mask=valid, other=0.0), axis=0)
        tl.store(grad_base_ptr + 4 * group + column, base, mask=known)
        tl.store(grad_scale_ptr + group, tl.sum(scale))
    else:
        cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
        inside = cols < CHANNELS
        total = tl.zeros([BLOCK_C, WIDTH], dtype=tl.float32)
        for block in range(blocks):
            at = (block * CHANNELS + cols)[:, None] * WIDTH + wide[None, :]
            total += tl.load(partial_ptr + at, mask=inside[:, None], other=0.0)
        out = grad_fn_ptr + wide[None, :] * CHANNELS + cols[:, None]
        tl.store(out, total, mask=inside[:, None] & (wide < SQUARES)[None, :])
