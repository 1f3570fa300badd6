"""Imported once by the fork server of `run_ranks`; every rank starts from here."""

import gc
import logging
import warnings

import torch

from megatron_dsv41.backends.megatron import cpu, patches

torch.set_num_threads(1)
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # no CUDA runtime on a CPU machine
warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
cpu.install()
patches.fix_stock()
for _name in (
    "megatron.core.datasets.helpers_cpp",
    "megatron.core.dist_checkpointing",
    "megatron.core.models.mimo",
    "megatron.core.pipeline_parallel",
    "megatron.core.tokenizers.text.text_tokenizer",  # transformers: 2 s
    "megatron.training",
    "megatron_dsv41.backends.megatron.train",
    "megatron_dsv41.backends.megatron.trainer",
):
    __import__(_name)
gc.freeze()  # collections of the ranks neither walk all this (0.25 s each) nor copy its pages
