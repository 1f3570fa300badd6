"""What a run asks that cannot be, found in its settings alone: the same for a plan and for the start of a run.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from megatron_dsv41.backends.megatron.layouts import check_layout, plan_crossings, sequence_pieces, stage_layers
from megatron_dsv41.ops.registry import choose
from megatron_dsv41.precision import check_sizes
from megatron_dsv41.run_config import TURN, Run

MOST_REDUCE_SMS = 32
BF16_KERNELS = {"csa2.sparse_attend": ("triton", "hopper", "flash_mla", "cudnn"), "mhc.site": ("hopper",)}


def check_settings(run: Run, world_size: int) -> int:
    """Data-parallel size of a phase of a run on `world_size` processes. ValueError for what this backend cannot do."""
    refuse_unsupported(run)
    check_rounding(run)
    check_reduction(run)
    check_precision(run)
    choose(run.ops)
    return check_world(run, world_size)


def check_world(run: Run, world_size: int) -> int:
    """Data-parallel size of the run on `world_size` processes; ValueError when the sizes do not fit together."""
    parallel = run.parallel
    model_size = parallel.tp * parallel.pp * parallel.cp
    if world_size % model_size:
        raise ValueError(
            f"{world_size} processes cannot be split into tp {parallel.tp} x pp {parallel.pp} x cp {parallel.cp} = "
            f"{model_size}: start a multiple of {model_size} processes"
        )
    expert_size = parallel.expert_tp * parallel.ep * parallel.pp
    if world_size % expert_size:
        raise ValueError(
            f"{world_size} processes cannot be split into etp {parallel.expert_tp} x ep {parallel.ep} x pp "
            f"{parallel.pp} = {expert_size}: start a multiple of {expert_size} processes"
        )
    if parallel.engram is not None and world_size % parallel.engram:
        sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise ValueError(
            f"parallel.engram {parallel.engram} does not divide {world_size} processes: groups of equal size own the "
            f"tables; set it to one of {', '.join(map(str, sizes))}"
        )
    data_size = world_size // model_size
    if run.sequences_per_step % (run.batch.micro * data_size):
        raise ValueError(
            f"the global batch of {run.sequences_per_step} sequences is not a multiple of batch.micro "
            f"{run.batch.micro} x {data_size} data-parallel ranks: change batch.sequences or batch.micro"
        )
    check_turns(run, run.sequences_per_step // (run.batch.micro * data_size))
    return data_size


def check_turns(run: Run, micro_batches: int) -> None:
    """ValueError when chunks of a pipeline rank cannot take turns as Megatron's interleaved schedule does."""
    pp, asked = run.parallel.pp, run.of_megatron(TURN)
    if asked is not None and (type(asked) is not int or asked < 1):
        raise ValueError(f"megatron.{TURN} must be a whole number of micro-batches, at least 1, got {asked!r}")
    if run.parallel.vpp == 1:
        return
    turn = asked or pp
    if micro_batches < pp:
        raise ValueError(
            f"parallel.vpp {run.parallel.vpp} needs at least parallel.pp = {pp} micro-batches in a step of a rank, and "
            f"there are {micro_batches}: raise batch.sequences, lower batch.micro, or set parallel.vpp=1"
        )
    if not pp <= turn <= micro_batches:
        raise ValueError(
            f"megatron.{TURN} {turn} must be at least parallel.pp = {pp} and at most the {micro_batches} micro-batches "
            "in a step of a rank"
        )
    if 0 < micro_batches % turn < pp:
        raise ValueError(
            f"parallel.vpp {run.parallel.vpp} runs {turn} micro-batches of a chunk at a time, and of the "
            f"{micro_batches} in a step of a rank {micro_batches % turn} remain, fewer than parallel.pp = {pp}: set "
            f"batch.sequences to a multiple of {run.batch.micro * turn} for each data-parallel rank, or another "
            f"megatron.{TURN}"
        )


def refuse_unsupported(run: Run) -> None:
    """ValueError for every layout that this backend cannot compute, with the setting, its limit and the fix."""
    parallel, config, seq = run.parallel, run.architecture(), run.data.seq_length
    check_layout(config, parallel)
    pieces = sequence_pieces(parallel)
    if seq % pieces:
        raise ValueError(
            f"data.seq_length {seq} is not a multiple of the {pieces} pieces that parallel.cp and sp cut it into"
        )
    halo = config.sliding_window - 1
    if parallel.cp > 1 and seq // parallel.cp < halo:
        raise ValueError(
            f"parallel.cp {parallel.cp} leaves {seq // parallel.cp} tokens per rank, but the window's halo of {halo} "
            f"must come from one neighbour: set parallel.cp to at most {max(1, seq // halo)}"
        )
    idle = [rank for rank in range(parallel.pp) if not any(stage_layers(config, parallel)[rank :: parallel.pp])]
    if idle and run.stock_optimizer:
        raise ValueError(
            f"parallel.layout {parallel.layout!r} leaves pipeline rank {idle[0]} without layers, and so Megatron's "
            "AdamW without experts, whose state it then cannot save: give the rank a layer, or set "
            "optimizer.name=published"
        )
    crossings = plan_crossings(config, run.phase, parallel, run.batch.micro, seq)
    gathers_late = run.asks_megatron("overlap_param_gather")
    if gathers_late and any(crossing.shadows for crossing in crossings):
        raise ValueError(
            "megatron.overlap_param_gather updates weights after the step has ended, when shadow indexers have taken "
            "their owners' weights: set parallel.shadows=never, or leave overlap_param_gather out"
        )
    if parallel.cp > 1 and run.batch.micro > 1:
        raise ValueError(f"parallel.cp {parallel.cp} needs batch.micro=1, got {run.batch.micro}")


def check_rounding(run: Run) -> None:
    """ValueError when the run's phase asks for rounded weights that this run cannot have."""
    if not run.phase.quantized_weights:
        return
    if run.train.precision != "bf16":
        raise ValueError(
            f"phase.quantized_weights needs train.precision=bf16, got {run.train.precision}: the optimizer then keeps "
            "fp32 weights beside the rounded ones"
        )
    if run.asks_megatron("overlap_param_gather"):
        raise ValueError(
            "phase.quantized_weights rounds after a step has ended: leave megatron.overlap_param_gather out"
        )


def check_reduction(run: Run) -> None:
    """ValueError when sums of gradients shall leave room to what does not run beside them, or take nearly all of it."""
    room = run.parallel.reduce_sms
    if room is None:
        return
    if room > MOST_REDUCE_SMS:
        raise ValueError(f"parallel.reduce_sms must be at most {MOST_REDUCE_SMS}, got {room}: products need the others")
    if not run.asks_megatron("overlap_grad_reduce"):
        raise ValueError(
            "parallel.reduce_sms leaves room to sums of gradients that run beside the backward pass: set "
            "megatron.overlap_grad_reduce=true too"
        )


def check_precision(run: Run) -> None:
    """ValueError when ops or linears cannot compute in the precision that the run asks for, whatever the machine."""
    precision, parallel, config = run.precision, run.parallel, run.architecture()
    chosen = choose(run.ops)
    for op, kernels in BF16_KERNELS.items():
        if run.train.precision == "fp32" and chosen[op] in kernels:
            raise ValueError(f"{op}: provider {chosen[op]!r} takes bfloat16: set train.precision=bf16, or ops.{op}=ref")
    if precision.name is not None:
        if run.train.precision != "bf16":
            raise ValueError(f"{precision.asked} rounds bf16 operands: it needs train.precision=bf16")
        if precision.name == "delayed" and run.train.recompute != "none":
            raise ValueError(
                f"{precision.asked} takes note of largest values in every forward pass and would count those of "
                f"train.recompute={run.train.recompute} twice: set train.recompute=none or another recipe"
            )
        tokens = run.batch.micro * run.data.seq_length // parallel.cp
        check_sizes(config, precision, parallel.tp, tokens, tokens // (parallel.tp if parallel.sp else 1))
    if chosen["routing.experts"] == "grouped_fp8":
        inner = config.moe_intermediate_size // parallel.expert_tp
        for name, size in (("hidden_size", config.hidden_size), ("moe_intermediate_size", inner)):
            if size % 16:
                raise ValueError(
                    f"ops.routing.experts=grouped_fp8 multiplies multiples of 16, {name} is {size} on a rank: choose "
                    "grouped"
                )
