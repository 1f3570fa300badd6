"""One training run as one typed value: read from a YAML file, changed by `section.key=value`, written back.

Every mistake is a ValueError that names the key: an unknown key (with the nearest known one), a value of the wrong
type, parts that do not fit together. What a backend cannot do is refused by the backend.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from megatron_dsv41 import presets
from megatron_dsv41.config import DSV41Config, nearest
from megatron_dsv41.optim.settings import Optimizer
from megatron_dsv41.phase import Phase
from megatron_dsv41.phase_list import RunPhase, check_names
from megatron_dsv41.precision import Precision
from megatron_dsv41.recipes import on_recipe
from megatron_dsv41.typed_yaml import apply_override, build, copied, plain, read_yaml

RUN_FILE = "run.yaml"
TURN = "microbatch_group_size_per_virtual_pipeline_stage"  # of `megatron`: micro-batches of a chunk at a time
Recompute = Literal["none", "selective", "block", "full"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The architecture: a preset name, or a config.json (or the folder that holds one), with changed fields."""

    preset: str | None = None
    path: str | None = None
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.preset is None) == (self.path is None):
            raise ValueError("model needs exactly one of model.preset and model.path")
        if self.preset is not None and self.preset not in presets.PRESETS:
            known = set(presets.PRESETS)
            raise ValueError(
                f"model.preset {self.preset!r} does not exist{nearest(self.preset, known)}; "
                f"presets: {', '.join(sorted(known))}"
            )

    def config(self) -> DSV41Config:
        """The architecture that this section describes."""
        base = presets.PRESETS[self.preset]() if self.preset else DSV41Config.load(typing.cast(str, self.path))
        return base.with_overrides(self.overrides)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel:
    """How many ways each axis is split. Data parallelism is what the others leave of the world."""

    tp: int = 1
    sp: bool = False  # sequence parallelism over the tp group
    pp: int = 1
    vpp: int = 1  # virtual stages per pipeline rank
    layout: str | None = None  # Megatron's pipeline layout string, such as "Et|tttL"
    cp: int = 1
    ep: int = 1
    etp: int | None = None  # tensor parallelism inside experts; None: tp without expert parallelism, else 1
    dispatcher: Literal["auto", "alltoall", "allgather", "flex"] = "auto"  # to experts of other ranks: `gathers_tokens`
    gradient_accumulation_fusion: bool = False  # linears add their weights' gradients to the buffers, not Megatron
    # Multiprocessors that sums of gradients keep to and products leave free (with `megatron.overlap_grad_reduce`, on
    # GPUs); None: as many as NCCL takes.
    reduce_sms: int | None = None
    engram: int | None = None  # ranks that own an Engram table's rows together; None: whole on every rank of its stage
    # Send a selection over a pipeline cut, or what it is made from and select again there: whatever is fewer bytes.
    shadows: Literal["bytes", "always", "never"] = "bytes"

    def __post_init__(self) -> None:
        for key in ("tp", "pp", "vpp", "cp", "ep", "etp", "engram", "reduce_sms"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"parallel.{key} must be at least 1, got {value}")
        if self.sp and self.tp == 1:
            raise ValueError("parallel.sp splits the sequence over the tp group: it needs parallel.tp > 1")

    @property
    def expert_tp(self) -> int:
        """Tensor parallelism inside experts."""
        return self.etp if self.etp is not None else self.tp if self.ep == 1 else 1

    def gathers_tokens(self, experts_per_token: int) -> bool:
        """Whether tokens reach the experts of other ranks by allgather (or alltoall); auto: by what sends less.

        Of a rank's T tokens, allgather sends each to every other rank once: (ep - 1) T rows each way. alltoall sends
        one for each of its k chosen experts that lies elsewhere: k T (ep - 1) / ep on average, no fewer where ep <= k.
        Gathered rows also go to their experts and back by one kernel each, instead of Megatron's permutations.
        """
        return self.dispatcher == "allgather" or (self.dispatcher == "auto" and self.ep <= experts_per_token)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engram:
    """How tables with owners (`parallel.engram`) are kept, and how much of them crosses at once."""

    table: Literal["float8", "bfloat16", "float32"] | None = None  # as served and sent; None: the run's precision
    master: Literal["float32", "bfloat16"] = "float32"  # as updated; the momentum is optimizer.momentum_dtype
    memory: Literal["device", "host"] = "device"  # host: pinned, with the optimizer's state beside it
    window: int | None = None  # micro-batches whose rows cross together and wait in memory; None: all of a step

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"engram.window must be positive, got {self.window}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Prepared token files (`dsv41 prep`) and the tokenizer they were made with."""

    train: dict[str, float]  # prefix -> weight; a plain string or a list of prefixes is also understood
    valid: dict[str, float] = dataclasses.field(default_factory=dict)
    tokenizer: str | None = None  # folder or tokenizer.json; None: the one named by the prepared files
    seq_length: int
    packing: Literal["concat", "best_fit"] = "concat"  # documents end to end, cut anywhere; or whole ones, best-fit
    cache: str | None = None  # folder of Megatron's sample indices; None: inside the run's folder

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("data.train is empty: name at least one prefix of prepared .bin/.idx files")
        if self.seq_length < 1:
            raise ValueError(f"data.seq_length must be positive, got {self.seq_length}")
        for split in ("train", "valid"):
            for prefix, weight in getattr(self, split).items():
                if not weight > 0:
                    raise ValueError(f"data.{split}: the weight of {prefix} must be positive, got {weight}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """The global batch, in sequences or in tokens, and how many sequences one forward pass takes."""

    micro: int = 1
    sequences: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.sequences is None) == (self.tokens is None):
            raise ValueError("batch needs exactly one of batch.sequences and batch.tokens; =null takes one away")
        for key in ("micro", "sequences", "tokens"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"batch.{key} must be positive, got {value}")


# The report's run in tokens (SPEC 17): its length; ends of 2000 warm-up steps of 96 Mi tokens, constant rate, cosine.
PUBLISHED_TOKENS = 45e12
PUBLISHED_CORNERS = (2000 * 96 * 2**20, 28e12, 40e12)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate over the run: linear warm-up, a stable part, a cosine to `min_lr`, then constant (SPEC 17).

    Lengths are in `unit`. `cosine: null` takes all that warm-up and stable leave. `shape: published` scales the
    report's schedule to the run's length instead, with a tenth of the peak as `min_lr`; it takes no other setting.
    """

    shape: Literal["given", "published"] = "given"
    unit: Literal["steps", "tokens"] = "steps"
    warmup: int = 0
    stable: int = 0
    cosine: int | None = None
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        for key in ("warmup", "stable", "cosine", "min_lr"):
            value = getattr(self, key)
            if value is not None and value < 0:
                raise ValueError(f"schedule.{key} must not be negative, got {value}")
        given = (self.warmup, self.stable, self.cosine, self.min_lr) != (0, 0, None, 0.0)
        if self.shape == "published" and given:
            raise ValueError("schedule.shape published follows from the run's length: leave out the other settings")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Length, precision and start of the run."""

    steps: int | None = None
    tokens: int | None = None
    seed: int = 1
    precision: Literal["fp32", "bf16"] = "bf16"
    recompute: Recompute = "none"  # selective: what is as wide as all heads; full: a pipeline stage as one
    init_from: str | None = None  # a run's, released, native or distributed folder (docs/checkpoints.md); None: scratch

    def __post_init__(self) -> None:
        if self.steps is not None and self.tokens is not None:
            raise ValueError("train needs exactly one of train.steps and train.tokens; =null takes one away")
        for key in ("steps", "tokens", "seed"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"train.{key} must be positive, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Where the run lives: checkpoints, metrics and the wandb run id."""

    folder: str
    interval: int | None = None  # steps; None: only at the end
    keep: int | None = None  # newest checkpoints to keep; None: all
    resume: bool = True  # continue from the newest complete checkpoint in `folder`; False: the folder must be new
    optimizer: bool = True  # save the optimizer state too
    export_interval: int | None = None  # steps between exports in the released layout, into `folder`/exports
    export_storage: Literal["source", "released", "bf16", "fp32"] | None = None  # None: as train.init_from, or config

    def __post_init__(self) -> None:
        for key in ("interval", "keep", "export_interval"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"checkpoint.{key} must be positive, got {value}")
        if self.export_interval is not None and self.export_interval % (self.interval or self.export_interval + 1):
            raise ValueError(
                f"checkpoint.export_interval {self.export_interval} must be a multiple of checkpoint.interval "
                f"({self.interval}): what is exported is a saved checkpoint"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logging:
    """Progress lines, metrics.jsonl and wandb."""

    interval: int = 10
    wandb: Literal["online", "offline", "off"] = "off"
    project: str = "megatron-dsv41"
    entity: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    megatron: bool = False  # also print what Megatron prints
    index_probes: int = 16  # queries per micro-batch whose selection is compared with their attention; 0: none

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"logging.interval must be positive, got {self.interval}")
        if self.index_probes < 0:
            raise ValueError(f"logging.index_probes must not be negative, got {self.index_probes}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eval:
    """Validation during the run."""

    interval: int | None = None  # steps; None: no validation
    batches: int = 1  # global batches per validation

    def __post_init__(self) -> None:
        for key in ("interval", "batches"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"eval.{key} must be positive, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A whole run. Derived sizes are methods, so that they are computed in one place.

    With `phases` the run walks through them, and its own sections are what every phase starts from.
    """

    model: Model
    data: Data
    batch: Batch
    train: Train
    checkpoint: Checkpoint
    phase: Phase = dataclasses.field(default_factory=Phase)
    phases: tuple[RunPhase, ...] = ()
    ops: dict[str, str] = dataclasses.field(default_factory=dict)
    precision: Precision = dataclasses.field(default_factory=Precision)
    parallel: Parallel = dataclasses.field(default_factory=Parallel)
    engram: Engram = dataclasses.field(default_factory=Engram)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    logging: Logging = dataclasses.field(default_factory=Logging)
    eval: Eval = dataclasses.field(default_factory=Eval)
    megatron: dict[str, Any] = dataclasses.field(default_factory=dict)  # further Megatron arguments, by their names

    def __post_init__(self) -> None:
        if self.batch.tokens is not None and self.batch.tokens % self.data.seq_length:
            raise ValueError(
                f"batch.tokens {self.batch.tokens} is not a multiple of data.seq_length {self.data.seq_length}: "
                f"set it to {max(1, self.batch.tokens // self.data.seq_length) * self.data.seq_length}"
            )
        given = self.train.steps is not None or self.train.tokens is not None
        if given == bool(self.phases):
            raise ValueError(
                "the length of a run with phases is theirs: remove train.steps and train.tokens"
                if given
                else "train needs exactly one of train.steps and train.tokens, or the run a list of phases"
            )
        if self.train.tokens is not None and self.train.tokens < self.tokens_per_step:
            raise ValueError(f"train.tokens {self.train.tokens} is less than one step of {self.tokens_per_step} tokens")
        if self.checkpoint.export_storage == "source" and self.train.init_from is None:
            raise ValueError("checkpoint.export_storage source keeps the storage of train.init_from, which is not set")
        if self.engram != Engram() and self.parallel.engram is None:
            raise ValueError("engram.* is about tables with owners: set parallel.engram to their number")
        if self.eval.interval is not None and not self.data.valid:
            raise ValueError("eval.interval is set but data.valid is empty: name the validation prefixes")
        if self.min_lr > self.optimizer.lr:
            raise ValueError(f"schedule.min_lr {self.min_lr} exceeds optimizer.lr {self.optimizer.lr}")
        warmup, stable, cosine = self.lr_steps
        if warmup + stable + cosine > self.steps:
            raise ValueError(
                f"schedule: warmup {warmup} + stable {stable} + cosine {cosine} steps exceed the run's "
                f"{self.steps} steps"
            )
        check_names(self.phases)
        assert self.legs  # builds, and so checks, the run of every phase

    @property
    def sequences_per_step(self) -> int:
        """Global batch in sequences."""
        return self.batch.sequences or typing.cast(int, self.batch.tokens) // self.data.seq_length

    @property
    def tokens_per_step(self) -> int:
        """Global batch in tokens."""
        return self.sequences_per_step * self.data.seq_length

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.phases:
            return sum(phase.num_steps(self.tokens_per_step) for phase in self.phases)
        return self.train.steps or math.ceil(typing.cast(int, self.train.tokens) / self.tokens_per_step)

    @property
    def lr_steps(self) -> tuple[int, int, int]:
        """(warm-up, stable, cosine) lengths in steps."""
        if self.schedule.shape == "published":
            warmup, constant, end = (round(self.steps * tokens / PUBLISHED_TOKENS) for tokens in PUBLISHED_CORNERS)
            return warmup, constant - warmup, end - constant
        per_step = 1 if self.schedule.unit == "steps" else self.tokens_per_step
        warmup, stable = round(self.schedule.warmup / per_step), round(self.schedule.stable / per_step)
        cosine = self.schedule.cosine
        return warmup, stable, max(0, self.steps - warmup - stable) if cosine is None else round(cosine / per_step)

    @property
    def min_lr(self) -> float:
        """Learning rate at the end."""
        return self.optimizer.lr / 10 if self.schedule.shape == "published" else self.schedule.min_lr

    @functools.cached_property
    def legs(self) -> tuple[Leg, ...]:
        """The phases with their places in the run; a run without phases is one leg."""
        if not self.phases:
            return (Leg("", 0, self.steps, self, self),)
        legs, start = [], 0
        for phase in self.phases:
            end = start + phase.num_steps(self.tokens_per_step)
            legs.append(Leg(phase.name, start, end, self._in_phase(phase, end), self))
            start = end
        return tuple(legs)

    def asks_megatron(self, switch: str) -> bool:
        """Whether a switch of `megatron`, named with underscores, is on; the file may spell it with hyphens."""
        return bool(self.of_megatron(switch))

    def of_megatron(self, name: str) -> Any:
        """What `megatron` sets an argument to, named with underscores; None: it is left out."""
        return self.megatron.get(name, self.megatron.get(name.replace("_", "-")))

    def leg_of(self, step: int) -> Leg:
        """The phase that step number `step` is of, counted from 1; steps after the last phase are of the last."""
        return next((leg for leg in self.legs if step <= leg.end), self.legs[-1])

    def _in_phase(self, phase: RunPhase, end: int) -> Run:
        values = self.to_dict()
        for section, changes in phase.changes().items():
            values[section] |= changes
        values |= {"phases": [], "schedule": {}}
        values["train"] |= {"steps": end}
        try:
            run = build(Run, values)
        except ValueError as error:
            raise ValueError(f"phase {phase.name}: {error}") from error
        if run.tokens_per_step != self.tokens_per_step:
            raise ValueError(
                f"phase {phase.name}: sequences of {run.data.seq_length} make a batch of {run.tokens_per_step} tokens, "
                f"the run's has {self.tokens_per_step}: set batch.tokens instead of batch.sequences"
            )
        return run

    def learning_rate(self, step: int) -> float:
        """Learning rate of the update after `step` finished steps."""
        number = next((i for i, leg in enumerate(self.legs) if step < leg.end), len(self.legs) - 1)
        segment = self.phases[number].lr if self.phases else None
        if segment is None:
            return self._scheduled_rate(step)
        leg, before = self.legs[number], self.phases[number - 1].lr if number else None
        reached = before.end if before else self._scheduled_rate(leg.start)
        return segment.at(min(1.0, (step - leg.start) / leg.steps), reached)

    def _scheduled_rate(self, step: int) -> float:
        warmup, stable, cosine = self.lr_steps
        peak, low = self.optimizer.lr, self.min_lr
        if warmup and step <= warmup:
            return peak * step / warmup
        step -= warmup + stable
        if step <= 0:
            return peak
        return low if step > cosine else low + (peak - low) * 0.5 * (1 + math.cos(math.pi * step / cosine))

    @property
    def stock_optimizer(self) -> bool:
        """Whether Megatron's own optimizer does the updates. It knows no rows that belong to other ranks."""
        return self.optimizer.name == "adamw" and self.parallel.engram is None

    @property
    def engram_table(self) -> Literal["float8", "bfloat16", "float32"]:
        """What owned Engram tables serve."""
        return self.engram.table or ("float32" if self.train.precision == "fp32" else "bfloat16")

    def architecture(self) -> DSV41Config:
        """The model's config in the run's precision."""
        dtype = {"fp32": "float32", "bf16": "bfloat16"}[self.train.precision]
        return dataclasses.replace(self.model.config(), dtype=dtype)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, in the shape of the run file."""
        return plain(dataclasses.asdict(self))

    def to_yaml(self) -> str:
        """The run file of this run. `run_from_dict(yaml)` gives an equal value."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


@dataclasses.dataclass(frozen=True)
class Leg:
    """One phase in its place: steps start + 1 .. end of the whole run, and the run as it is meanwhile.

    `run` has no phases of its own and counts its steps from the beginning of the whole.
    """

    name: str
    start: int
    end: int
    run: Run = dataclasses.field(repr=False)
    whole: Run = dataclasses.field(repr=False)

    @property
    def steps(self) -> int:
        """Its own steps."""
        return self.end - self.start


def is_run(folder: str | Path) -> bool:
    """Whether a folder is what `dsv41 train` leaves: a run's checkpoints beside its run file."""
    return (Path(folder) / RUN_FILE).is_file()


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Read a run file and apply `section.key=value` strings (values are YAML)."""
    return run_from_dict(read_yaml(path, "run file"), overrides)


def run_from_dict(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Run:
    """Like `load_run`, from an already parsed mapping."""
    changed = copied(values)
    # The recipe lies under the file, whatever else changes what both say.
    for first in (True, False):
        for override in overrides:
            if override.startswith("recipe=") is first:
                apply_override(changed, override)
        changed = copied(on_recipe(changed))
    _refuse_misplaced(changed.get("model"))
    return build(Run, changed)


def _refuse_misplaced(model: Any) -> None:
    """ValueError when the section `model` itself holds fields of the architecture."""
    fields = {field.name for field in dataclasses.fields(DSV41Config)}
    for key in model if isinstance(model, Mapping) else ():
        if key in fields:
            raise ValueError(f"model.{key} is not a setting: fields of the architecture are model.overrides.{key}")
