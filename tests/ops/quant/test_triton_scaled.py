"""E4M3 operands with scales. On CUDA, or with TRITON_INTERPRET=1 on the CPU."""

import pytest
import torch

from megatron_dsv41.testing.interpreter import DEVICE

pytestmark = pytest.mark.triton
HALF_STEP = 2.0**-4  # of E4M3, relative to a value


def draw(*shape):
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(*shape, generator=generator) * 4
    return (torch.randn(*shape, generator=generator) * 10**spread).to(DEVICE, torch.bfloat16)


def check(q, scale, want):
    """q [..., n] with one scale per leading index against want."""
    assert q.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    largest = want.float().abs().amax(-1)
    torch.testing.assert_close(scale * 448, largest.clamp_min(1e-30), rtol=1e-5, atol=0)
    # Below 2^-6 of the grid steps are constant: half of one is 2^-10 of the scale.
    error = (q.float() * scale[..., None] - want.float()).abs()
    assert (error <= HALF_STEP * want.float().abs() + scale[..., None] * 2.0**-10).all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (7, 2304), (130, 5120)])
def test_rows(rows, columns):
    from megatron_dsv41.ops.quant import triton_scaled

    x = draw(rows, columns)
    x[0] = 0
    check(*triton_scaled.scaled_rows(x), x)


def test_factors_of_groups():
    from megatron_dsv41.ops.quant import triton_scaled

    x, factors = draw(5, 80), torch.rand(3, 80, device=DEVICE) + 0.5
    group = torch.tensor([0, 0, 2, 2, 2], device=DEVICE)
    check(*triton_scaled.scaled_rows(x, factors, group), x.float() * factors[group])


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 144, 80), (2, 272, 200)])
def test_transposes_hold_the_same_values(shape):
    from megatron_dsv41.ops.quant import triton_scaled

    x = draw(*shape)
    q, scale = triton_scaled.scaled_rows(x.flatten(0, 1))
    transposed = triton_scaled.scaled_transposes(x, scale)
    assert torch.equal(transposed.float(), q.view_as(x).float().transpose(1, 2))


def test_a_nan_stays_one():
    from megatron_dsv41.ops.quant import triton_scaled

    x = draw(4, 64)
    x[2, 5] = float("nan")
    q, scale = triton_scaled.scaled_rows(x)
    assert not torch.isfinite(q[2].float() * scale[2]).all() and torch.isfinite(q[1].float() * scale[1]).all()
