"""Run -> Megatron's arguments and TransformerConfig. The only file where Megatron's field names appear."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from megatron_dsv41.backends.megatron.layouts import stage_layers
from megatron_dsv41.config import DSV41Config, nearest
from megatron_dsv41.parallel.stages import layout_string
from megatron_dsv41.phase import Phase
from megatron_dsv41.precision import Precision
from megatron_dsv41.run_config import Parallel, Recompute, Run


@dataclasses.dataclass
class DSV41TransformerConfig(TransformerConfig):
    """Megatron's view of the model (sizes, layout, precision), and ours beside it."""

    architecture: DSV41Config | None = None
    phase: Phase = dataclasses.field(default_factory=Phase)
    precision: Precision = dataclasses.field(default_factory=Precision)
    ops: dict[str, str] = dataclasses.field(default_factory=dict)
    recompute_kind: Recompute = "none"
    gather_tokens: bool = False  # to experts of other ranks, which is nothing that Megatron does or limits
    fused_gradients: bool = False  # not Megatron's own switch, which wants kernels of APEX
    seed: int = 1
    engram_owners: int | None = None


# Megatron arguments that would take a part of the trainer apart.
REFUSED = {
    "async-save": "a checkpoint is moved into place when it is complete, which an asynchronous save never reports",
    "calculate-per-token-loss": "the loss is already the mean over the valid tokens of the whole step",
    "transformer-impl": "the model is built from this package's own modules; precision.* asks for Transformer Engine",
    **dict.fromkeys(("fp8-format", "fp8-recipe"), "set precision.fp8"),
    **dict.fromkeys(("fp4-format", "fp4-recipe"), "set precision.fp4"),
    "fp16": "the model trains in bf16 or fp32; set train.precision",
    "optimizer": "set optimizer.name",
    "use-distributed-optimizer": "optimizer.name decides: ours divides its state itself and needs whole gradients",
    "save": "set checkpoint.folder",
    "load": "set checkpoint.folder, or train.init_from to start from other weights",
    "ckpt-format": "checkpoints are torch_dist",
    "dataloader-type": "the trainer feeds its own micro-batches",
    "use-megatron-fsdp": "the distributed optimizer shards state; FSDP would shard parameters the model reads by name",
}


SET_ELSEWHERE = "the trainer sets it from other sections of the run file"
# Checkpoints match groups by their rates, and the peak may be another at the next start: groups carry their rate in
# proportion to the run's.
PEAK = 1.0


def megatron_arguments(run: Run, data_parallel_size: int) -> list[str]:
    """The command line that stock Megatron would be started with."""
    given = {name.replace("_", "-"): value for name, value in run.megatron.items()}
    return _command_line(_trainer_arguments(run) | given)


def _trainer_arguments(run: Run) -> dict[str, Any]:
    """What the trainer sets, by the names of the command line."""
    model, parallel = run.architecture(), run.parallel
    values: dict[str, Any] = {
        # sizes; what they mean to a GPT is irrelevant, the model is built from the architecture
        "num-layers": model.num_hidden_layers,
        "hidden-size": model.hidden_size,
        "ffn-hidden-size": model.moe_intermediate_size,
        "num-attention-heads": model.num_attention_heads,
        "seq-length": run.data.seq_length,
        "max-position-embeddings": run.data.seq_length,
        "position-embedding-type": "none",
        "vocab-size": model.vocab_size,
        "make-vocab-size-divisible-by": 1,
        "tokenizer-type": "NullTokenizer",
        "untie-embeddings-and-output-weights": True,
        "disable-bias-linear": True,
        "normalization": "RMSNorm",
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "transformer-impl": "local",
        "no-persist-layer-norm": True,
        "no-masked-softmax-fusion": True,
        "no-bias-gelu-fusion": True,
        "no-bias-swiglu-fusion": True,
        "no-bias-dropout-fusion": True,
        "no-rope-fusion": True,
        "no-gradient-accumulation-fusion": True,
        # layout
        "tensor-model-parallel-size": parallel.tp,
        "pipeline-model-parallel-size": parallel.pp,
        "context-parallel-size": parallel.cp,
        "expert-model-parallel-size": parallel.ep,
        "expert-tensor-parallel-size": parallel.expert_tp,
        "sequence-parallel": parallel.sp,
        "distributed-backend": "nccl" if torch.cuda.is_available() else "gloo",
        # ours divides its state over data parallelism itself, and takes gradients that DDP summed
        "use-distributed-optimizer": run.stock_optimizer,
        # batch and length
        "micro-batch-size": run.batch.micro,
        "global-batch-size": run.sequences_per_step,
        "train-iters": run.steps,
        "seed": run.train.seed,
        "dataloader-type": "external",
        "eval-interval": run.eval.interval or run.steps,
        "eval-iters": run.eval.batches if run.eval.interval else 0,
        # our step check names the rank and the micro-batch, and costs one synchronisation per step
        "no-check-for-nan-in-loss-and-grad": True,
        "rerun-mode": "disabled",
        "exit-signal-handler": True,
        "log-interval": 1,
        "num-workers": 0,
        **_optimizer_arguments(run),
        **_checkpoint_arguments(run),
    }
    if run.train.precision == "bf16":
        values |= {"bf16": True, "accumulate-allreduce-grads-in-fp32": True}
    if torch.cuda.is_available():  # NCCL averages as it adds; gloo cannot, and a pass over all gradients divides them
        values["ddp-average-in-collective"] = True
    if parallel.pp > 1:
        values["pipeline-model-parallel-layout"] = layout_string(stage_layers(model, parallel))
    if parallel.ep > 1 or parallel.expert_tp != parallel.tp:
        values |= {
            "num-experts": model.n_routed_experts,
            "moe-router-topk": model.num_experts_per_tok,
            "moe-token-dispatcher-type": "alltoall",
        }
    return values


def _optimizer_arguments(run: Run) -> dict[str, Any]:
    optimizer = run.optimizer
    return {
        "optimizer": "adam",
        "lr": PEAK,
        "adam-beta1": optimizer.beta1,
        "adam-beta2": optimizer.beta2,
        "adam-eps": optimizer.eps,
        "weight-decay": optimizer.weight_decay,
        "clip-grad": optimizer.clip,
        "lr-decay-style": "constant",  # RunScheduler knows the rates
    }


def _checkpoint_arguments(run: Run) -> dict[str, Any]:
    return {
        "save": run.checkpoint.folder,
        "load": run.checkpoint.folder,
        "save-interval": run.checkpoint.interval or run.steps,
        "ckpt-format": "torch_dist",
        "dist-ckpt-optim-fully-reshardable": True,
        "auto-detect-ckpt-format": True,
        "no-save-optim": not run.checkpoint.optimizer,
        "dist-ckpt-strictness": "raise_unexpected",
    }


def _command_line(values: dict[str, Any]) -> list[str]:
    words = []
    for name, value in values.items():
        if value is False or value is None:
            continue
        words.append(f"--{name}")
        if isinstance(value, list | tuple):
            words.extend(map(str, value))
        elif value is not True:
            words.append(repr(value) if isinstance(value, float) else str(value))
    return words


def check_megatron_settings(run: Run) -> None:
    """ValueError for a `megatron.*` setting that Megatron does not know or cannot read, or that the trainer sets."""
    from megatron.training.arguments import add_megatron_arguments

    if not run.megatron:
        return
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False))
    places = {option.lstrip("-"): action.dest for action in parser._actions for option in action.option_strings}
    ours = {places.get(name) for name in _trainer_arguments(run)}
    for name, value in run.megatron.items():
        option = name.replace("_", "-")
        if option not in places:
            raise ValueError(f"megatron.{name} is not an argument of Megatron{nearest(option, set(places))}")
        if option in REFUSED or places[option] in ours:
            raise ValueError(f"megatron.{name} cannot be set: {REFUSED.get(option, SET_ELSEWHERE)}")
        if name != option and option in run.megatron:
            raise ValueError(f"megatron.{name} and megatron.{option} are one setting: leave one of them out")
        try:
            _, rest = parser.parse_known_args(_command_line({option: value}))
        except argparse.ArgumentError as error:
            raise ValueError(f"megatron.{name} cannot be {value!r}: {error.message}") from error
        if rest:
            raise ValueError(f"megatron.{name} cannot be {value!r}: it is a switch, true or left out")


def parse_megatron(run: Run, data_parallel_size: int) -> Any:
    """Megatron's validated argument namespace."""
    from megatron.training.arguments import parse_and_validate_args

    command = sys.argv
    sys.argv = ["dsv41", *megatron_arguments(run, data_parallel_size)]  # Megatron's parser reads only this
    try:
        return parse_and_validate_args()
    except AssertionError as error:
        raise ValueError(f"Megatron refuses the settings of this run: {error}") from error
    finally:
        sys.argv = command


def transformer_config(run: Run, arguments: Any) -> DSV41TransformerConfig:
    """The TransformerConfig of a run from Megatron's own arguments."""
    from megatron.training.argument_utils import core_transformer_config_from_args

    config: Any = core_transformer_config_from_args(arguments, DSV41TransformerConfig)
    config.architecture = run.architecture()
    config.phase = run.phase
    config.precision = run.precision
    config.ops = dict(run.ops)
    config.seed = run.train.seed
    config.engram_owners = run.parallel.engram
    config.recompute_kind = run.train.recompute
    config.gather_tokens = run.parallel.gathers_tokens(config.architecture.num_experts_per_tok)
    config.fused_gradients = run.parallel.gradient_accumulation_fusion
    return config


def bare_transformer_config(
    architecture: DSV41Config, phase: Phase, parallel: Parallel, ops: dict[str, str], recompute: Recompute = "none"
) -> DSV41TransformerConfig:
    """The TransformerConfig of a model without a trainer."""
    dtype, interleaved = getattr(torch, architecture.dtype), parallel.vpp > 1
    experts: dict[str, Any] = {}
    if parallel.ep > 1 or parallel.expert_tp != parallel.tp:
        experts = {
            "num_moe_experts": architecture.n_routed_experts,
            "moe_router_topk": architecture.num_experts_per_tok,
            "moe_token_dispatcher_type": "alltoall",
        }
    pipeline: dict[str, Any] = {}
    if parallel.pp > 1:
        pipeline = {
            "pipeline_model_parallel_layout": layout_string(stage_layers(architecture, parallel)),
            "virtual_pipeline_model_parallel_size": parallel.vpp if interleaved else None,
            "overlap_p2p_comm": interleaved,
            "batch_p2p_comm": not interleaved,
        }
    return DSV41TransformerConfig(
        num_layers=architecture.num_hidden_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.moe_intermediate_size,
        num_attention_heads=architecture.num_attention_heads,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        deallocate_pipeline_outputs=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.expert_tp,
        sequence_parallel=parallel.sp,
        **experts,
        **pipeline,
        architecture=architecture,
        phase=phase,
        ops=ops,
        engram_owners=parallel.engram,
        recompute_kind=recompute,
        gather_tokens=parallel.gathers_tokens(architecture.num_experts_per_tok),
        fused_gradients=parallel.gradient_accumulation_fusion,
    )
