"""Wide linears and block diagonals against plain products, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron_dsv41.ops.linear import ref, split
from megatron_dsv41.ops.registry import load
from megatron_dsv41.ops.rope import ref as rope
from megatron_dsv41.testing.bench import relative_error
from megatron_dsv41.testing.interpreter import DEVICE
from megatron_dsv41.testing.operators import Operators

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


def rotary(tokens, pairs, provider="ref", **kwargs):
    cos, sin = rope.cos_sin(37 * torch.arange(tokens, **kwargs), rope.plain_frequencies(2 * pairs, 10000.0))
    return ref.Turn(cos, sin, *(load(f"rope.{name}", provider) for name in ("rotate", "rotate_owned")))


def overwriting(turn):
    """The same turn by a provider that leaves nothing of what it was given."""

    def rotate_owned(x, *args, **kwargs):
        out = turn.rotate_owned(x, *args, **kwargs).clone()
        x.fill_(torch.nan)
        return out

    return turn._replace(rotate_owned=rotate_owned)


def test_block_diagonal_turns_back_gradcheck():
    turn = overwriting(rotary(2, 2))
    turn = turn._replace(cos=turn.cos.double(), sin=turn.sin.double())
    x, weight = leaves((2, 4, 6), (2, 3, 12))
    assert torch.autograd.gradcheck(lambda a, b: ref.block_diagonal(a, b, turn), [x, weight])


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("provider", ["ref", pytest.param("triton", marks=pytest.mark.triton)])
def test_block_diagonal_turns_back_with_the_bits_of_two_steps(tokens, provider):
    device = "cpu" if provider == "ref" else DEVICE
    turn = rotary(tokens, 2, provider, device=device)
    x, weight = leaves((tokens, 6, 8), (3, 5, 16), dtype=torch.float32, device=device)
    seen = []
    fused = ref.block_diagonal(x * 1, weight, turn)
    inner = x * 1
    inner.register_hook(seen.append)
    hooked = ref.block_diagonal(inner, weight, turn)
    steps = ref.block_diagonal(turn.rotate(x, turn.cos, turn.sin, inverse=True).flatten(1), weight)
    grad = torch.randn_like(steps)
    wanted = torch.autograd.grad(steps, [x, weight], grad)
    for y in (fused, fused, hooked):  # a second backward, and one that is looked at, find the same
        found = torch.autograd.grad(y, [x, weight], grad, retain_graph=True)
        assert torch.equal(y, steps) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert len(seen) == 1 and torch.equal(seen[0], wanted[0])


def test_block_diagonal_turns_back_what_others_read_too():
    """Its input keeps its values, and its gradient is only its own part of the input's."""
    turn = overwriting(rotary(3, 2))
    x, weight = leaves((3, 4, 6), (2, 3, 12), dtype=torch.float32)
    kept = x.detach().clone()
    (alone,) = torch.autograd.grad(ref.block_diagonal(x, weight, turn).sum(), x)
    (both,) = torch.autograd.grad(ref.block_diagonal(x, weight, turn).sum() + (x * 2).sum(), x)
    assert torch.equal(both, alone + 2) and torch.equal(x.detach(), kept)
    again = checkpoint(lambda a: ref.block_diagonal(a * 1, weight, turn), x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again.sum(), x)[0], alone)


def test_gradients_of_split_have_the_bits_of_sums_and_casts(monkeypatch):
    """No sum in fp32 is made beside the two products of a gradient."""
    products, stock = [], split.wide_product
    monkeypatch.setattr(split, "wide_product", lambda a, b: products.append(stock(a, b)) or products[-1])
    x, weight = leaves((33, 96), (24, 96), dtype=torch.bfloat16)
    y = split.wide_linear(x, weight)
    grad = torch.randn_like(y)
    with Operators() as operators:
        of_x, of_weight = torch.autograd.grad(y, [x, weight], grad)
    assert {row.dtype for row in operators.made if row.operator in ("add", "sub")} == {torch.bfloat16}
    _, x_high, x_low, weight_high, weight_low = products
    assert torch.equal(of_x, (x_high + x_low).bfloat16())
    assert torch.equal(of_weight, (weight_high + weight_low).bfloat16())
