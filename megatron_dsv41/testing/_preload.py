"""Imported once by the fork server of `run_ranks`; every rank starts from here."""

import logging
import warnings

import torch

from megatron_dsv41.backends.megatron import cpu, patches

torch.set_num_threads(1)
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # no CUDA runtime on a CPU machine
warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
cpu.install()
patches.fix_stock()
for _name in ("core.pipeline_parallel", "core.dist_checkpointing", "training"):
    __import__(f"megatron.{_name}")
__import__("megatron_dsv41.backends.megatron.trainer")
