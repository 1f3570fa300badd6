"""Prepared token files -> micro-batches, through Megatron's GPTDataset and blends."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from torch import Tensor

from megatron_dsv41.data.packing import pack
from megatron_dsv41.ops.documents import Documents
from megatron_dsv41.run_config import Run


@dataclasses.dataclass(frozen=True)
class TokenizerIdentity:
    """The little that GPTDataset asks a tokenizer. The digest keeps cached sample indices of two tokenizers apart."""

    eod: int
    digest: str
    pad: int = -1  # an id that no file holds: GPTDataset turns it into 0 with the loss masked
    vocab_size: int | None = None  # None: the element type is read from the file

    @property
    def unique_identifiers(self) -> dict[str, str]:
        """Part of the cache key of sample indices."""
        return {"digest": self.digest, "eod": str(self.eod)}


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """One forward pass of one data-parallel rank, on the device."""

    input_ids_BS: Tensor
    documents: Documents
    labels_BS: Tensor
    weight_BS: Tensor  # fp32
    step_weight: Tensor  # fp32 []: sum of weight_BS over all micro-batches and data-parallel ranks of the step
    index: int  # 0-based place in the step


def build_datasets(run: Run, steps: int, tokenizer: TokenizerIdentity, cache: str) -> tuple[Any, Any]:
    """(train, valid) sample sources for `steps` training steps; valid is None where the run has none. Collective."""
    config = GPTDatasetConfig(
        random_seed=run.train.seed,
        sequence_length=run.data.seq_length,
        blend_per_split=[_blend(run.data.train), _blend(run.data.valid) if run.eval.interval else None, None],
        tokenizer=cast(Any, tokenizer),  # of Megatron's tokenizers, GPTDataset asks for these attributes alone
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=cache,
        mid_level_dataset_surplus=0.005,
    )
    samples = [steps * run.sequences_per_step, run.eval.batches * run.sequences_per_step, 0]
    if not run.eval.interval:
        samples[1] = 0
    train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, config).build()
    return train, valid


def _blend(prefixes: dict[str, float]) -> tuple[list[str], list[float]]:
    return list(prefixes), list(prefixes.values())


class StepFeed:
    """Endless micro-batches of one data-parallel rank.

    All micro-batches of a step are read before its first forward pass, because the loss is a mean over the valid
    tokens of the whole step. Sample i of the data goes to the same step whatever the layout; `start` is the number
    of samples consumed by earlier steps. With `period` the feed starts over after that many samples (validation).
    """

    def __init__(
        self,
        dataset: Any,
        *,
        start: int,
        period: int | None = None,
        micro_batch: int,
        num_micro_batches: Callable[[], int],
        rank: int,
        world: int,
        group: torch.distributed.ProcessGroup | None,
        eod_id: int,
        image_token_id: int,
        device: torch.device,
    ):
        self.dataset, self.position, self.period = dataset, start, period
        self.micro_batch, self.num_micro_batches = micro_batch, num_micro_batches
        self.rank, self.world, self.group = rank, world, group
        self.eod_id, self.image_token_id, self.device = eod_id, image_token_id, device
        self.waiting: collections.deque[MicroBatch] = collections.deque()

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        if not self.waiting:
            self.waiting.extend(self._read_step())
        return self.waiting.popleft()

    def _read_step(self) -> list[MicroBatch]:
        samples, packed = [], []
        for _ in range(self.num_micro_batches()):
            sample = self._read_micro_batch()
            samples.append(sample["tokens"])
            packed.append(
                pack(
                    sample["tokens"],
                    sample["labels"],
                    eod_id=self.eod_id,
                    image_token_id=self.image_token_id,
                    loss_mask_BS=sample["loss_mask"],
                )
            )
        step_weight = torch.stack([p.weight_BS.sum() for p in packed]).sum()
        if self.group is not None:
            torch.distributed.all_reduce(step_weight, group=self.group)
        return [
            MicroBatch(ids, p.documents, p.labels_BS, p.weight_BS, step_weight, index)
            for index, (ids, p) in enumerate(zip(samples, packed, strict=True))
        ]

    def _read_micro_batch(self) -> dict[str, Tensor]:
        if self.period is not None and self.position >= self.period:
            self.position = 0
        first = self.position + self.rank * self.micro_batch
        rows = [self.dataset[first + i] for i in range(self.micro_batch)]
        self.position += self.micro_batch * self.world
        stacked = {key: torch.stack([row[key] for row in rows]) for key in ("tokens", "labels", "loss_mask")}
        return {key: value.to(self.device, non_blocking=True) for key, value in stacked.items()}
