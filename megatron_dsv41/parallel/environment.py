"""This process's place among others, as torchrun, srun or nobody told it, and the GPU that goes with it."""

from __future__ import annotations

import os

SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
SHARE_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"  # NCCL's own variable, from 2.30 on


def adopt_slurm_ranks() -> None:
    """Under srun with a MASTER_ADDR, set the variables that torchrun would have set."""
    if "RANK" not in os.environ and "SLURM_PROCID" in os.environ and "MASTER_ADDR" in os.environ:
        for ours, theirs in SLURM.items():
            os.environ[ours] = os.environ[theirs]


def rank_gpu(local_rank: int, gpus: int) -> int:
    """Which of a machine's `gpus` GPUs a rank computes on: its own, or a shared one. ValueError where there is none."""
    if missing := missing_gpus(local_rank + 1, gpus):
        raise ValueError(f"local rank {local_rank} {missing}")
    return local_rank % gpus


def missing_gpus(ranks: int, gpus: int) -> str:
    """What `ranks` ranks lack on a machine of `gpus` GPUs, and the fix, as in "needs 2 GPUs, ..."; "" if nothing.

    Each needs a GPU of its own, unless the environment says SHARE_GPUS=1.
    """
    if ranks <= gpus or (gpus and os.environ.get(SHARE_GPUS) == "1"):
        return ""
    fix = f"; to check a layout, not to time it, ranks share GPUs with {SHARE_GPUS}=1 and NCCL 2.30 or later"
    return f"needs {ranks} GPU{'s' * (ranks > 1)}, this machine has {gpus}{fix if gpus else ''}"
