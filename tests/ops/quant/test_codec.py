"""Storage codecs: golden values, exactness, ties, odd shapes, scale dtypes."""

from __future__ import annotations

import pytest
import torch

from megatron_dsv41.ops.quant import ref
from megatron_dsv41.ops.quant.codec import (
    FP4_ROW32,
    FP8_BLOCK32,
    FP8_ROW32,
    Format,
    Quantized,
    decode,
    encode,
    scale_bytes,
)

FORMATS = [FP8_BLOCK32, FP8_ROW32, FP4_ROW32]
GOLDEN = [
    0.10009765625,
    -0.25,
    0.30078125,
    0.69921875,
    -1.296875,
    2,
    3.09375,
    -4.40625,
    0.050048828125,
    0.8984375,
]
GOLDEN += [1.1015625, -2.59375, 5, -0.6015625, 1.75, 0]
GOLDEN_FP8 = [
    0.1015625,
    -0.25,
    0.3125,
    0.6875,
    -1.25,
    2,
    3,
    -4.5,
    0.05078125,
    0.875,
    1.125,
    -2.5,
    5,
    -0.625,
    1.75,
    0,
]
GOLDEN_FP4 = [0, -0.0, 0.5, 0.5, -1.5, 2, 3, -4, 0, 1, 1, -3, 4, -0.5, 2, 0]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def random_matrix(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    size = torch.exp2(torch.randint(-20, 8, (rows, 1), generator=generator).float())
    return (torch.randn(rows, columns, generator=generator) * size).to(dtype)


@pytest.mark.parametrize(("form", "scale", "want"), [(FP8_ROW32, 127 - 6, GOLDEN_FP8), (FP4_ROW32, 127, GOLDEN_FP4)])
def test_golden_values(form, scale, want):
    quantized = encode(torch.tensor([GOLDEN], dtype=torch.bfloat16), form)
    assert scale_bytes(quantized.scale).tolist() == [[scale]]
    assert torch.equal(bits(decode(quantized)), bits(torch.tensor([want], dtype=torch.bfloat16)))


@pytest.mark.parametrize("form", [FP8_ROW32, FP4_ROW32])
def test_same_values_as_the_activation_formats(form):
    """Where no amax floor acts, storing a matrix and fake-quantizing it are one function."""
    x = random_matrix(64, 96)
    fake = ref.fake_fp8(x) if form is FP8_ROW32 else ref.fake_mxfp4(x)
    assert torch.equal(bits(decode(encode(x, form))), bits(fake))


def test_fp4_packs_two_columns_a_byte_even_column_low():
    quantized = encode(torch.tensor([[0.5, -6.0, 1.5, 0.0]]), FP4_ROW32)
    assert quantized.data.dtype == torch.int8
    assert quantized.data.view(torch.uint8).tolist() == [[0xF1, 0x03]]
    assert quantized.shape == (1, 4) and decode(quantized).shape == (1, 4)


def test_fp4_ties_go_to_the_even_code():
    values = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -2.5, 6.0]
    want = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.0, -2.0, 6.0]
    got = decode(encode(torch.tensor([values]), FP4_ROW32), torch.float32)
    assert torch.equal(bits(got), bits(torch.tensor([want])))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", [(1, 32), (32, 32), (33, 2), (31, 62), (65, 98), (64, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decoded_values_encode_to_themselves(form, shape, dtype):
    quantized = encode(random_matrix(*shape, dtype), form)
    assert tuple(quantized.data.shape) == form.data_shape(shape)
    assert tuple(quantized.scale.shape) == form.scale_shape(shape)
    values = decode(quantized, dtype)
    assert torch.equal(bits(values), bits(decode(encode(values, form), dtype)))
    again = encode(values, form, kept=quantized.scale)
    assert torch.equal(bits(again.data), bits(quantized.data)) and torch.equal(bits(again.scale), bits(quantized.scale))


@pytest.mark.parametrize("form", FORMATS)
def test_error_is_at_most_half_a_step(form):
    x = random_matrix(96, 64, torch.float32)
    quantized = encode(x, form)
    scale = scale_bytes(quantized.scale).double().sub(127).exp2()
    scale = scale.repeat_interleave(form.block[0], 0).repeat_interleave(form.block[1], 1)
    largest_step = 32.0 if form.element == "e4m3" else 2.0
    assert bool(((decode(quantized, torch.float32).double() - x.double()).abs() <= scale * largest_step / 2).all())


@pytest.mark.parametrize("form", FORMATS)
def test_every_element_code_survives(form):
    """All 256 bytes but E4M3's two NaNs, under every scale at which bfloat16 holds them."""
    byte = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    data = byte.view(torch.int8) if form.element == "e2m1" else byte[(byte & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    data = data.expand(32, -1).contiguous()
    for scale in (6, 100, 127, 150, 246):
        shape = form.scale_shape((32, data.shape[1] * (2 if form.element == "e2m1" else 1)))
        quantized = Quantized(data, torch.full(shape, scale, dtype=torch.uint8), form.block, form.element)
        again = encode(decode(quantized), form, kept=quantized.scale)
        assert torch.equal(bits(again.data), bits(data))
        assert torch.equal(bits(decode(quantized).float()), bits(decode(quantized, torch.float32)))


def test_kept_scales_are_needed_and_kept_per_block():
    """Values 3 and below fit scale 1 and scale 1/2; the rule would pick the smaller and change the bytes."""
    data = torch.zeros(2, 32)
    data[:, 0] = 3.0
    kept = torch.full((2, 1), 127, dtype=torch.uint8)
    assert scale_bytes(encode(data, FP4_ROW32).scale).flatten().tolist() == [126, 126]
    assert scale_bytes(encode(data, FP4_ROW32, kept=kept).scale).flatten().tolist() == [127, 127]
    data[1, 5] = 0.7  # trained: this block is quantized anew, the other one is not touched
    assert scale_bytes(encode(data, FP4_ROW32, kept=kept).scale).flatten().tolist() == [127, 126]


@pytest.mark.parametrize("form", FORMATS)
def test_zero_block_has_scale_one(form):
    quantized = encode(torch.tensor([[0.0, -0.0] * 32]), form)
    assert set(scale_bytes(quantized.scale).flatten().tolist()) == {127}
    assert torch.equal(bits(decode(quantized)), bits(torch.tensor([[0.0, -0.0] * 32], dtype=torch.bfloat16)))
    kept = torch.full(quantized.scale.shape, 3, dtype=torch.uint8)
    assert set(scale_bytes(encode(decode(quantized), form, kept=kept).scale).flatten().tolist()) == {3}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu, torch.float32])
@pytest.mark.parametrize("form", FORMATS)
def test_scale_dtypes_mean_the_same(form, dtype):
    """A scale byte of 120 is 2^-7 in every dtype, never the number 120."""
    x = random_matrix(40, 70)
    quantized, plain = encode(x, form, scale_dtype=dtype), encode(x, form)
    assert quantized.scale.dtype == dtype
    assert torch.equal(scale_bytes(quantized.scale), scale_bytes(plain.scale))
    assert torch.equal(bits(decode(quantized)), bits(decode(plain)))


def test_scale_120_is_two_to_the_minus_seven():
    data = torch.ones(1, 32).to(torch.float8_e4m3fn)
    for scale in (torch.tensor([[120]], dtype=torch.uint8), torch.tensor([[2.0**-7]])):
        assert float(decode(Quantized(data, scale, (1, 32), "e4m3"))[0, 0]) == 2.0**-7


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.tensor([[255]], dtype=torch.uint8), "NaN"),
        (torch.tensor([[255]], dtype=torch.uint8).view(torch.float8_e8m0fnu), "NaN"),
        (torch.tensor([[float("nan")]]), "NaN"),
        (torch.tensor([[120.0]]), "not powers of two"),
        (torch.tensor([[0.0]]), "not powers of two"),
        (torch.tensor([[-2.0]]), "not powers of two"),
        (torch.tensor([[float("inf")]]), "not powers of two"),
        (torch.tensor([[1.0]], dtype=torch.bfloat16), "must be E8M0"),
        (torch.tensor([[1, 1]], dtype=torch.uint8), "must have shape"),
    ],
)
def test_bad_scales_are_refused(scale, message):
    with pytest.raises(ValueError, match=message):
        decode(Quantized(torch.ones(1, 32).to(torch.float8_e4m3fn), scale, (1, 32), "e4m3"))


@pytest.mark.parametrize("scale", [0, 254])
def test_extreme_scales_are_exact_or_an_error(scale):
    scales = torch.full((1, 1), scale, dtype=torch.uint8)
    one = torch.zeros(1, 32)
    one[0, 0] = 1.0
    value = decode(Quantized(one.to(torch.float8_e4m3fn), scales, (1, 32), "e4m3"))[0, 0]
    assert float(value) == 2.0 ** (scale - 127)
    one[0, 0] = 448.0 if scale else 2.0**-9
    with pytest.raises(ValueError, match="outside the range"):
        decode(Quantized(one.to(torch.float8_e4m3fn), scales, (1, 32), "e4m3"))


def test_smallest_and_largest_finite_values_encode():
    for value in (2.0**-126, 2.0**127):
        x = torch.zeros(1, 32, dtype=torch.bfloat16)
        x[0, 0] = value
        for form in (FP8_ROW32, FP4_ROW32):
            assert abs(float(decode(encode(x, form), torch.float32)[0, 0]) / value - 1) < 0.25


@pytest.mark.parametrize("form", FORMATS)
def test_bad_input_is_refused(form):
    with pytest.raises(ValueError, match="non-finite"):
        encode(torch.tensor([[float("inf"), 0.0]]), form)
    with pytest.raises(ValueError, match="data must be"):
        decode(Quantized(torch.zeros(1, 32), torch.zeros(1, 1, dtype=torch.uint8), form.block, form.element))


def test_packed_fp4_needs_even_columns():
    with pytest.raises(ValueError, match="even number of columns"):
        encode(torch.zeros(2, 31), FP4_ROW32)


def test_scale_rule_equals_exact_arithmetic():
    """The reciprocal form of the rule agrees with ceil(log2(amax / largest)) for every normal bfloat16."""
    every = torch.arange(0x80, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for element, largest, top in (("e4m3", 1.75, 8), ("e2m1", 1.5, 2)):
        mantissa, exponent = torch.frexp(every.double())
        want = exponent - 1 - top + (mantissa * 2 > largest).int() + 127
        got = scale_bytes(encode(every[:, None].expand(-1, 2), Format(element, (1, 32))).scale).flatten().int()
        normal = want > 0
        assert torch.equal(got[normal], want[normal].int())
