"""Weights as the release would store them: the values of `decode(encode(x))`, on any device (SPEC 10, 18)."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dsv41.ops.quant.codec import Format
from megatron_dsv41.ops.quant.ref import power_of_two_scale, round_e2m1, round_e4m3

ROWS = 4096  # worked on at a time, a multiple of every block's height: bounds the fp32 copies


@torch.no_grad()
def round_weight(x: Tensor, form: Format) -> Tensor:
    """x [rows, columns] bfloat16 or float32 -> the same shape and dtype, on the grid of `form`.

    Partial blocks at the ends count. Values are exact in bfloat16: an element has at most 4 significant bits.
    """
    rounded = torch.empty_like(x)
    for begin in range(0, x.shape[0], ROWS):
        rounded[begin : begin + ROWS] = _round_rows(x[begin : begin + ROWS], form)
    return rounded


def _round_rows(x: Tensor, form: Format) -> Tensor:
    (rows, columns), (height, width) = x.shape, form.block
    padded = torch.nn.functional.pad(x.float(), (0, -columns % width, 0, -rows % height))
    tiles = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    amax = tiles.abs().amax((1, 3), keepdim=True)
    scale = torch.where(amax == 0, 1.0, power_of_two_scale(amax, 1 / form.largest))
    element = round_e4m3 if form.element == "e4m3" else round_e2m1
    return (element(tiles / scale) * scale).flatten(2, 3).flatten(0, 1)[:rows, :columns].to(x.dtype)
