"""Losses from the hidden state: the definition against torch's cross-entropy, providers against it."""

import pytest
import torch
import torch.nn.functional as F

from megatron_dsv41.ops.head import blocked, ref
from megatron_dsv41.testing.bench import relative_error
from megatron_dsv41.testing.operators import Operators

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def operands(tokens, vocabulary, dim=16, dtype=torch.float32, device="cpu", size=1.0):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(tokens, dim, generator=generator), torch.randn(vocabulary, dim, generator=generator)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    x, weight = ((t * size).to(device, dtype).requires_grad_() for t in (x, weight))
    return x, weight, labels.to(device)


def run(function, x, weight, labels):
    losses = function(x, weight, labels)
    share = torch.linspace(0, 1, losses.numel(), device=losses.device, dtype=losses.dtype)  # some tokens weigh nothing
    return [losses, *torch.autograd.grad((losses * share).sum(), [x, weight])]


@pytest.mark.parametrize("function", [ref.losses, blocked.losses])
def test_equals_cross_entropy(function):
    x, weight, labels = operands(7, 11)
    logits = F.linear(x, weight)
    torch.testing.assert_close(function(x, weight, labels), F.cross_entropy(logits, labels, reduction="none"))


@pytest.mark.parametrize("block", [1, 5, 8, 11, 100])
@pytest.mark.parametrize("function", [ref.losses, blocked.losses])
def test_gradcheck(function, block, monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK", block)
    x, weight, labels = operands(3, 11, dim=4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: function(a, b, labels), [x, weight])


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("size", [1e-4, 1.0, 30.0])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 1), (33, 257), (64, 300)])
def test_bf16_is_as_near_to_fp64_as_fp32_products(tokens, vocabulary, size, device, monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK", 128)
    x, weight, labels = operands(tokens, vocabulary, dim=64, dtype=torch.bfloat16, device=device, size=size)
    exact = run(ref.losses, *(t.detach().double().requires_grad_() for t in (x, weight)), labels)
    own, found = run(ref.losses, x, weight, labels), run(blocked.losses, x, weight, labels)
    for want, plain, got in zip(exact, own, found, strict=True):
        assert got.dtype == plain.dtype
        assert relative_error(got, want) <= 1.5 * relative_error(plain, want) + 2e-5


def test_huge_logits_stay_finite():
    x, weight, labels = operands(5, 20, size=1e8)
    for function in (ref.losses, blocked.losses):
        assert all(torch.isfinite(t).all() for t in run(function, x, weight, labels))


def test_at_most_one_block_of_logits_exists(monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK", 32)
    largest = []
    stock = blocked.wide_product
    monkeypatch.setattr(blocked, "wide_product", lambda a, b: largest.append(stock(a, b)) or largest[-1])
    x, weight, labels = operands(50, 320, dim=8)
    run(blocked.losses, x, weight, labels)
    assert max(t.numel() for t in largest) == 50 * 32


def test_rows_of_the_weights_gradient_are_rounded_as_they_are_added(monkeypatch):
    """The bits of a sum in fp32 and a cast: each product is read once, and nothing as large is made beside them."""
    monkeypatch.setattr(blocked, "BLOCK", 128)
    products, stock = [], blocked.wide_product
    monkeypatch.setattr(blocked, "wide_product", lambda a, b: products.append(stock(a, b)) or products[-1])
    x, weight, labels = operands(33, 257, dim=64, dtype=torch.bfloat16)
    with Operators() as operators:
        weight_gradient = run(blocked.losses, x, weight, labels)[2]
    pairs = [product for product in products if product.shape[1] == 64 and product.shape[0] != 33]
    wanted = torch.cat([a + b for a, b in zip(pairs[::2], pairs[1::2], strict=True)])
    assert torch.equal(weight_gradient, wanted.bfloat16())
    sums = [row for row in operators.made if row.operator == "add" and row.shape[-1] == 64 and row.shape[0] != 33]
    assert {row.dtype for row in sums} == {torch.bfloat16} and len(sums) == 3
