"""Rows to experts and back, against the definition. On a CUDA device, or with TRITON_INTERPRET=1 on the CPU."""

import os

import pytest
import torch

from megatron_dsv41.ops.routing import ref

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if INTERPRETED else pytest.mark.gpu
DEVICE = "cpu" if INTERPRETED else "cuda"
LARGE = [(7, 1030, 3)] if INTERPRETED else [(127, 5120, 6), (4001, 1030, 3)]


def draw(*shape):
    """Where the interpreter would cut off instead of rounding, whole numbers, which every dtype keeps."""
    values = torch.randn(*shape, device=DEVICE)
    return (8 * values).round() if INTERPRETED else values


@pytest.mark.parametrize(("tokens", "dim", "chosen"), [(0, 64, 2), (1, 1, 1), *LARGE])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float32])
def test_equals_the_definition_bitwise(tokens, dim, chosen, source, target):
    from megatron_dsv41.ops.routing import triton_rows

    for rows in {tokens * chosen, tokens * chosen // 3, 0}:  # others have no place
        place_TK = torch.randperm(tokens * chosen, device=DEVICE).view(tokens, chosen)
        place_TK = place_TK.where(place_TK < rows, -1)
        x_TD = draw(tokens, dim).to(source)
        spread = [module.spread_rows(x_TD, place_TK, rows, target) for module in (triton_rows, ref)]
        assert spread[0].shape == (rows, dim) and torch.equal(*spread)
        rows_PD = draw(rows, dim).to(source)
        summed = [module.sum_rows(rows_PD, place_TK, target) for module in (triton_rows, ref)]
        assert torch.equal(*summed)
