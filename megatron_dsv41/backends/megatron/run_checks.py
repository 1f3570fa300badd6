"""What can be found wrong with a run before anything is built: settings, data, folder, weights to start from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron_dsv41.backends.megatron import checkpoints, settings
from megatron_dsv41.backends.megatron.config import check_megatron_settings
from megatron_dsv41.backends.megatron.initial import Start
from megatron_dsv41.backends.megatron.run_source import START_FILE, StartRecord, check_origin, origin_of
from megatron_dsv41.backends.te.machine import check_here
from megatron_dsv41.checkpoint.team import Team
from megatron_dsv41.data.check import check_prepared
from megatron_dsv41.data.files import write_whole
from megatron_dsv41.data.prepared import cache_key, has_mask, prepared_paths
from megatron_dsv41.data.token_map import load_token_map
from megatron_dsv41.data.tokenizer import open_tokenizer
from megatron_dsv41.experiments.flops import count_parameters
from megatron_dsv41.modules.engram import EngramHash
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.run_config import RUN_FILE, Leg, Run, is_run, load_run


@dataclasses.dataclass
class Corpus:
    """What the run knows about its tokens before it reads them."""

    token_map: Tensor
    eod_id: int
    digest: str
    hash_digest: str  # of everything that decides an Engram row


@dataclasses.dataclass
class Checked:
    """A run whose settings, data and folder fit together."""

    corpus: Corpus
    data_parallel_size: int
    resume_step: int | None
    start: Start | None  # None: from scratch, or a resume


def check_settings(run: Run) -> int:
    """What can be found wrong without looking at files: ValueError. The data-parallel size."""
    data_parallel_size = settings.check_settings(run, torch.distributed.get_world_size())
    check_megatron_settings(run)
    check_here(run.precision)
    if run.parallel.reduce_sms is not None and not torch.cuda.is_available():
        raise ValueError("parallel.reduce_sms is for sums over NCCL on GPUs, and there is none here: leave it out")
    Ops(run.ops)
    return data_parallel_size


def check(leg: Leg) -> Checked:
    """What can be found wrong before anything is built. Collective; ValueError or OSError on every rank alike."""
    run, whole = leg.run, leg.whole
    data_parallel_size = check_settings(run)
    corpus = on_first(lambda: open_corpus(whole))
    resume_step = on_first(lambda: _open_run(whole, leg.start))
    start = None
    if run.train.init_from and resume_step is None:
        start = on_first(lambda: Start.find(str(run.train.init_from), run.architecture()))
        check_same_hash(start.hash_digest, corpus, str(start.folder))
    if resume_step is None:
        on_first(lambda: _record_start(whole, start and start.folder))
    return Checked(corpus, data_parallel_size, resume_step, start)


def _open_run(run: Run, start: int) -> int | None:
    folder = Path(run.checkpoint.folder)
    step = checkpoints.open_folder(folder, run.checkpoint.resume or start > 0)
    if step is not None and step >= run.steps:
        length = "the steps or tokens of the last phase" if run.phases else "train.steps"
        raise ValueError(f"{folder} already holds step {step} of {run.steps}: raise {length} to go on")
    if step is not None:
        before = load_run(folder / RUN_FILE) if is_run(folder) else run
        _check_same_steps(run, before, folder)
        if run.checkpoint.optimizer:
            _check_same_optimizer(run, before, folder)
        if run.checkpoint.export_interval is not None:
            check_origin(origin_of(folder), folder)
    weights = count_parameters(run.architecture()).total
    checkpoints.require_space(folder, weights * (16 if run.checkpoint.optimizer else 4))
    return step


def record_run(run: Run) -> None:
    """What the folder holds from here on. On a resume only after its checkpoint was found to fit."""
    folder = Path(run.checkpoint.folder)
    if is_run(folder) and not (folder / START_FILE).is_file():  # else a changed run file would lose it
        start = load_run(folder / RUN_FILE).train.init_from
        StartRecord.of(None if start is None else Path(start)).write(folder)
    write_whole(folder / RUN_FILE, run.to_yaml().encode())


def _record_start(run: Run, weights: Path | None) -> None:
    """What the folder holds of a run that begins: its run file and where its weights come from.

    ValueError when exports need an origin that is not there, or are to be stored as one that never was: an earlier run
    started from scratch.
    """
    record = StartRecord.of(weights)
    if run.checkpoint.export_interval is not None and weights is not None:
        # Of the run whose checkpoint it is; any other folder is its own origin.
        check_origin(record.origin, weights.parent)
    if run.checkpoint.export_storage == "source" and record.origin is None:
        raise ValueError(
            f"checkpoint.export_storage source keeps the storage of what train.init_from {run.train.init_from} was "
            "imported from, and that run started from scratch: choose released, bf16 or fp32"
        )
    record.write(run.checkpoint.folder)
    record_run(run)


def check_same_hash(stored: str | None, corpus: Corpus, where: str) -> None:
    """ValueError when weights were trained with other Engram rows: another tokenizer of equal size looks alike."""
    if stored is not None and stored != corpus.hash_digest:
        raise ValueError(
            f"{where} was trained with Engram hash constants {stored[:12]}, the data of this run give "
            f"{corpus.hash_digest[:12]}: its tokenizer or its Engram settings are not those of the weights; "
            "prepare the data with the tokenizer that the weights were trained with"
        )


def _check_same_steps(run: Run, before: Run, folder: Path) -> None:
    """ValueError when a run without phases goes on with steps of other tokens: what was read is counted in steps."""
    if run.phases or before.phases:
        return
    for setting, was, now in (
        ("data.seq_length", before.data.seq_length, run.data.seq_length),
        ("batch.sequences", before.sequences_per_step, run.sequences_per_step),
    ):
        if was != now:
            raise ValueError(
                f"checkpoint.folder {folder} holds steps of {setting}={was}, and this run has {now}: what was "
                f"read and seen is counted in steps. Set {setting}={was}, or list phases"
            )


def _check_same_optimizer(run: Run, before: Run, folder: Path) -> None:
    """ValueError when the folder's checkpoints hold the state of another optimizer."""
    for setting, was, now in (
        ("optimizer.name", before.optimizer.name, run.optimizer.name),
        ("parallel.engram", before.parallel.engram, run.parallel.engram)
        if before.stock_optimizer != run.stock_optimizer  # AdamW with owned tables is ours, without Megatron's
        else ("", None, None),
        ("engram.table", before.engram_table, run.engram_table),
        ("engram.master", before.engram.master, run.engram.master),
    ):
        if was != now:
            raise ValueError(
                f"checkpoint.folder {folder} was trained with {setting}={was}, whose state {setting}={now} "
                f"cannot continue: set {setting}={was}, or start another folder from its weights with "
                f"train.init_from={folder}"
            )
    if _trains_indexers(run) and not _trains_indexers(before):
        raise ValueError(
            f"checkpoint.folder {folder} was trained with phase.index_loss=off, and holds no optimizer state of "
            f"indexers: start another folder from its weights with train.init_from={folder}; within one run, "
            "list its phases"
        )


def _trains_indexers(run: Run) -> bool:
    """In any phase; only then have they gradients, and state."""
    return any(leg.run.phase.index_loss != "off" for leg in run.legs)


def open_corpus(run: Run) -> Corpus:
    """Check all prepared files of the run's phases, which must be of one tokenizer."""
    config = run.architecture()
    lengths: dict[str, int] = {}
    for data in (leg.run.data for leg in run.legs):
        for prefix in (*data.train, *data.valid):
            if data.packing != "best_fit" and has_mask(prefix):
                raise ValueError(
                    f"{prefix} has a loss mask, which data.packing={data.packing} does not read: set "
                    "data.packing=best_fit"
                )
            lengths[prefix] = max(lengths.get(prefix, 0), data.seq_length)
    prefixes = list(lengths)
    tokenizer = open_tokenizer(run.data.tokenizer).sha256 if run.data.tokenizer else None
    for prefix, length in lengths.items():
        sidecar = check_prepared(prefix, config, tokenizer_sha256=tokenizer, min_tokens=length + 1)
        tokenizer = sidecar.tokenizer_sha256
    token_map = load_token_map(prepared_paths(prefixes[0]).token_map, config)
    digest = EngramHash(config, token_map.ids).digest
    return Corpus(token_map.ids, config.eos_token_id, cache_key(prefixes), digest)


def on_first[T](function: Callable[[], T]) -> T:
    """`function()` on rank 0 only; every rank gets its value or raises its error. Collective."""
    return Team.of_default_group().first(function)
