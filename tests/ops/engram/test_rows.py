"""Rows as bytes against the codec of the released files."""

import pytest
import torch

from megatron_dsv41.ops.engram.rows import RowFormat
from megatron_dsv41.ops.quant.codec import FP8_ROW32, Quantized, decode, encode


def rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(37, 64, generator=generator) * torch.rand(37, 1, generator=generator) ** 8
    values[5], values[6, :32], values[7, 3] = 0, 0, 1e-30
    values[8] *= 2.0 ** torch.randint(-40, 40, (64,), generator=generator)
    return values


def test_float8_is_the_released_storage():
    form, values = RowFormat("float8", 64), rows()
    found, expected = form.encode(values), encode(values, FP8_ROW32)
    assert found.shape == (37, 66) == (37, form.width)
    assert torch.equal(found[:, :64], expected.data.view(torch.uint8))
    assert torch.equal(found[:, 64:], expected.scale.view(torch.uint8))
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(form.decode(found, dtype), decode(expected, dtype))
    again = encode(form.decode(found, torch.float32), FP8_ROW32, kept=expected.scale)
    assert torch.equal(decode(Quantized(again.data, again.scale, (1, 32), "e4m3")), form.decode(found, torch.bfloat16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_plain_rows_round_once(dtype):
    form, values = RowFormat(dtype, 64), rows()
    bytes_ = form.encode(values)
    assert bytes_.dtype is torch.uint8 and bytes_.shape == (37, form.width)
    assert torch.equal(form.decode(bytes_, torch.float32), values.to(getattr(torch, dtype)).float())


def test_float8_needs_whole_scale_blocks():
    with pytest.raises(ValueError, match="does not divide engram_head_dim 40: set engram.table=bfloat16"):
        RowFormat("float8", 40)
