"""Fake quantization to the bit."""

import pytest
import torch

from megatron_dsv41.ops.quant.ref import fake_fp4, fake_fp8, fake_mxfp4, power_of_two_scale, round_e2m1, round_e4m3

BLOCK = [0.10009765625, -0.25, 0.30078125, 0.69921875, -1.296875, 2, 3.09375, -4.40625]
BLOCK += [0.050048828125, 0.8984375, 1.1015625, -2.59375, 5, -0.6015625, 1.75, 0]
FP8 = [0.1015625, -0.25, 0.3125, 0.6875, -1.25, 2, 3, -4.5, 0.05078125, 0.875, 1.125, -2.5, 5, -0.625, 1.75, 0]
MXFP4 = [0, -0.0, 0.5, 0.5, -1.5, 2, 3, -4, 0, 1, 1, -3, 4, -0.5, 2, 0]
FP4 = [0, -0.40625, 0.40625, 0.8125, -1.21875, 1.625, 3.25, -4.875, 0, 0.8125, 1.21875, -2.4375, 4.875]
FP4 += [-0.40625, 1.625, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("quantize", "golden"), [(fake_fp8, FP8), (fake_mxfp4, MXFP4), (fake_fp4, FP4)])
def test_golden_block(quantize, golden, dtype):
    x = torch.tensor(BLOCK, dtype=dtype)
    y = quantize(x, block=16)
    assert y.dtype == dtype
    assert torch.equal(y.float(), torch.tensor(golden))
    assert torch.equal(y.signbit(), torch.tensor(golden).signbit())


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (7, 6), (-5, -4), (-0.25, -0.0)],
)
def test_e2m1_ties_go_to_the_even_code(value, rounded):
    y = round_e2m1(torch.tensor(float(value)))
    assert y.item() == rounded and y.signbit() == torch.tensor(float(rounded)).signbit()


def test_e2m1_is_nearest_everywhere():
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    x = torch.linspace(0, 8, 4001)
    nearest = (x.clamp(max=6)[:, None] - grid).abs().min(1).values
    torch.testing.assert_close((x.clamp(max=6) - round_e2m1(x)).abs(), nearest)


def test_power_of_two_scale_rounds_up_exactly():
    assert power_of_two_scale(torch.tensor(448.0), 1 / 448).item() in (1.0, 2.0)  # decided by fp32(1/448)
    product = torch.tensor(448.0) * torch.tensor(1 / 448, dtype=torch.float32)
    assert power_of_two_scale(torch.tensor(448.0), 1 / 448).item() == (1.0 if product <= 1 else 2.0)
    for amax in (1e-4, 0.3, 6.0, 7.5, 1e30):
        scale = power_of_two_scale(torch.tensor(amax), 1 / 6).item()
        assert scale / 2 < amax / 6 * (1 + 1e-6) and amax / 6 <= scale * (1 + 1e-6)


def test_e4m3_matches_the_hardware_type():
    x = torch.randn(10000) * 100
    assert torch.equal(round_e4m3(x), x.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert round_e4m3(torch.tensor(1e9)).item() == 448


@pytest.mark.parametrize("quantize", [fake_fp8, fake_mxfp4, fake_fp4])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-6, 1.0, 300.0, 1e4, 1e30])
def test_hostile_ranges_stay_finite_and_idempotent_on_the_grid(quantize, scale):
    x = torch.randn(7, 64) * scale
    y = quantize(x)
    assert y.isfinite().all()
    if quantize is not fake_fp4:  # its scale may round down, so a second pass may clamp again
        assert torch.equal(quantize(y), y)


@pytest.mark.parametrize("quantize", [fake_fp8, fake_mxfp4, fake_fp4])
def test_gradient_is_the_identity_even_where_it_saturates(quantize):
    x = (torch.randn(3, 64) * 5).requires_grad_()
    g = torch.randn(3, 64)
    quantize(x).backward(g)
    assert torch.equal(x.grad, g)


def test_fp4_scale_can_round_down_and_clamp():
    x = torch.zeros(16)
    x[0] = 6 * 1.06  # amax/6 = 1.06 rounds down to 1.0
    assert fake_fp4(x)[0].item() == 6.0


def test_width_must_hold_whole_blocks():
    with pytest.raises(ValueError, match="40 is not a multiple of the quantization block 32"):
        fake_fp8(torch.zeros(2, 40))
