"""The trainer: everything that `pretrain` calls back, with the state of a run. Imported after `launch`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from megatron.training import pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from torch import Tensor

from megatron_dsv41.backends.megatron import checkpoints, launch, optimizer, patches
from megatron_dsv41.backends.megatron.aux_loss import AuxLoss
from megatron_dsv41.backends.megatron.builder import DSV41ModelConfig
from megatron_dsv41.backends.megatron.config import parse_megatron, transformer_config
from megatron_dsv41.backends.megatron.data import (
    MicroBatch,
    ReplayDraw,
    StepFeed,
    StepSource,
    TokenizerIdentity,
    build_datasets,
)
from megatron_dsv41.backends.megatron.engram_build import own_tables
from megatron_dsv41.backends.megatron.faults import FaultCheck
from megatron_dsv41.backends.megatron.initial import load_start
from megatron_dsv41.backends.megatron.layer_metrics import layer_metrics
from megatron_dsv41.backends.megatron.layout import Layout
from megatron_dsv41.backends.megatron.model import DSV41Model
from megatron_dsv41.backends.megatron.optimizer_mixed import MegatronMixedOptimizer, optimizer_table
from megatron_dsv41.backends.megatron.pipeline import Boundaries, communicator
from megatron_dsv41.backends.megatron.progress import Reporter
from megatron_dsv41.backends.megatron.reduce_room import ReduceRoom
from megatron_dsv41.backends.megatron.router_bias import update_router_biases
from megatron_dsv41.backends.megatron.run_checks import (
    Checked,
    check,
    check_same_hash,
    check_settings,
    on_first,
    record_run,
)
from megatron_dsv41.backends.megatron.run_export import export_due, export_step
from megatron_dsv41.backends.megatron.schedule import RunScheduler, check_thawing, clear_frozen, thaw
from megatron_dsv41.backends.megatron.shadows import follow_after_steps, follow_owners
from megatron_dsv41.backends.megatron.weight_rounding import round_after_steps, round_weights
from megatron_dsv41.checkpoint.team import Team
from megatron_dsv41.experiments.flops import count_parameters
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.optim.groups import ENGRAM_TABLE
from megatron_dsv41.run_config import Leg, Run


class Trainer:
    """One phase of a run on this rank. Where a run has no phases, the run."""

    def __init__(self, leg: Leg, checked: Checked):
        self.leg, self.run, self.stopped = leg, leg.run, False
        run = self.run
        self.corpus, self.resume_step = checked.corpus, checked.resume_step
        self.start = checked.start and checked.start.folder
        corpus, resume_step = self.corpus, self.resume_step
        self.architecture = run.architecture()
        self.arguments = parse_megatron(run, checked.data_parallel_size)
        setattr(self.arguments, checkpoints.HASH, corpus.hash_digest)  # Megatron keeps its arguments in checkpoints
        config = transformer_config(run, self.arguments)
        config.finalize_model_grads_func = self.finalize
        config.experimental_attention_variant_loss_scale_func = AuxLoss.set_scale
        self.model_config = DSV41ModelConfig(
            transformer=config,
            token_map=corpus.token_map,
            boundaries=Boundaries.of(self.architecture, run.phase, run.parallel, run.batch.micro, run.data.seq_length),
            vocab_size=self.architecture.vocab_size,
        )
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.engram = self.model_config.engram = own_tables(
            config,
            corpus.token_map,
            self.model_config.boundaries,
            self.groups,
            run.engram_table,
            run.engram,
            frozen=all(group.frozen for group in optimizer_table(run) if group.role == ENGRAM_TABLE),
        )
        self.model_config.pre_wrap_hooks.append(self.thaw)
        if checked.start is not None:
            start = checked.start
            self.model_config.pre_wrap_hooks.append(lambda stages: load_start(stages, start))
        self.layout = Layout.of(self.groups, run.parallel.sp)
        self.room: ReduceRoom | None = None
        if run.parallel.reduce_sms is not None:
            self.room = ReduceRoom(run.parallel.reduce_sms, (self.groups.dp_cp, self.groups.expt_dp))
        world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        self.reporter = Reporter(run, resume_step or 0, reports=rank == world - 1, recorded=leg.whole)
        self.team = Team() if run.checkpoint.export_interval is None else Team.of_world()
        self.faults = FaultCheck(run.checkpoint.folder)
        self.step_sums: tuple[Tensor, Tensor] | None = None
        self.next_lr = leg.whole.learning_rate(resume_step or 0)
        self.engram_metrics: dict[str, Tensor] = {}
        self.sources: tuple[StepSource, StepSource | None] | None = None
        self.stock_optimizer: Any = None

    def pretrain(self) -> int:
        """Train to the end of the phase, or to a signal (`stopped`); the exit status."""
        self.reporter.say(self._layout())
        hooks = {
            "initialize_megatron": lambda stock, **kw: stock(**kw, allow_no_cuda=not torch.cuda.is_available()),
            "num_floating_point_operations": lambda stock, *a, **kw: 0.0,
            "get_megatron_optimizer_config": lambda stock, a: (stock(a)[0], optimizer.group_overrides(self.leg)),
            "get_optimizer_param_scheduler": lambda stock, o: RunScheduler(o, self.leg, self.resume_step or 0),
            "get_megatron_optimizer": self.build_optimizer,
            "get_forward_backward_func": self.prepared,
            "training_log": self.training_log,
            "evaluate": self.evaluate,
            "save_checkpoint": self.save_checkpoint,
            "load_checkpoint": self.load_checkpoint,
        }
        status = 1
        try:
            with patches.hooked(hooks):
                pretrain(
                    pretrain_cfg_container_from_args(self.arguments, self.model_config),
                    self._provider(),
                    ModelType.encoder_or_decoder,
                    self.forward_step,
                    skip_model_parallel_init=True,
                    **self._pipeline(),
                )
            status = 0
        except SystemExit as stop:  # how pretrain() ends after SIGTERM
            self.stopped, status = True, int(stop.code or 0)
        finally:
            self.reporter.close(status)
        return status

    def let_go(self) -> None:
        """After training, so that the model can be freed.

        Megatron's distributed optimizer holds views of parameters. A view holds a gradient node, whose hooks hold the
        model and with it the optimizer: Python's collector does not look into nodes, and would keep the cycle forever.
        """
        for part in getattr(self.stock_optimizer, "chained_optimizers", [self.stock_optimizer]):
            if part is not None:
                vars(part).clear()

    def thaw(self, stages: Any) -> Any:
        """Before the model is wrapped."""
        thaw(stages, self.leg.whole)
        return stages

    # --- data ---------------------------------------------------------------------------------------------------

    def feeds(self, samples: Any, vp_stage: int | None = None) -> tuple[StepFeed, StepFeed | None, None]:
        """Megatron's dataset provider: (train, valid, test). Called by every virtual stage; they share what is read."""
        if self.sources is None or not vp_stage:
            self.sources = self._open_sources()
        train, valid = self.sources
        return StepFeed(train), StepFeed(valid) if valid is not None else None, None

    def _open_sources(self) -> tuple[StepSource, StepSource | None]:
        run, done = self.run, (self.resume_step or 0) - self.leg.start
        cache = run.data.cache or str(Path(run.checkpoint.folder) / "index_cache")
        identity = TokenizerIdentity(self.corpus.eod_id, self.corpus.digest)
        train, valid = build_datasets(run, self.leg.steps, identity, cache)
        self.reporter.start()
        micro_batches = run.sequences_per_step // (run.batch.micro * self.groups.dp.size())
        return (
            self._source(
                train,
                get_num_microbatches,
                start=done * run.sequences_per_step,
                last=self.leg.steps * run.sequences_per_step,
                replay=self._replay(),
            ),
            self._source(valid, lambda: micro_batches, start=0, period=run.eval.batches * run.sequences_per_step)
            if valid is not None
            else None,
        )

    def _provider(self) -> Any:
        """`feeds`, marked as one that every rank calls: all stages need token ids."""
        provider = functools.partial(self.feeds)
        provider.is_distributed = True  # type: ignore[attr-defined]
        return provider

    def _pipeline(self) -> dict[str, Any]:
        """What `pretrain` passes to pipeline schedules."""
        if self.run.parallel.pp == 1:
            return {}
        config = self.model_config
        link = communicator(config.boundaries, self.groups.pp, config.transformer)
        return {"p2p_communicator": link, "pg_collection": self.groups}

    def prepared(self, stock: Any, *args: Any, **kwargs: Any) -> Any:
        """Megatron's schedule, before which the step's micro-batches are read and its Engram rows asked for."""
        schedule = stock(*args, **kwargs)

        def run(*, forward_only: bool, **rest: Any) -> Any:
            assert self.sources is not None
            source = self.sources[int(forward_only)]
            assert source is not None
            source.prepare()
            return schedule(forward_only=forward_only, **rest)

        return run

    def _replay(self) -> ReplayDraw | None:
        phase, window = self.run.phase, self.architecture.sliding_window
        return ReplayDraw(phase.replay, window, self.run.train.seed) if phase.replay else None

    def _source(self, dataset: Any, num_micro_batches: Callable[[], int], **settings: Any) -> StepSource:
        return StepSource(
            dataset,
            **settings,
            micro_batch=self.run.batch.micro,
            num_micro_batches=num_micro_batches,
            rank=self.groups.dp.rank(),
            world=self.groups.dp.size(),
            group=self.groups.dp,
            eod_id=self.corpus.eod_id,
            image_token_id=self.architecture.image_token_id,
            device=launch.device(),
            engram=self.engram,
        )

    # --- one step -----------------------------------------------------------------------------------------------

    def forward_step(
        self, feed: Any, model: Any
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
        """Megatron's forward step: the stage's output and how the last stage turns it into a loss."""
        batch: MicroBatch = next(feed)
        step = self.arguments.curr_iteration + 1
        index_scale = self.run.phase.index_scale(step - self.leg.start)
        probes = self.run.logging.index_probes if self.reporter.logs(step) else 0
        output = model(
            batch.input_ids_BS,
            batch.documents,
            batch.labels_BS,
            replay_start_T=batch.replay_start_T,
            engram_rows=batch.engram_rows,
            index_scale=index_scale,
            probes=probes,
        )
        if self.room is not None:
            self.room.watch(output, model)
        return output, lambda losses_BS: self._loss(losses_BS, batch, model.training)

    def _loss(self, losses_BS: Tensor, batch: MicroBatch, training: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum over valid positions, divided by their number in the whole step.

        Megatron averages over micro-batches and data-parallel ranks, so the share of one is multiplied by both.
        """
        weight_BS = self.layout.context_slice(batch.weight_BS)
        total = (losses_BS * weight_BS).sum()
        if training:
            self.faults.add(total, batch.index)
        copies = get_num_microbatches() * self.groups.dp.size()
        report = torch.stack([total.detach(), weight_BS.sum()])
        return total * (copies / batch.step_weight.clamp_min(1.0)), {"lm loss": report}

    def finalize(self, model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
        """Megatron's hook between the last backward and the optimizer step."""
        if self.engram is not None:
            self.engram.start_return()
        finalize_model_grads(model, num_tokens, **kwargs)
        if self.room is not None:
            self.room.take_back()
        returned = self.engram.finish_return() if self.engram is not None else []
        step = self.arguments.curr_iteration + 1
        self.faults.check(step, model, returned)
        if self.engram is not None and self.reporter.logs(step):
            self.engram_metrics = self.engram.milliseconds()
        stages: list[DSV41Model] = unwrap_model(model)
        clear_frozen(stages, self.leg)
        speed = self.run.phase.router_bias_speed
        self.step_sums = update_router_biases(stages, speed, self.groups.dp_cp, self.groups.pp)

    def build_optimizer(self, stock: Any, config: Any, model: list[Any], **kwargs: Any) -> Any:
        """Megatron's optimizer, or ours."""
        stages = unwrap_model(model)
        if self.run.stock_optimizer:
            built = self.stock_optimizer = stock(config, model, **kwargs)
        else:
            built = MegatronMixedOptimizer(config, stages, self.run, self.layout, self.groups)
            if self.engram is not None:
                built.tables_changed = self.engram.tables_changed
        if self.run.phase.quantized_weights:
            round_weights(stages, self.architecture, self.layout)
            built = round_after_steps(built, stages, self.architecture, self.layout)
        return follow_after_steps(built, stages, self.groups.pp)

    # --- report -------------------------------------------------------------------------------------------------

    def training_log(
        self,
        stock: Any,
        loss_dict: dict[str, Tensor],
        total_loss_dict: dict[str, Any],
        learning_rate: float | None,
        iteration: int,
        loss_scale: float,
        report_memory_flag: bool,
        skipped_iter: int,
        grad_norm: float | None,
        *rest: Any,
        **kwargs: Any,
    ) -> bool:
        """In place of Megatron's own line. Returns whether memory is to be reported: no."""
        lr, self.next_lr = self.next_lr, learning_rate or 0.0  # Megatron has already set the next step's
        self.reporter.step(iteration, loss_dict.get("lm loss"), grad_norm, lr, self._layer_metrics(iteration))
        return False

    def _layer_metrics(self, step: int) -> dict[str, Tensor]:
        """Where they are reported."""
        if self.step_sums is None or not self.reporter.due(step):
            return {}
        passes = get_num_microbatches() * self.groups.dp.size()
        return layer_metrics(self.architecture, self.run.phase, *self.step_sums, passes) | self.engram_metrics

    def evaluate(self, stock: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep what Megatron's evaluation finds."""
        found = stock(*args, **kwargs)
        if found[0] and "lm loss" in found[0]:
            self.reporter.validation(self.arguments.curr_iteration + 1, float(found[0]["lm loss"]))
        return found

    def _layout(self) -> str:
        run, world = self.run, torch.distributed.get_world_size()
        sizes = dataclasses.asdict(run.parallel) | {"etp": run.parallel.expert_tp}
        split = " ".join(f"{axis} {sizes[axis]}" for axis in ("tp", "pp", "vpp", "cp", "ep", "etp"))
        start = f"step {self.resume_step}" if self.resume_step else self.start or "scratch"
        phase = f"phase {self.leg.name}: steps {self.leg.start + 1} to {self.leg.end}\n" if self.leg.name else ""
        return phase + (
            f"{count_parameters(self.architecture).backbone:,} backbone parameters, {run.train.precision}, "
            f"{world} x {launch.device().type}: dp {self.groups.dp.size()} {split}; from {start}\n"
            f"batch {run.sequences_per_step} x {run.data.seq_length} = {run.tokens_per_step} tokens, {run.steps} steps "
            f"into {run.checkpoint.folder}\nops:\n{Ops(run.ops).table()}"
        )

    # --- checkpoints --------------------------------------------------------------------------------------------

    def save_checkpoint(self, stock: Any, iteration: int, *args: Any, **kwargs: Any) -> None:
        """Stock writes into a folder that is moved into place when it is complete."""

        def write(folder: str) -> None:
            self.arguments.save = folder
            try:
                stock(iteration, *args, **kwargs)
            finally:
                self.arguments.save = self.run.checkpoint.folder

        checkpoints.save(self.run.checkpoint.folder, iteration, self.run.checkpoint.keep, write)
        self.reporter.say(f"saved step {iteration}")
        if export_due(self.run, iteration):
            self.reporter.say(f"exported {export_step(self.run, iteration, self.team)}")

    def load_checkpoint(self, stock: Any, model: list[Any], *args: Any, **kwargs: Any) -> Any:
        """Compare names and shapes first: what does not fit is listed."""
        stages = unwrap_model(model)
        if self.resume_step is None:
            loaded = stock(model, *args, **kwargs)
        else:
            path = checkpoints.checkpoint_path(self.run.checkpoint.folder, self.resume_step)
            self._check_stored(path, stages)
            with checkpoints.reading(path):
                loaded = stock(model, *args, **kwargs)
        if self.run.phase.quantized_weights:
            round_weights(stages, self.architecture, self.layout)
        follow_owners(stages, self.groups.pp)
        return loaded

    def _check_stored(self, path: Path, stages: list[DSV41Model]) -> None:
        """ValueError when the checkpoint is of another model; when it fits, the run is recorded as it is now."""
        expected = checkpoints.model_shapes(stage.sharded_state_dict() for stage in stages)
        with checkpoints.reading(path):
            found = checkpoints.stored_shapes(path)
            digest = on_first(lambda: checkpoints.stored_hash(path))
        checkpoints.compare_tensors(expected, found, f"checkpoint {path}")
        check_same_hash(digest, self.corpus, str(path))
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            record_run(self.leg.whole)


def walk(run: Run) -> int:
    """Train through the phases that are left; the exit status. Collective.

    Between two phases everything but the process is built anew, from the checkpoint at the end of the first: a run that
    crosses from one to the next does what a run that is resumed there does.
    """
    check_thawing(run)
    for leg in run.legs:
        check_settings(leg.run)
    step = on_first(lambda: max(checkpoints.complete_steps(run.checkpoint.folder), default=0))
    status = 0
    for leg in [leg for leg in run.legs if leg.end > step] or run.legs[-1:]:
        trainer = create(leg)
        status = trainer.pretrain()
        if status or trainer.stopped:
            break
        trainer.let_go()
        del trainer
        launch.release()
    return status


def create(run: Run | Leg) -> Trainer:
    """Check everything that can be checked, then build the trainer. Collective; errors are the same on every rank."""
    leg = run if isinstance(run, Leg) else run.legs[0]
    checked = check(leg)
    launch.create_groups(leg.run.parallel)
    return Trainer(leg, checked)
