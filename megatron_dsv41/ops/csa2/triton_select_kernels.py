"""Triton kernels of the indexer: tiled scores, block maxima, exact top-k. `triton_select` launches them.

Scores are kept as int16 sort keys: the bits of the bf16 score, ordered like the score. NOTHING, below every score,
marks what may not be selected.
"""

# Triton's language is not Python's: its types are beyond pyright.
# pyright: reportArgumentType=none, reportAttributeAccessIssue=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAssignmentType=none, reportGeneralTypeIssues=none

import triton
import triton.language as tl

NOTHING = tl.constexpr(-32768)
ALWAYS = tl.constexpr(32767)


@triton.jit
def add_weighted_relu(sums, dots, weight, PACKED: tl.constexpr):
    """sums + bf16(weight * relu(bf16(dots))), the release's roundings. PACKED: two at a time, 3 instructions each."""
    if PACKED:
        # fma with -0.0 is the product rounded once, also where the GPU has no bf16x2 multiply (SM80).
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, zero;
            .reg .f32 low, high;
            mov.b32 zero, 0x80008000;
            cvt.rn.relu.bf16x2.f32 t, $5, $4;
            fma.rn.bf16x2 t, t, $6, zero;
            shl.b32 low, t, 16;
            and.b32 high, t, 0xffff0000;
            add.f32 $0, $2, low;
            add.f32 $1, $3, high;
            }""",
            "=f,=f,f,f,f,f,r",
            [sums, dots, weight],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    rounded = tl.maximum(dots, 0.0).to(tl.bfloat16).to(tl.float32)
    return sums + (rounded * weight.to(tl.float32)).to(tl.bfloat16).to(tl.float32)


@triton.jit
def score_tile(
    q_ptr, weight_ptr, keys_ptr, token, alive, entry, num_entries,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Sort keys of one tile, int16 [BLOCK_T, BLOCK_C]."""
    dim = tl.arange(0, D)
    keys = tl.load(keys_ptr + entry.to(tl.int64)[:, None] * D + dim[None, :], mask=(entry < num_entries)[:, None],
                   other=0.0)  # fmt: skip
    keys = tl.trans(keys)
    sums = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for head in range(HEADS):
        q = tl.load(q_ptr + (token * HEADS + head)[:, None] * D + dim[None, :], mask=alive[:, None], other=0.0)
        weight = tl.load(weight_ptr + token * HEADS + head, mask=alive, other=0.0)
        weight = tl.broadcast_to(weight[:, None], [BLOCK_T, BLOCK_C])
        sums = add_weighted_relu(sums, tl.dot(q, keys), weight, PACKED)
    bits = sums.to(tl.bfloat16).to(tl.int16, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFF, bits)


@triton.jit
def score_entries(
    q_ptr, weight_ptr, keys_ptr, first_ptr, visible_ptr, wanted_ptr, score_ptr,
    begin_token, num_rows, num_entries, num_blocks,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Sort keys int16 [rows, C] of the tokens from begin_token on. Grid: entry tiles x token tiles.

    Tiles that no token sees stay unwritten. BLOCK_SIZE > 0: wanted uint8 [rows, num_blocks] says which document-local
    blocks are candidates; the others become NOTHING, and tiles without a candidate are not computed.
    """
    local = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    entry = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    alive = local < num_rows
    token = begin_token + local.to(tl.int64)
    first = tl.load(first_ptr + token, mask=alive, other=0)
    count = tl.load(visible_ptr + token, mask=alive, other=0)
    lowest = tl.min(tl.where(count > 0, first, num_entries), axis=0)
    highest = tl.max(tl.where(count > 0, first + count, 0), axis=0)
    if (tl.program_id(0) * BLOCK_C < highest) & ((tl.program_id(0) + 1) * BLOCK_C > lowest):
        to = score_ptr + local.to(tl.int64)[:, None] * num_entries + entry[None, :]
        inside = alive[:, None] & (entry < num_entries)[None, :]
        if BLOCK_SIZE > 0:
            place = entry.to(tl.int64)[None, :] - first[:, None]
            seen = inside & (place >= 0) & (place < count[:, None])
            at = wanted_ptr + local.to(tl.int64)[:, None] * num_blocks + place // BLOCK_SIZE
            wanted = tl.load(at, mask=seen, other=0)
            if tl.max(tl.max(wanted.to(tl.int32), axis=1), axis=0) > 0:
                score = score_tile(
                    q_ptr, weight_ptr, keys_ptr, token, alive, entry, num_entries, HEADS, D, BLOCK_T, BLOCK_C, PACKED
                )
                tl.store(to, tl.where(wanted > 0, score, NOTHING), mask=inside)
            else:
                tl.store(to, tl.full([BLOCK_T, BLOCK_C], NOTHING, tl.int16), mask=inside)
        else:
            score = score_tile(
                q_ptr, weight_ptr, keys_ptr, token, alive, entry, num_entries, HEADS, D, BLOCK_T, BLOCK_C, PACKED
            )
            tl.store(to, score, mask=inside)


@triton.jit
def mark_candidates(candidate_ptr, wanted_ptr, begin_token, num_candidates, num_blocks, BLOCK: tl.constexpr):
    """Sets wanted uint8 [rows, num_blocks] (zeros) at each token's candidate blocks. Grid: rows."""
    local = tl.program_id(0).to(tl.int64)
    for begin in range(0, num_candidates, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        at = candidate_ptr + (begin_token + local) * num_candidates + place
        block = tl.load(at, mask=place < num_candidates, other=-1)
        tl.store(wanted_ptr + local * num_blocks + block, tl.full([BLOCK], 1, tl.uint8), mask=block >= 0)


@triton.jit
def block_maxima(
    score_ptr, first_ptr, visible_ptr, maximum_ptr, begin_token, num_entries, num_blocks,
    BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Best visible sort key of each document-local block, int16 [rows, num_blocks]; the newest block is ALWAYS.

    Grid: rows. Blocks behind the newest stay unwritten.
    """
    local = tl.program_id(0).to(tl.int64)
    first = tl.load(first_ptr + begin_token + local)
    count = tl.load(visible_ptr + begin_token + local)
    used = (count + BLOCK_SIZE - 1) // BLOCK_SIZE
    for begin in range(0, used, BLOCKS):
        block = begin + tl.arange(0, BLOCKS)
        place = block[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
        at = score_ptr + local * num_entries + first + place
        best = tl.max(tl.load(at, mask=place < count, other=NOTHING).to(tl.int32), axis=1)
        best = tl.where(block == used - 1, ALWAYS, best)
        tl.store(maximum_ptr + local * num_blocks + block, best.to(tl.int16), mask=block < used)


@triton.jit
def largest_k(
    score_ptr, first_ptr, visible_ptr, out_ptr, begin_token, stride, k,
    PER_BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The k largest of each row, ascending, -1 behind them; equal keys: the smaller index. Grid: rows.

    PER_BLOCK 0: a row's candidates are its visible entries and the results flat entry ids. Otherwise they are the
    blocks of PER_BLOCK entries, and the results document-local block ids.
    """
    local = tl.program_id(0).to(tl.int64)
    first = tl.load(first_ptr + begin_token + local)
    count = tl.load(visible_ptr + begin_token + local)
    row = score_ptr + local * stride
    if PER_BLOCK > 0:
        count = (count + PER_BLOCK - 1) // PER_BLOCK
        first = first * 0
    row += first
    # The threshold is the largest key that at least k reach: two of its 16 bits per pass over the row.
    threshold = local.to(tl.int32) * 0
    if count > k:
        for digit in range(8):
            step = 1 << (14 - 2 * digit)
            one, two, three = threshold + step, threshold + 2 * step, threshold + 3 * step
            above_one = tl.zeros([TILE], tl.int32)
            above_two = tl.zeros([TILE], tl.int32)
            above_three = tl.zeros([TILE], tl.int32)
            for begin in range(0, count, TILE):
                place = begin + tl.arange(0, TILE)
                key = tl.load(row + place, mask=place < count, other=NOTHING).to(tl.int32) + 32768
                above_one += (key >= one).to(tl.int32)
                above_two += (key >= two).to(tl.int32)
                above_three += (key >= three).to(tl.int32)
            reached = (tl.sum(above_one, axis=0) >= k).to(tl.int32)
            reached += (tl.sum(above_two, axis=0) >= k).to(tl.int32)
            reached += (tl.sum(above_three, axis=0) >= k).to(tl.int32)
            threshold += reached * step
    # Key 0 is NOTHING and is never taken, so a row with fewer than k selectable ones takes them all.
    threshold = tl.maximum(threshold, 1)
    larger = tl.zeros([TILE], tl.int32)
    for begin in range(0, count, TILE):
        place = begin + tl.arange(0, TILE)
        key = tl.load(row + place, mask=place < count, other=NOTHING).to(tl.int32) + 32768
        larger += (key > threshold).to(tl.int32)
    equals_wanted = k - tl.sum(larger, axis=0)
    equals_seen = threshold * 0
    taken = threshold * 0
    for begin in range(0, count, TILE):
        place = begin + tl.arange(0, TILE)
        key = tl.load(row + place, mask=place < count, other=NOTHING).to(tl.int32) + 32768
        equal = (key == threshold).to(tl.int32)
        take = (key > threshold) | ((equal > 0) & (equals_seen + tl.cumsum(equal, axis=0) <= equals_wanted))
        at = taken + tl.cumsum(take.to(tl.int32), axis=0) - 1
        tl.store(out_ptr + (begin_token + local) * k + at, (first + place).to(tl.int32), mask=take)
        equals_seen += tl.sum(equal, axis=0)
        taken += tl.sum(take.to(tl.int32), axis=0)
    for begin in range(0, k, TILE):
        place = begin + tl.arange(0, TILE)
        behind = tl.full([TILE], -1, tl.int32)
        tl.store(out_ptr + (begin_token + local) * k + place, behind, mask=(place >= taken) & (place < k))
