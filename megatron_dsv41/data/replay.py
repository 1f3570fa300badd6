"""Where decoder replays begin, drawn per document (SPEC 16)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_dsv41.ops.documents import Documents

_PRIMES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)  # odd 32-bit mixers
_MASK = 0xFFFFFFFF


class Replay(NamedTuple):
    """start_T int64 [T]: flat index of each token's boundary, its document's start where nothing is replayed.

    weight_BS: loss weights with those before a boundary set to 0.
    """

    start_T: Tensor
    weight_BS: Tensor


def draw_replay(
    documents: Documents, weight_BS: Tensor, samples_B: Tensor, *, probability: float, window: int, seed: int
) -> Replay:
    """Give each document a replay with `probability`, its boundary anywhere such that a window and a token follow.

    Of a document of n tokens the prompt ends at p, drawn evenly from window .. n-1, and the replay begins at
    p - window. Shorter documents are never replayed. What is drawn follows from (seed, the sample's number in
    `samples_B` int64 [b], the document's place in the sample): a resumed run draws the same. No host sync.
    """
    rows, seq = weight_BS.shape
    start_T = documents.start_T
    length_T = torch.zeros_like(start_T).scatter_add(0, start_T, torch.ones_like(start_T))[start_T]
    key_T = samples_B.repeat_interleave(seq) * seq + start_T % seq
    prompts_T = (length_T - window).clamp_min(0)  # how many prompt ends there are to choose from
    chosen_T = (_uniform(key_T, 2 * seed) < probability) & (prompts_T > 0) & documents.alive_T
    offset_T = (_uniform(key_T, 2 * seed + 1) * prompts_T).long()
    start_T = start_T + torch.where(chosen_T, offset_T, 0)
    here_T = torch.arange(rows * seq, device=start_T.device)
    return Replay(start_T, weight_BS * (here_T >= start_T).view(rows, seq))


def _uniform(key: Tensor, salt: int) -> Tensor:
    """A number in [0, 1) per key, float64: the same on every device."""
    x = (key + salt * _PRIMES[0] + 1) & _MASK
    for prime in _PRIMES:  # products stay below 2^63: both factors have 31 bits or fewer
        x = ((x >> 1) * (prime >> 1)) & _MASK
        x = x ^ (x >> 15)
    return x.double() / (_MASK + 1)
