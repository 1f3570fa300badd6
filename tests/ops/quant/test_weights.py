"""Rounded weights are what a checkpoint would hold, bit for bit."""

import pytest
import torch

from megatron_dsv41.ops.quant.codec import FP4_ROW32, FP8_BLOCK32, FP8_ROW32, decode, encode
from megatron_dsv41.ops.quant.weights import round_weight


@pytest.mark.parametrize("form", [FP4_ROW32, FP8_BLOCK32, FP8_ROW32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 32), (64, 96), (33, 70), (5000, 64)])
def test_equals_the_codec(form, dtype, shape):
    generator = torch.Generator().manual_seed(shape[0])
    size = torch.exp2(torch.randint(-30, 20, (shape[0], 1), generator=generator).float())
    x = (torch.randn(shape, generator=generator) * size).to(dtype)
    x[0, :32] = 0  # a block of zeros
    rounded = round_weight(x, form)
    assert rounded.dtype == dtype and torch.equal(rounded, decode(encode(x, form), dtype))
    assert not torch.equal(rounded, x)
    # What is exported later is rounded once more: nothing may move.
    assert torch.equal(decode(encode(rounded, form), dtype), rounded) and torch.equal(
        round_weight(rounded, form), rounded
    )
