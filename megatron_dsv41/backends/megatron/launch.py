"""From an environment (torchrun, srun, or nothing) to initialised process groups."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import torch

from megatron_dsv41.backends.megatron import cpu, patches
from megatron_dsv41.parallel.environment import adopt_slurm_ranks
from megatron_dsv41.run_config import Parallel, Run


def prepare_process() -> None:
    """Rank variables, the CPU runtime where there is no GPU, and the stock fixes. Before importing Megatron."""
    adopt_slurm_ranks()
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if os.environ["WORLD_SIZE"] == "1":
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(_free_port()))
    cpu.install()
    patches.fix_stock()


def device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")


@contextlib.contextmanager
def world(timeout_minutes: float = 10.0) -> Iterator[None]:
    """The default process group, NCCL on GPUs and gloo without: created and destroyed here unless it exists."""
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    if torch.distributed.is_initialized():
        yield
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def create_groups(parallel: Parallel) -> None:
    """Megatron's process groups for a layout. ValueError when the world does not hold it."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.expert_tp,
    )


def destroy_groups() -> None:
    """Take back `create_groups`, so that this world can be split again. Collective.

    Megatron forgets its groups without destroying them: over gloo each keeps three threads that wake a hundred times a
    second, and a few dozen layouts later these take all the time there is.
    """
    from megatron.core import parallel_state
    from torch.distributed.distributed_c10d import _world  # torch lists groups nowhere else

    parallel_state.destroy_model_parallel()
    for group in list(_world.pg_map):
        if group is not torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(group)
    gc.collect()


def release() -> None:
    """Take back what `create_groups` and Megatron's trainer keep for the whole process, so that it can start again."""
    from megatron.training.training import destroy_global_state

    destroy_global_state()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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
    return data_size


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
