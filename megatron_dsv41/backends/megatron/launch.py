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
from megatron_dsv41.parallel.environment import adopt_slurm_ranks, rank_gpu
from megatron_dsv41.run_config import Parallel


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
    """Where this rank computes. ValueError where the machine has no GPU for it."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank_gpu(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()))


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
        if backend == "nccl":  # once told, it knows the device: else the first barrier of a lone rank guesses one
            torch.distributed.barrier(device_ids=[device().index])
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
