"""Rounded sums and parts: the bits of two steps, without the tensors between them."""

import pytest
import torch

from megatron_dsv41.ops.numerics import parts, rounded_sum
from megatron_dsv41.testing.operators import Operators

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HOSTILE = [torch.inf, -torch.inf, torch.nan, -0.0, 0.0, 3.3e38, -3.4e38, 1e-40, 1.00390625, 1.01171875]


def values(seed, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(500, generator=generator) * torch.randn(500, generator=generator).mul(9).exp()
    return torch.cat([x, torch.tensor(HOSTILE), torch.tensor(HOSTILE[::-1])]).to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shared", [torch.bfloat16, torch.float32])
def test_sum_has_the_bits_of_a_sum_and_a_cast(shared, dtype, device):
    a, b = values(0, torch.float32, device).requires_grad_(), values(1, shared, device).requires_grad_()
    ours, steps = rounded_sum(a, b, dtype), (a + b).to(dtype)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, steps, rtol=0, atol=0, equal_nan=True)
    grad = values(2, dtype, device)
    for one, two in zip(*(torch.autograd.grad(y, [a, b], grad) for y in (ours, steps)), strict=True):
        assert one.dtype == two.dtype
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_sum_makes_nothing_wide_but_the_wide_gradient(device):
    a, b = values(0, torch.float32, device).requires_grad_(), values(1, torch.bfloat16, device).requires_grad_()
    grad = values(2, torch.bfloat16, device)
    with Operators() as operators:
        torch.autograd.grad(rounded_sum(a, b, torch.bfloat16), [a, b], grad)
    assert [row[:2] for row in operators.made] == [("add", torch.bfloat16), ("_to_copy", torch.float32)]


@pytest.mark.parametrize("device", DEVICES)
def test_parts_have_the_bits_of_a_difference_and_a_cast(device):
    x = values(0, torch.float32, device)
    with Operators() as operators:
        high, low = parts(x, torch.bfloat16)
    assert torch.float32 not in [row.dtype for row in operators.made]
    torch.testing.assert_close(low, (x - high).to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)
    assert parts(x, torch.float32)[0] is x
