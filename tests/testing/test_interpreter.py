"""What Triton's interpreter makes of floats is what a GPU makes of them: the same tests pass on both."""

import pytest
import torch

from megatron_dsv41.testing.interpreter import DEVICE

pytestmark = pytest.mark.triton
triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def convert(x_ptr, out_ptr, SIZE: tl.constexpr):
    here = tl.arange(0, SIZE)
    tl.store(out_ptr + here, tl.load(x_ptr + here).to(out_ptr.dtype.element_ty))


@triton.jit
def multiply(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_floats_are_rounded_to_nearest_even(target):
    """Ties of every kind, signed zeros, subnormals of the target, what only its largest number can stand for, NaN."""
    steps = torch.tensor([1.0, 1.03125, 1.0625, 1.09375, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11])
    values = torch.cat([steps * 2.0**power for power in (-9, -7, 0, 8)])
    odd = [0.0, -0.0, 448.0, 463.0, torch.nan] + ([1e-40] if target == torch.bfloat16 else [])
    x = torch.nn.functional.pad(torch.cat([values, -values, torch.tensor(odd)]), (0, 128))[:128].to(DEVICE)
    found = torch.empty(128, dtype=target, device=DEVICE)
    convert[(1,)](x, found, SIZE=128)
    want = x.to(target) if target != torch.float8_e4m3fn else x.clamp(-448, 448).to(target)
    number = ~x.isnan()
    assert torch.equal(found.float()[number], want.float()[number]) and bool(found.float()[~number].isnan().all())
    assert torch.equal(found.float().signbit()[number], want.float().signbit()[number])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_of_values(dtype):
    a, b = (torch.randint(-8, 9, (16, 16)).to(DEVICE, dtype) for _ in range(2))
    found = torch.empty(16, 16, device=DEVICE)
    multiply[(1,)](a, b, found, SIZE=16)
    assert torch.equal(found, a.float() @ b.float())
