"""Wide linears and block diagonals against plain products, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from megatron_dsv41.ops.linear import ref, split
from megatron_dsv41.testing.bench import relative_error

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def leaves(*shapes, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (0,)])
@pytest.mark.parametrize("groups", [1, 3])
def test_block_diagonal_is_a_linear_per_group(shape, groups, device):
    x, weight = leaves((*shape, groups * 6), (groups, 4, 6), device=device)
    y = ref.block_diagonal(x, weight)
    expected = torch.cat([F.linear(part, block) for part, block in zip(x.chunk(groups, -1), weight, strict=True)], -1)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(y)
    found, wanted = (torch.autograd.grad(out, [x, weight], grad, retain_graph=True) for out in (y, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_block_diagonal_gradcheck():
    assert torch.autograd.gradcheck(ref.block_diagonal, leaves((2, 3, 8), (2, 3, 4)))


@pytest.mark.parametrize("function", [ref.wide_linear, split.wide_linear])
def test_wide_linear_gradcheck(function):
    assert torch.autograd.gradcheck(function, leaves((2, 3, 4), (5, 4)))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("tokens", [1, 33, 127])
def test_split_is_as_near_to_fp64_as_fp32_products(tokens, size, device):
    operands = leaves((tokens, 96), (24, 96), dtype=torch.bfloat16, device=device)
    x, weight = ((t.detach() * size).requires_grad_() for t in operands)

    def run(function, *inputs):
        y = function(*inputs)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return [y, *torch.autograd.grad(y, inputs, grad.to(y.device, y.dtype))]

    exact = run(ref.wide_linear, *(t.detach().double().requires_grad_() for t in (x, weight)))
    own, found = (run(function, x, weight) for function in (ref.wide_linear, split.wide_linear))
    for want, plain, got in zip(exact, own, found, strict=True):
        assert got.dtype == plain.dtype
        assert relative_error(got, want) <= 1.5 * relative_error(plain, want) + 1e-6


def test_split_refuses_two_dtypes():
    with pytest.raises(ValueError, match="x is torch.float32, weight torch.bfloat16"):
        split.wide_linear(torch.zeros(1, 4), torch.zeros(2, 4, dtype=torch.bfloat16))
