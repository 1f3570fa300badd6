"""Where tokens and compressed entries stand in their documents.

Ops work on flat tokens: a micro-batch of `b` rows of `s` tokens is T = b*s tokens, batch-major (row 0 first).
Rows and packed documents are the same thing here: intervals of the flat axis that never see each other.
Padding is a document of its own whose tokens are not alive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Entries:
    """The compressed entries of one ratio. C = T // ratio slots, the unused ones last and `valid_C` false.

    Entry j of a document pools its tokens [j*ratio, (j+1)*ratio); trailing tokens make no entry (SPEC 8.4).
    Entries of one document are contiguous. What token t sees is [first_T[t], first_T[t] + num_visible_T[t]).
    """

    ratio: int
    token_C: Tensor  # int64 flat index of the entry's first token
    position_C: Tensor  # int64 document-local position of that token: the entry's rotary position
    valid_C: Tensor  # bool
    first_T: Tensor  # int64 first entry of the token's document
    num_visible_T: Tensor  # int64 floor((position + 1) / ratio)


@dataclasses.dataclass(frozen=True)
class Groups:
    """The token groups that one process compresses, and where their entries go.

    token_C, position_C: int64, first token of each group, as a row of the compressor's input, and its position.
    slot_C: None where this process compresses every entry; else int64 [C], each entry's row in the concatenation of
    all sequence shards' latents.
    """

    ratio: int
    token_C: Tensor
    position_C: Tensor
    slot_C: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Documents:
    """Document layout of T flat tokens."""

    start_T: Tensor  # int64 flat index of the first token of the token's document
    position_T: Tensor  # int64 document-local position
    alive_T: Tensor  # bool; False: padding
    image_T: Tensor  # bool; True for every token of an image span

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.start_T.shape[0]

    def rows(self, begin: int, end: int) -> Documents:
        """The layout of tokens [begin, end); `start_T` keeps counting from the whole micro-batch's first token."""
        return Documents(*(getattr(self, f.name)[begin:end] for f in dataclasses.fields(self)))

    def window_start(self, window: int) -> Tensor:
        """Flat index of the oldest window key of every token, int64 [T]: `window` keys with the token itself."""
        here = torch.arange(self.num_tokens, device=self.start_T.device)
        return torch.maximum(self.start_T, here - (window - 1))

    def entries(self, ratio: int) -> Entries:
        """Entries of `ratio` over these documents."""
        num_tokens, device = self.num_tokens, self.start_T.device
        completes_T = (self.position_T + 1) % ratio == 0  # the last token of a group
        num_before_T = completes_T.long().cumsum(0) - completes_T.long()
        capacity = num_tokens // ratio
        token_C = torch.zeros(capacity, dtype=torch.int64, device=device)
        valid_C = torch.zeros(capacity, dtype=torch.bool, device=device)
        # Fixed shapes, no host sync: each token writes its entry's slot or the spill slot past the end.
        slot_T = torch.where(completes_T, num_before_T, capacity)
        here = torch.arange(num_tokens, device=device)
        token_C = torch.cat([token_C, token_C.new_zeros(1)]).scatter(0, slot_T, here - (ratio - 1))[:capacity]
        valid_C = torch.cat([valid_C, valid_C.new_zeros(1)]).scatter(0, slot_T, completes_T)[:capacity]
        return Entries(
            ratio=ratio,
            token_C=token_C,
            position_C=self.position_T[token_C] if num_tokens else token_C,
            valid_C=valid_C,
            first_T=num_before_T[self.start_T],
            num_visible_T=(self.position_T + 1) // ratio,
        )


def join_documents(parts: Sequence[Documents]) -> Documents:
    """The layouts of several micro-batches as one over their concatenated tokens. No document spans two of them."""
    begin, starts = 0, []
    for part in parts:
        starts.append(part.start_T + begin)
        begin += part.num_tokens
    rest = [torch.cat([getattr(part, name) for part in parts]) for name in ("position_T", "alive_T", "image_T")]
    return Documents(torch.cat(starts), *rest)


def whole_groups(entries: Entries) -> Groups:
    """Groups of a process that holds every token."""
    return Groups(entries.ratio, entries.token_C, entries.position_C)


def shard_groups(entries: Entries, num_tokens: int, shards: int, shard: int) -> Groups:
    """Groups that end inside contiguous shard `shard` of `shards` equal shards of one row of `num_tokens` tokens.

    The compressor's input is the shard's tokens after a halo of ratio-1 tokens of the left neighbour, so groups may
    straddle shards. Every shard compresses the same number of rows; unused ones repeat a valid group.
    """
    size, ratio = num_tokens // shards, entries.ratio
    capacity = -(-size // ratio)
    owner_C = (entries.token_C + ratio - 1) // size
    owner_C = torch.where(entries.valid_C, owner_C, shards)
    counts = torch.zeros(shards + 1, dtype=torch.int64, device=owner_C.device).scatter_add(
        0, owner_C, torch.ones_like(owner_C)
    )
    first = counts.cumsum(0) - counts
    number_C = torch.arange(owner_C.shape[0], device=owner_C.device) - first[owner_C]
    slot_C = torch.where(entries.valid_C, owner_C * capacity + number_C, 0)
    mine = first[shard] + torch.arange(capacity, device=owner_C.device)
    mine = mine.clamp_max(max(owner_C.shape[0] - 1, 0))
    begin = shard * size - (ratio - 1)
    token_c = (entries.token_C[mine] - begin).clamp(0, max(size - 1, 0))
    return Groups(ratio, token_c, entries.position_C[mine], slot_C)


def documents_from_ids(document_ids_BS: Tensor, alive_BS: Tensor, image_BS: Tensor) -> Documents:
    """Layout of b rows of s tokens. A document is a run of equal `document_ids_BS` (any integers) within one row.

    All arguments [b, s]; alive and image are bool. Dead tokens always stand apart from living ones.
    """
    rows, seq = document_ids_BS.shape
    key = document_ids_BS.long() * 2 + alive_BS.long()
    begins_BS = torch.ones_like(alive_BS)
    begins_BS[:, 1:] = key[:, 1:] != key[:, :-1]
    here_T = torch.arange(rows * seq, device=key.device)
    start_T = torch.where(begins_BS.reshape(-1), here_T, 0).cummax(0).values
    return Documents(start_T, here_T - start_T, alive_BS.reshape(-1), image_BS.reshape(-1))


def documents_from_lengths(lengths: list[list[int]], seq: int, device: torch.device | None = None) -> Documents:
    """Layout from document lengths per row. What a row's lengths leave of `seq` is padding."""
    rows = len(lengths)
    ids = torch.full((rows, seq), -1, dtype=torch.int64, device=device)
    for row, row_lengths in enumerate(lengths):
        if sum(row_lengths) > seq:
            raise ValueError(f"row {row}: document lengths {row_lengths} exceed the sequence length {seq}")
        begin = 0
        for number, length in enumerate(row_lengths):
            ids[row, begin : begin + length] = number
            begin += length
    return documents_from_ids(ids, ids >= 0, torch.zeros_like(ids, dtype=torch.bool))
