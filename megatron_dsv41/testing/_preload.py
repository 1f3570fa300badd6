"""Imported once by the fork server of `run_ranks`; every rank starts from here."""

import torch

from megatron_dsv41.backends.megatron import cpu

torch.set_num_threads(1)
cpu.install()
for _name in ("distributed", "optimizer", "pipeline_parallel", "dist_checkpointing", "transformer"):
    __import__(f"megatron.core.{_name}")
