"""Linears that add to Megatron's gradient buffer themselves."""

import pytest
import torch

from megatron_dsv41.backends.megatron.fused_gradient import FusedLinear
from megatron_dsv41.ops.registry import Ops

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def linear(dtype, device="cpu"):
    part = FusedLinear(6, 4, dtype, 1.0, Ops()).to(device)
    part.weight.main_grad = torch.ones(4, 6, device=device)
    return part


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_buffer_holds_the_unrounded_sum(dtype, device):
    part = linear(dtype, device)
    expected = torch.ones(4, 6, dtype=torch.float64, device=device)
    for _ in range(3):
        x = torch.randn(5, 2, 6, device=device).to(dtype).requires_grad_()
        grad = torch.randn(5, 2, 4, device=device).to(dtype)
        part(x).backward(grad)
        expected += grad.double().flatten(0, 1).T @ x.double().flatten(0, 1)
        assert x.grad is not None
        torch.testing.assert_close(x.grad, (grad.double() @ part.weight.double()).to(dtype))
    assert part.weight.grad_added_to_main_grad
    torch.testing.assert_close(part.weight.main_grad.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_frozen_weight_gets_nothing():
    part = linear(torch.float32)
    part.weight.requires_grad_(False)
    x = torch.randn(3, 6, requires_grad=True)
    part(x).sum().backward()
    assert part.weight.main_grad.eq(1).all() and x.grad is not None
