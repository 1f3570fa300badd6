"""Loss of a model on prepared data, in nats per token and bits per byte of text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_dsv41.data.check import check_prepared, open_tokens
from megatron_dsv41.data.packing import pack
from megatron_dsv41.data.prepared import has_mask, mask_prefix
from megatron_dsv41.modules.transformer import Transformer, make_batch


@dataclasses.dataclass(frozen=True)
class Score:
    """Sums over the tokens that were predicted: their nats, number, and bytes of text."""

    nats: float
    predicted: int
    text_bytes: int

    def __add__(self, other: Score) -> Score:
        return Score(self.nats + other.nats, self.predicted + other.predicted, self.text_bytes + other.text_bytes)

    @property
    def nats_per_token(self) -> float:
        """Mean loss, comparable between models with one tokenizer."""
        return self.nats / self.predicted

    @property
    def bits_per_byte(self) -> float:
        """Comparable between all models. Ends of documents cost bits and are no text."""
        return self.nats / math.log(2) / self.text_bytes


@torch.no_grad()
def evaluate(
    model: Transformer,
    prefix: str | Path,
    bytes_of: np.ndarray,
    *,
    seq_length: int,
    rows: int = 8,
    limit: int | None = None,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Score:
    """Predict every token of `prefix` once (or the first `limit`), in consecutive sequences of `seq_length`.

    A sequence starts without memory of the one before; documents never see each other; the first token of a document
    is not predicted, nor is one that a loss mask beside the data leaves out. bytes_of int64 [vocab]: of every token.
    rows: sequences at a time. advance: told of tokens read. ValueError when the data does not fit the model, or holds
    no token to predict.
    """
    sidecar = check_prepared(prefix, model.config, min_tokens=2)
    tokens = open_tokens(prefix).tokens[: None if limit is None else limit + 1]
    trained = _trained(prefix, len(tokens))
    bytes_V, device = torch.from_numpy(bytes_of), next(model.parameters()).device
    total, position = Score(0.0, 0, 0), 0
    while position < len(tokens) - 1:
        left = len(tokens) - 1 - position
        height, width = min(rows, left // seq_length) or 1, min(seq_length, left)
        place = slice(position, position + height * width + 1)
        chunk, counts = (
            torch.from_numpy(np.asarray(part[place], dtype=np.int64)).to(device) for part in (tokens, trained)
        )
        total += _score(model, chunk, counts, height, sidecar.eod_id, bytes_V.to(device))
        position += height * width
        advance(height * width)
    if not total.predicted or not total.text_bytes:
        raise ValueError(f"{prefix} has no token to predict: documents are one token long, or their loss mask is empty")
    return total


def _trained(prefix: str | Path, size: int) -> np.ndarray:
    """Which of the first tokens count, 0 or 1 [size]: all, or what the loss mask beside them says."""
    if not has_mask(prefix):
        return np.broadcast_to(np.uint8(1), size)  # of one byte, whatever the size
    trained = open_tokens(mask_prefix(prefix)).tokens
    if len(trained) < size:
        raise ValueError(
            f"{mask_prefix(prefix)}.bin is of {len(trained)} tokens, {prefix} has {size} or more: run dsv41 prep again"
        )
    return trained[:size]


def _score(model: Transformer, tokens: Tensor, trained: Tensor, height: int, eod_id: int, bytes_V: Tensor) -> Score:
    """tokens, trained int64 [height * width + 1]: rows that follow each other, and the label of the last."""
    inputs_BS, labels_BS = (part.unflatten(0, (height, -1)) for part in (tokens[:-1], tokens[1:]))
    packed = pack(inputs_BS, labels_BS, eod_id=eod_id, image_token_id=model.config.image_token_id)
    batch = make_batch(model.config, model.engram_hash, inputs_BS, packed.documents)
    hidden_SBD, *_ = model.hidden(inputs_BS, batch)
    losses_T = model.head(hidden_SBD.flatten(0, 1), packed.labels_BS.T.flatten())
    trained_BS = trained[1:].unflatten(0, (height, -1))
    counts_T = (packed.weight_BS.T.flatten() > 0) & (trained_BS.T.flatten() > 0)
    return Score(
        float(losses_T.double()[counts_T].sum()),
        int(counts_T.sum()),
        int(bytes_V[packed.labels_BS.T.flatten()[counts_T]].sum()),
    )
