"""Engram row numbers in Triton: provider "triton" of engram.hash, equal to the definition in every integer."""

# Triton's language is not Python's: its types are beyond pyright.
# pyright: reportArgumentType=none, reportAttributeAccessIssue=none, reportOperatorIssue=none, reportIndexIssue=none
# pyright: reportAssignmentType=none, reportGeneralTypeIssues=none
# Kernel launches take options (num_warps, maxnreg) that pyright does not see in the kernel's signature.
# pyright: reportCallIssue=none

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_dsv41.ops.documents import Documents
from megatron_dsv41.ops.triton_checks import check_tensors

BLOCK_T = 64


@triton.jit
def hash_kernel(
    ids_ptr, map_ptr, position_ptr, alive_ptr, image_ptr, constants_ptr, rows_ptr, num_tokens, vocab, pad_id,
    BACK: tl.constexpr, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens). constants int64: BACK multipliers, the columns' primes, the columns' first rows."""
    COLUMNS: tl.constexpr = (BACK - 1) * HEADS
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.arange(0, BLOCK_H)
    inside = t < num_tokens
    position = tl.load(position_ptr + t, mask=inside, other=0)
    pad = tl.load(map_ptr + pad_id)
    token = tl.load(ids_ptr + t, mask=inside, other=0)
    barrier = (tl.load(alive_ptr + t, mask=inside, other=0) == 0) | (tl.load(image_ptr + t, mask=inside, other=0) != 0)
    stray = ((token < 0) | (token >= vocab)) & (barrier == 0)
    blocked = t < 0
    running = tl.zeros([BLOCK_T], dtype=tl.int64)
    for back in tl.static_range(BACK):
        source = tl.maximum(t - back, 0)
        token = tl.load(ids_ptr + source, mask=inside, other=0)
        dead = tl.load(alive_ptr + source, mask=inside, other=0) == 0
        image = tl.load(image_ptr + source, mask=inside, other=0) != 0
        blocked = blocked | (position < back) | dead | image
        known = (token >= 0) & (token < vocab)
        kind = tl.load(map_ptr + tl.where(known, token, pad_id), mask=inside, other=0)
        running = running ^ (tl.where(blocked, pad, kind) * tl.load(constants_ptr + back))
        if back > 0:
            column = (back - 1) * HEADS + head
            real = head < HEADS
            prime = tl.load(constants_ptr + BACK + column, mask=real, other=1)
            first = tl.load(constants_ptr + BACK + COLUMNS + column, mask=real, other=0)
            rows = running[:, None] % prime[None, :] + first[None, :]  # no product is negative, so no remainder is
            at = t[:, None].to(tl.int64) * COLUMNS + column[None, :]
            tl.store(rows_ptr + at, tl.where(stray[:, None], -1, rows), mask=inside[:, None] & real[None, :])


@functools.cache
def _constants(multipliers: tuple[int, ...], primes: tuple[int, ...], device: torch.device) -> Tensor:
    """On the device once: a copy from the host would hold up every step."""
    firsts = [sum(primes[:column]) for column in range(len(primes))]
    return torch.tensor([*multipliers, *primes, *firsts], dtype=torch.int64, device=device)


def hash_tokens(
    input_ids_T: Tensor,
    token_map: Tensor,
    pad_id: int,
    documents: Documents,
    multipliers: Sequence[int],
    primes: Sequence[int],
    heads: int,
) -> Tensor:
    """Semantics of `engram.ref.hash_tokens`."""
    ids, layout = input_ids_T.contiguous(), (documents.position_T, documents.alive_T, documents.image_T)
    check_tensors("engram.hash", ids, token_map, documents.position_T, dtypes=(torch.int64,))
    tokens, columns = ids.shape[0], len(primes)
    assert columns == heads * (len(multipliers) - 1), "one prime per column"
    rows = torch.empty(tokens, columns, dtype=torch.int64, device=ids.device)
    if tokens:
        hash_kernel[(triton.cdiv(tokens, BLOCK_T),)](
            ids, token_map, *(part.contiguous() for part in layout),
            _constants(tuple(multipliers), tuple(primes), ids.device), rows, tokens, len(token_map), pad_id,
            BACK=len(multipliers), HEADS=heads, BLOCK_H=triton.next_power_of_2(heads), BLOCK_T=BLOCK_T, num_warps=4,
        )  # fmt: skip
    return rows
