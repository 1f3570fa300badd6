"""Prepared token files -> micro-batches, through Megatron's GPTDataset and blends."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from torch import Tensor

from megatron_dsv41.backends.megatron.best_fit import BestFitDataset
from megatron_dsv41.backends.megatron.engram import EngramExchange, StepRows
from megatron_dsv41.data.packing import Packed, pack, pack_numbered
from megatron_dsv41.data.replay import draw_replay
from megatron_dsv41.ops.documents import Documents
from megatron_dsv41.parallel.engram_rows import FetchedRows
from megatron_dsv41.run_config import Run

VALID_SEED = 0
_TRAIN, _VALID = 0, 1  # Megatron's splits; the third is a test


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
    replay_start_T: Tensor | None = None  # int64 [b*s], see `make_batch`
    engram_rows: Mapping[int, FetchedRows] | None = None  # where tables have owners


@dataclasses.dataclass(frozen=True)
class ReplayDraw:
    """How replays are drawn (`draw_replay`)."""

    probability: float
    window: int
    seed: int


def build_datasets(run: Run, steps: int, tokenizer: TokenizerIdentity, cache: str) -> tuple[Any, Any]:
    """(train, valid) sample sources for `steps` training steps; valid is None where the run has none. Collective.

    Training samples are drawn by the run's seed; validation samples are the same in runs that differ by it.
    """
    train = _samples(run, _TRAIN, steps * run.sequences_per_step, run.train.seed, tokenizer, cache)
    if not run.eval.interval:
        return train, None
    return train, _samples(run, _VALID, run.eval.batches * run.sequences_per_step, VALID_SEED, tokenizer, cache)


def _samples(run: Run, split: int, count: int, seed: int, tokenizer: TokenizerIdentity, cache: str) -> Any:
    """`count` samples of one split; Megatron's builder has one seed for all of its splits."""
    prefixes = run.data.valid if split == _VALID else run.data.train
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=run.data.seq_length,
        blend_per_split=[(list(prefixes), list(prefixes.values())) if s == split else None for s in range(3)],
        tokenizer=cast(Any, tokenizer),  # of Megatron's tokenizers, GPTDataset asks for these attributes alone
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=cache,
        mid_level_dataset_surplus=0.005,
    )
    kind: Any = BestFitDataset if run.data.packing == "best_fit" else GPTDataset
    counts = [count if s == split else 0 for s in range(3)]
    return BlendedMegatronDatasetBuilder(kind, counts, lambda: True, config).build()[split]


class StepSource:
    """Reads steps of micro-batches of one data-parallel rank, endlessly, for the feeds of its virtual stages.

    All micro-batches of a step are read before its first forward pass, because the loss is a mean over the valid
    tokens of the whole step. Sample i of the data goes to the same step whatever the layout; `start` is the number
    of samples consumed by earlier steps. With `period` the source starts over after that many samples (validation).

    With owned Engram tables (`engram`) a step's rows are asked for when it is read: of a training step, as long as
    samples below `last` are left, when the step before begins to compute; otherwise (validation) when it is taken.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        start: int,
        period: int | None = None,
        last: int = 0,
        micro_batch: int,
        num_micro_batches: Callable[[], int],
        rank: int,
        world: int,
        group: torch.distributed.ProcessGroup | None,
        eod_id: int,
        image_token_id: int,
        device: torch.device,
        replay: ReplayDraw | None = None,
        engram: EngramExchange | None = None,
    ):
        self.dataset, self.position, self.period, self.last = dataset, start, period, last
        self.micro_batch, self.num_micro_batches = micro_batch, num_micro_batches
        self.rank, self.world, self.group, self.replay = rank, world, group, replay
        self.eod_id, self.image_token_id, self.device = eod_id, image_token_id, device
        self.engram = engram
        self.ahead: Step | None = None
        self.feeds: list[StepFeed] = []

    def prepare(self) -> None:
        """Hand the next step to every feed, unless one waits there. With owned Engram tables collective over the world.

        Before a pipeline schedule, in which a stage that waits for its neighbour would wait forever.
        """
        if any(feed.waiting for feed in self.feeds):
            return
        step, self.ahead = self.ahead or self._read_step(), None
        if self.engram is not None and step.rows is not None:
            self.engram.begin(step.rows)
            if self.position < self.last:
                self.ahead = self._read_step()
                self.engram.upcoming = self.ahead.rows
        for feed in self.feeds:
            feed.waiting.extend((batch, step.rows) for batch in step.batches)

    def _read_step(self) -> Step:
        batches = self._read_batches()
        if self.engram is None:
            return Step(batches)
        rows = self.engram.announce([(b.input_ids_BS, b.documents) for b in batches], training=self.period is None)
        fetched = zip(batches, rows.batches, strict=True)
        return Step([dataclasses.replace(batch, engram_rows=found) for batch, found in fetched], rows)

    def _read_batches(self) -> list[MicroBatch]:
        samples, packed, starts = [], [], []
        for _ in range(self.num_micro_batches()):
            sample = self._read_micro_batch()
            layout, start_T = self._replayed(self._pack(sample), sample["number"])
            samples.append(sample["tokens"])
            packed.append(layout)
            starts.append(start_T)
        step_weight = torch.stack([p.weight_BS.sum() for p in packed]).sum()
        if self.group is not None:
            torch.distributed.all_reduce(step_weight, group=self.group)
        return [
            MicroBatch(ids, p.documents, p.labels_BS, p.weight_BS, step_weight, index, start_T)
            for index, (ids, p, start_T) in enumerate(zip(samples, packed, starts, strict=True))
        ]

    def _pack(self, sample: dict[str, Tensor]) -> Packed:
        ids_BS, labels_BS, mask_BS = sample["tokens"], sample["labels"], sample["loss_mask"]
        image = self.image_token_id
        if "document" in sample:
            return pack_numbered(ids_BS, labels_BS, mask_BS, sample["document"], image_token_id=image)
        return pack(ids_BS, labels_BS, eod_id=self.eod_id, image_token_id=image, loss_mask_BS=mask_BS)

    def _replayed(self, packed: Packed, samples_B: Tensor) -> tuple[Packed, Tensor | None]:
        if self.replay is None:
            return packed, None
        drawn = draw_replay(packed.documents, packed.weight_BS, samples_B, **dataclasses.asdict(self.replay))
        return packed._replace(weight_BS=drawn.weight_BS), drawn.start_T

    def _read_micro_batch(self) -> dict[str, Tensor]:
        if self.period is not None and self.position >= self.period:
            self.position = 0
        first = self.position + self.rank * self.micro_batch
        numbers = range(first, first + self.micro_batch)
        rows = [self.dataset[number] for number in numbers]
        self.position += self.micro_batch * self.world
        keys = [key for key in ("tokens", "labels", "loss_mask", "document") if key in rows[0]]
        stacked = {key: torch.stack([row[key] for row in rows]) for key in keys}
        stacked["number"] = torch.tensor(numbers)
        return {key: value.to(self.device, non_blocking=True) for key, value in stacked.items()}


@dataclasses.dataclass(frozen=True)
class Step:
    """Micro-batches of a step, and their Engram rows where tables have owners."""

    batches: list[MicroBatch]
    rows: StepRows | None = None


class StepFeed:
    """The micro-batches of a source, one after the other, for one virtual stage."""

    def __init__(self, source: StepSource):
        self.source = source
        self.waiting: collections.deque[tuple[MicroBatch, StepRows | None]] = collections.deque()
        source.feeds.append(self)

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        if not self.waiting:
            self.source.prepare()
        batch, rows = self.waiting.popleft()
        if rows is not None and self.source.engram is not None:
            self.source.engram.reached(rows, batch.index)
        return batch
