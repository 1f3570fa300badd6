"""Quantization-aware training of weights: the model computes with what a quantized checkpoint will hold.

The optimizer keeps its fp32 copies; the model's bf16 parameters are put on the grid of the released storage after
every step. Their gradient is taken as the copies' (straight through), and forward, recomputation and checkpoints all
see the same rounded values at no cost of their own. Experts are MXFP4 by rows of 32, linears FP8 by 32x32 tiles.
Embedding, head and Engram tables are left as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_dsv41.backends.megatron.layout import Layout, cuts_of
from megatron_dsv41.checkpoint.mapping import parameter_bindings
from megatron_dsv41.checkpoint.storage import Storage
from megatron_dsv41.config import DSV41Config
from megatron_dsv41.ops.quant.codec import Format
from megatron_dsv41.ops.quant.weights import round_weight

ROUNDED = (Storage.FP4_ROW32, Storage.FP8_BLOCK32)


def weight_formats(config: DSV41Config) -> dict[str, Format]:
    """Native name -> grid of every weight that is rounded."""
    bindings = (binding for binding in parameter_bindings(config) if binding.storage in ROUNDED)
    return {binding.native: binding.storage.format for binding in bindings if binding.storage.format is not None}


@torch.no_grad()
def round_weights(stages: Sequence[nn.Module], config: DSV41Config, layout: Layout) -> None:
    """Put the weights of this rank's stages on their grids, in place. ValueError for blocks that are cut over ranks."""
    formats = weight_formats(config)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if name in formats:
                _check_cuts(name, parameter, formats[name], layout)
                matrix = parameter.data.flatten(0, -2)
                matrix.copy_(round_weight(matrix, formats[name]))


def round_after_steps(optimizer: Any, stages: Sequence[nn.Module], config: DSV41Config, layout: Layout) -> Any:
    """The optimizer, whose `step` ends with `round_weights`."""
    stock = optimizer.step

    @functools.wraps(stock)
    def step(*args: Any, **kwargs: Any) -> Any:
        found = stock(*args, **kwargs)
        round_weights(stages, config, layout)
        return found

    optimizer.step = step
    return optimizer


def _check_cuts(name: str, parameter: Tensor, form: Format, layout: Layout) -> None:
    height, width = form.block
    for cut in cuts_of(parameter):
        block = width if cut.dim == parameter.dim() - 1 else height if cut.dim == parameter.dim() - 2 else 1
        here, parts = parameter.shape[cut.dim], getattr(layout, cut.axis).size
        if here % block:
            raise ValueError(
                f"phase.quantized_weights: parallel.{cut.axis} {parts} leaves {here} of {here * parts} along dim "
                f"{cut.dim} of {name}, not a multiple of its quantization block of {block}: lower parallel.{cut.axis}"
            )
