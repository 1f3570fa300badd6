"""From token ids of samples to document layout, labels and loss weights.

A sample is a slice of s tokens out of documents laid end to end, each ended by one end-of-document token. The
token that ends a document belongs to it; the next token opens another one. What a sample cut off at its start
is one more document that begins at position 0. Documents of a sample never see each other: not through
attention, groups, n-grams or positions (all of which follow from `Documents`), and not through the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_dsv41.ops.documents import Documents, documents_from_ids


class Packed(NamedTuple):
    """What a training step needs besides `input_ids_BS`."""

    documents: Documents  # of the b*s flat tokens, row 0 first
    labels_BS: Tensor  # int64; the next token of the same document, 0 where there is none
    weight_BS: Tensor  # fp32; 1 where the label counts, else 0


def document_ids(input_ids_BS: Tensor, eod_id: int) -> Tensor:
    """Number of the document each token lies in, counted from 0 in every row, int64 [b, s]."""
    ends_BS = (input_ids_BS == eod_id).long()
    return ends_BS.cumsum(1) - ends_BS


def pack(
    input_ids_BS: Tensor,
    labels_BS: Tensor,
    *,
    eod_id: int,
    image_token_id: int,
    loss_mask_BS: Tensor | None = None,
) -> Packed:
    """Layout, labels and weights of samples as Megatron's GPTDataset gives them. No host sync.

    input_ids_BS, labels_BS int64 [b, s]: labels are the inputs one token later, so the last column looks one
    token past the sample. Predicting an end of document is trained; predicting what follows it, the first
    token of a stranger, is not. loss_mask_BS [b, s] is GPTDataset's: 0 where the label is padding.
    """
    alive_BS = torch.ones_like(input_ids_BS, dtype=torch.bool)
    counts_BS = input_ids_BS != eod_id
    if loss_mask_BS is not None:
        counts_BS = counts_BS & (loss_mask_BS > 0)
        alive_BS = _alive(input_ids_BS, loss_mask_BS)
    image_BS = input_ids_BS == image_token_id
    documents = documents_from_ids(document_ids(input_ids_BS, eod_id), alive_BS, image_BS)
    counts_BS = counts_BS & alive_BS
    return Packed(documents, torch.where(counts_BS, labels_BS, 0), counts_BS.float())


def pack_numbered(
    input_ids_BS: Tensor, labels_BS: Tensor, weight_BS: Tensor, document_BS: Tensor, *, image_token_id: int
) -> Packed:
    """Layout of samples that say themselves which document each token belongs to (int64 [b, s], -1: padding).

    Labels and weights are theirs; padding has neither. No host sync.
    """
    alive_BS = document_BS >= 0
    documents = documents_from_ids(document_BS, alive_BS, input_ids_BS == image_token_id)
    weight_BS = weight_BS.float() * alive_BS
    return Packed(documents, torch.where(weight_BS > 0, labels_BS, 0), weight_BS)


def targets(
    input_ids_BS: Tensor, lengths: Tensor | Sequence[Sequence[int]] | None = None, *, image_token_id: int
) -> Packed:
    """Layout, labels and weights where document lengths are given instead of end-of-document tokens.

    input_ids_BS int64 [b, s]. lengths [b, n]: token counts of each row's documents in order, 0 for none; what
    they leave of a row is padding; None: each row is one document. Labels are `input_ids_BS` shifted within
    documents, so the last token of every document has no label. ValueError when lengths on the host do not fit.
    """
    rows, seq = input_ids_BS.shape
    device = input_ids_BS.device
    ends_BN = _document_ends(lengths, rows, seq).to(device)
    here_S = torch.arange(seq, device=device)
    ids_BS = (here_S[None, :, None] >= ends_BN[:, None, :]).sum(-1)
    alive_BS = here_S[None] < ends_BN[:, -1:]
    counts_BS = torch.zeros_like(alive_BS)
    counts_BS[:, :-1] = (ids_BS[:, 1:] == ids_BS[:, :-1]) & alive_BS[:, 1:]
    labels_BS = torch.where(counts_BS, input_ids_BS.roll(-1, 1), 0)
    return Packed(documents_from_ids(ids_BS, alive_BS, input_ids_BS == image_token_id), labels_BS, counts_BS.float())


def _alive(input_ids_BS: Tensor, loss_mask_BS: Tensor) -> Tensor:
    """False for the padding that fills up a short last sample.

    GPTDataset overwrites padding with id 0 and masks its loss, so padding is the run of masked zeros at a
    row's end. The last real token is masked too but is an end of document, never 0.
    """
    dead_BS = (input_ids_BS == 0) & (loss_mask_BS == 0)
    return ~dead_BS.flip(1).long().cumprod(1).flip(1).bool()


def _document_ends(lengths: Tensor | Sequence[Sequence[int]] | None, rows: int, seq: int) -> Tensor:
    """Cumulative lengths, int64 [b, n]."""
    if lengths is None:
        return torch.full((rows, 1), seq, dtype=torch.int64)
    if not isinstance(lengths, Tensor):
        most = max((len(row) for row in lengths), default=0)
        lengths = torch.tensor([[*row, *[0] * (most - len(row))] for row in lengths], dtype=torch.int64)
    if lengths.ndim != 2 or lengths.shape[0] != rows or lengths.shape[1] == 0:
        raise ValueError(f"document lengths have shape {list(lengths.shape)}, need [{rows}, 1 or more]: a row a sample")
    ends_BN = lengths.long().cumsum(1)
    if lengths.device.type == "cpu":  # a check on a GPU tensor would wait for the GPU
        bad = (lengths < 0).any(1) | (ends_BN[:, -1] > seq)
        if bad.any():
            row = int(bad.nonzero()[0])
            given = lengths[row].tolist()
            raise ValueError(f"row {row}: document lengths {given} do not fit in {seq} tokens")
    return ends_BN
