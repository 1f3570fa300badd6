"""Rows to experts and back, against the definition. On a CUDA device, or with TRITON_INTERPRET=1 on the CPU."""

import pytest
import torch

from megatron_dsv41.ops.routing import ref
from megatron_dsv41.testing.interpreter import DEVICE, INTERPRETED

pytestmark = pytest.mark.triton
LARGE = [(7, 1030, 3)] if INTERPRETED else [(127, 5120, 6), (4001, 1030, 3)]


@pytest.mark.parametrize(("tokens", "dim", "chosen"), [(0, 64, 2), (1, 1, 1), *LARGE])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float32])
def test_equals_the_definition_bitwise(tokens, dim, chosen, source, target):
    from megatron_dsv41.ops.routing import triton_rows

    for rows in {tokens * chosen, tokens * chosen // 3, 0}:  # others have no place
        place_TK = torch.randperm(tokens * chosen, device=DEVICE).view(tokens, chosen)
        place_TK = place_TK.where(place_TK < rows, -1)
        x_TD = torch.randn(tokens, dim, device=DEVICE).to(source)
        spread = [module.spread_rows(x_TD, place_TK, rows, target) for module in (triton_rows, ref)]
        assert spread[0].shape == (rows, dim) and torch.equal(*spread)
        rows_PD = torch.randn(rows, dim, device=DEVICE).to(source)
        summed = [module.sum_rows(rows_PD, place_TK, target) for module in (triton_rows, ref)]
        assert torch.equal(*summed)
