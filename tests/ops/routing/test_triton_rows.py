"""Rows to experts and back on a GPU, against the definition."""

import pytest
import torch

from megatron_dsv41.ops.routing import ref

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("tokens", "dim", "chosen"), [(0, 64, 2), (1, 1, 1), (127, 5120, 6), (4001, 1030, 3)])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float32])
def test_equals_the_definition_bitwise(tokens, dim, chosen, source, target):
    from megatron_dsv41.ops.routing import triton_rows

    place_TK = torch.randperm(tokens * chosen, device="cuda").view(tokens, chosen)
    x_TD = torch.randn(tokens, dim, device="cuda").to(source)
    assert torch.equal(triton_rows.spread_rows(x_TD, place_TK, target), ref.spread_rows(x_TD, place_TK, target))
    rows_PD = torch.randn(tokens * chosen, dim, device="cuda").to(source)
    assert torch.equal(triton_rows.sum_rows(rows_PD, place_TK, target), ref.sum_rows(rows_PD, place_TK, target))
