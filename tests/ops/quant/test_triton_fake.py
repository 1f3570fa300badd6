import pytest
import torch

from megatron_dsv41.ops.quant import ref
from megatron_dsv41.testing.interpreter import DEVICE, INTERPRETED

pytestmark = pytest.mark.triton


def hostile(rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Wide ranges, zeros of both signs, ties of the grids, tiny and huge blocks."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 512, generator=g) * torch.exp(3 * torch.randn(rows, 512, generator=g))
    x[0], x[-1] = 0.0, torch.arange(512) * 0.25 - 64
    if rows > 4:
        x[1], x[2], x[3] = -0.0, x[2] * 1e-30, x[3] * 1e20
    return x.to(DEVICE, dtype)


@pytest.mark.parametrize("op", ["fake_fp8", "fake_mxfp4", "fake_fp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 39] if INTERPRETED else [1, 127, 4001])
def test_bit_equal(op: str, dtype: torch.dtype, rows: int):
    from megatron_dsv41.ops.quant import triton_fake

    x = hostile(rows, dtype).requires_grad_()
    got, want = getattr(triton_fake, op)(x), getattr(ref, op)(x)
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert torch.equal(got.view(bits), want.view(bits))
    grad = torch.randn_like(x)
    assert torch.equal(torch.autograd.grad(got, x, grad)[0], grad)


def test_refuses_uneven_blocks():
    from megatron_dsv41.ops.quant import triton_fake

    with pytest.raises(ValueError, match="divides the last dimension"):
        triton_fake.fake_fp8(torch.zeros(2, 40, device=DEVICE))


@pytest.mark.parametrize("op", ["fake_fp8", "fake_mxfp4", "fake_fp4"])
def test_nan_is_not_clamped_away(op: str):
    from megatron_dsv41.ops.quant import triton_fake

    x = hostile(5, torch.bfloat16)
    x[4, 3] = torch.nan
    assert getattr(triton_fake, op)(x).isnan().nonzero().tolist() == [[4, 3]] and getattr(ref, op)(x)[4, 3].isnan()
