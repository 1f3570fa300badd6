"""This process's place among others, as torchrun, srun or nobody told it."""

from __future__ import annotations

import os

SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}


def adopt_slurm_ranks() -> None:
    """Under srun with a MASTER_ADDR, set the variables that torchrun would have set."""
    if "RANK" not in os.environ and "SLURM_PROCID" in os.environ and "MASTER_ADDR" in os.environ:
        for ours, theirs in SLURM.items():
            os.environ[ours] = os.environ[theirs]
