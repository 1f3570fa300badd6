"""Best-fit packed samples of prepared files, where Megatron expects a GPTDataset."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from torch import Tensor

from megatron_dsv41.data.best_fit import Epoch, cut, draw_epoch, fit
from megatron_dsv41.data.prepared import has_mask, mask_prefix


class BestFitDataset(MegatronDataset):
    """Sample i of `data.packing: best_fit`: int64 and fp32 [s] under the names that StepFeed reads.

    tokens, labels, loss_mask as GPTDataset's; document: the number of the piece that a token belongs to, -1 for
    padding. The last token of a piece that was cut out of a document keeps its label, the next token of the document.
    Every epoch holds every token once. Samples follow from seed, length and data alone. Beside PREFIX.bin there may be
    a loss mask, which then says what is trained.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.capacity = self.config.sequence_length  # type: ignore[attr-defined]
        lengths = self.dataset.sequence_lengths[self.indices]  # type: ignore[attr-defined]
        self.pieces = cut(lengths, self.capacity)
        self.bins = fit(self.pieces.length, self.capacity)
        self.ends = lengths.astype(np.int64)
        prefix = self.dataset_path or ""
        self.mask = IndexedDataset(str(mask_prefix(prefix))) if has_mask(prefix) else None
        self._epoch: tuple[int, Epoch] | None = None

    def __len__(self) -> int:
        """Whole epochs, as many as the asked number of samples takes."""
        return self.bins.total * max(1, math.ceil((self.num_samples or 0) / self.bins.total))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """See class."""
        epoch, place = divmod(int(index), self.bins.total)
        layout = self._layout(epoch)
        tokens, labels, document = (np.full(self.capacity, fill, dtype=np.int64) for fill in (0, 0, -1))
        weight = np.zeros(self.capacity, dtype=np.float32)
        begin = 0
        for number, piece in enumerate(layout.piece[layout.start[place] : layout.start[place + 1]]):
            here = slice(begin, begin + self.pieces.length[piece])
            tokens[here], labels[here], weight[here] = self._read(piece)
            document[here] = number
            begin = here.stop
        found = {"tokens": tokens, "labels": labels, "loss_mask": weight, "document": document}
        return {name: torch.from_numpy(value) for name, value in found.items()}

    def _read(self, piece: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, labels, weights) of one piece. A document's last token has no label."""
        document, offset, length = (int(column[piece]) for column in self.pieces)
        more = min(length + 1, int(self.ends[document]) - offset)
        source: Any = self.dataset
        text = source.get(self.indices[document], offset=offset, length=more).astype(np.int64)
        weight = np.zeros(length, dtype=np.float32)
        weight[: more - 1] = 1.0
        if self.mask is not None:  # of a label: whether the token that it names is trained
            trained: Any = self.mask.get(self.indices[document], offset=offset, length=more)
            weight[: more - 1] = trained[1:]
        labels = np.zeros(length, dtype=np.int64)
        labels[: more - 1] = text[1:]
        return text[:length], labels, weight

    def _layout(self, epoch: int) -> Epoch:
        if self._epoch is None or self._epoch[0] != epoch:
            drawn = draw_epoch(self.bins, self.pieces.length, self.config.random_seed, epoch)
            self._epoch = (epoch, drawn)
        return self._epoch[1]

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Documents."""
        return GPTDataset.numel_low_level_dataset(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> Any:
        """Megatron's indexed file."""
        return GPTDataset.build_low_level_dataset(dataset_path, config)
