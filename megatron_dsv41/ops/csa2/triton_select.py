"""The indexer's selection in Triton: provider "triton" of csa2.select.

Scores exist for a few rows at a time, as 16-bit sort keys; the top-k is an exact threshold search over them, in CUDA
C++ up to FILTERED_TOPK and in Triton beyond.
"""

# Kernel launches take options (num_warps, num_stages) that pyright does not see in the kernel's signature.
# pyright: reportCallIssue=none

from __future__ import annotations

from pathlib import Path

import torch
import triton
from torch import Tensor

from megatron_dsv41.ops.csa2 import triton_select_kernels as kernels
from megatron_dsv41.ops.csa2.checks import check_select
from megatron_dsv41.ops.cuda_kernels import launch
from megatron_dsv41.ops.documents import Entries

LARGEST = Path(__file__).with_name("largest.cu")
SCORES_AT_ONCE = 1 << 26  # sort keys that exist at once: 128 MiB
BLOCK_T, BLOCK_C = 64, 128
FILTERED_TOPK = 1024  # up to here the CUDA top-k is used


def score_rows(
    q_TID: Tensor, weights_TI: Tensor, keys_CD: Tensor, entries: Entries, tokens: range, wanted: Tensor | None,
    block_size: int,
) -> Tensor:  # fmt: skip
    """Sort keys int16 [tokens, C]; `wanted` uint8 [tokens, blocks] restricts them. Unseen tiles are unwritten."""
    num_entries, heads, dim = keys_CD.shape[0], *q_TID.shape[1:]
    scores = key_rows(len(tokens), num_entries, q_TID.device)
    grid = (triton.cdiv(num_entries, BLOCK_C), triton.cdiv(len(tokens), BLOCK_T))
    kernels.score_entries[grid](
        q_TID, weights_TI, keys_CD, entries.first_T, entries.num_visible_T, scores if wanted is None else wanted,
        scores, tokens.start, len(tokens), num_entries, 0 if wanted is None else wanted.shape[1], HEADS=heads, D=dim,
        BLOCK_T=BLOCK_T, BLOCK_C=BLOCK_C, BLOCK_SIZE=0 if wanted is None else block_size, PACKED=q_TID.is_cuda,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return scores


def largest(scores: Tensor, entries: Entries, out: Tensor, tokens: range, per_block: int) -> None:
    """Writes the rows `tokens` of out int32 [T, k]: the k largest visible entries, or blocks of `per_block` entries.

    The CUDA kernel reads a row twice instead of nine times; its filter needs k well below its 2048 groups.
    """
    arguments = (scores, entries.first_T, entries.num_visible_T, out, tokens.start, scores.shape[1], out.shape[1])
    if scores.is_cuda and out.shape[1] <= FILTERED_TOPK:
        launch(LARGEST, "largest", len(tokens), 256, *arguments, per_block)
    else:
        kernels.largest_k[(len(tokens),)](*arguments, PER_BLOCK=per_block, TILE=1024, num_warps=4)


def key_rows(rows: int, width: int, device: torch.device) -> Tensor:
    """Room for sort keys int16 [rows, width], readable a 16-byte word beyond the end."""
    return torch.empty(rows * width + 8, dtype=torch.int16, device=device)[: rows * width].view(rows, width)


def wanted_blocks(candidates_TB: Tensor, tokens: range, num_blocks: int) -> Tensor:
    """uint8 [tokens, num_blocks]: 1 at each token's candidate blocks."""
    wanted = torch.zeros(len(tokens), num_blocks, dtype=torch.uint8, device=candidates_TB.device)
    kernels.mark_candidates[(len(tokens),)](
        candidates_TB, wanted, tokens.start, candidates_TB.shape[1], num_blocks, BLOCK=1024, num_warps=4
    )
    return wanted


def pool_rows(scores: Tensor, entries: Entries, pool: Tensor, tokens: range, block_size: int) -> None:
    """Writes the rows `tokens` of the candidate pool int32 [T, blocks kept]."""
    num_blocks = triton.cdiv(scores.shape[1], block_size)
    maxima = key_rows(len(tokens), num_blocks, scores.device)
    kernels.block_maxima[(len(tokens),)](
        scores, entries.first_T, entries.num_visible_T, maxima, tokens.start, scores.shape[1], num_blocks,
        BLOCK_SIZE=block_size, BLOCKS=512, num_warps=4,
    )  # fmt: skip
    largest(maxima, entries, pool, tokens, block_size)


def select(
    q_TID: Tensor,
    weights_TI: Tensor,
    keys_CD: Tensor,
    entries: Entries,
    topk: int,
    candidates_TB: Tensor | None = None,
    block_size: int = 0,
    num_blocks: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """`ref.select` on a CUDA device: bf16 in, the release's roundings, exact top-k (SPEC 8.5, 8.6).

    block_size must be a power of two. Memory beside the results: two bytes per score of SCORES_AT_ONCE scores, and
    an eighth of that for the blocks. ValueError: dtypes, devices or sizes that the kernels do not take.
    """
    check_select(q_TID, weights_TI, keys_CD)
    if (num_blocks or candidates_TB is not None) and (block_size < 1 or block_size & (block_size - 1)):
        raise ValueError(f"csa2.select: provider 'triton' takes block sizes that are powers of two, got {block_size}")
    num_tokens, num_entries = q_TID.shape[0], keys_CD.shape[0]
    q_TID, weights_TI, keys_CD = (x.detach().contiguous() for x in (q_TID, weights_TI, keys_CD))
    chosen = q_TID.new_empty(num_tokens, min(topk, num_entries), dtype=torch.int32)
    blocks = triton.cdiv(num_entries, block_size) if block_size else 0
    pool = q_TID.new_empty(num_tokens, min(num_blocks, blocks), dtype=torch.int32) if num_blocks else None
    at_once = max(BLOCK_T, SCORES_AT_ONCE // max(num_entries, 1) // BLOCK_T * BLOCK_T)
    for begin in range(0, num_tokens if num_entries else 0, at_once):
        tokens = range(begin, min(begin + at_once, num_tokens))
        wanted = None if candidates_TB is None else wanted_blocks(candidates_TB, tokens, blocks)
        scores = score_rows(q_TID, weights_TI, keys_CD, entries, tokens, wanted, block_size)
        largest(scores, entries, chosen, tokens, 0)
        if pool is not None:
            pool_rows(scores, entries, pool, tokens, block_size)
    return chosen, pool
