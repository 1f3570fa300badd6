"""Newton-Schulz and the Muon step, against loops in fp64."""

import pytest
import torch

from megatron_dsv41.optim.muon import EXACT, FAST, STEPS, muon_direction, muon_update, newton_schulz


def plain_newton_schulz(matrix, steps=STEPS):
    """One matrix, fp64, as the report writes it."""
    x = matrix.double() / matrix.double().norm()
    for a, b, c in steps:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(7, 13), (13, 7), (1, 5), (5, 1), (16, 16), (3, 100)])
def test_newton_schulz_is_the_plain_loop(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    expected = plain_newton_schulz(matrix)
    torch.testing.assert_close(newton_schulz(matrix).double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(newton_schulz(matrix.double()), expected, rtol=0, atol=1e-12)


def test_the_published_steps():
    assert STEPS == (FAST,) * 8 + (EXACT,) * 2
    assert FAST == (3.4445, -4.7750, 2.0315) and EXACT == (2.0, -1.5, 0.5)


def test_matrices_of_a_stack_do_not_mix():
    stack = torch.randn(2, 3, 6, 4, generator=torch.Generator().manual_seed(0))
    alone = torch.stack([torch.stack([newton_schulz(m) for m in row]) for row in stack])
    torch.testing.assert_close(newton_schulz(stack), alone, rtol=0, atol=1e-6)


def test_singular_values_become_one():
    matrix = torch.randn(24, 64, generator=torch.Generator().manual_seed(1)).double()
    values = torch.linalg.svdvals(newton_schulz(matrix))
    torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=1e-3)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(newton_schulz(matrix), u @ vh, rtol=0, atol=1e-3)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-15, 1e20])
def test_any_scale(scale):
    matrix = torch.randn(5, 9, generator=torch.Generator().manual_seed(2))
    expected = plain_newton_schulz(matrix) if scale >= 1e-15 else None
    found = newton_schulz(matrix * scale)
    assert torch.isfinite(found).all()
    if scale == 0:
        assert not found.any()
    elif expected is not None:
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


def test_bf16_products_stay_close():
    matrix = torch.randn(32, 48, generator=torch.Generator().manual_seed(3))
    found = newton_schulz(matrix, dtype=torch.bfloat16)
    assert found.dtype == torch.float32
    assert (found - newton_schulz(matrix)).norm() / newton_schulz(matrix).norm() < 0.05


@pytest.mark.parametrize("shape", [(64, 64), (128, 48), (48, 128), (4, 96, 32)])
def test_update_rms(shape):
    gaussian = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    rms = muon_direction(gaussian).square().mean().sqrt()
    assert rms == pytest.approx(0.18, rel=0.05)


@pytest.mark.parametrize("nesterov", [True, False])
def test_step_is_the_plain_step(nesterov):
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(6, 10, generator=generator)
    momentum, plain, plain_momentum = torch.zeros_like(weight), weight.double(), torch.zeros(6, 10).double()
    for _ in range(4):
        grad = torch.randn(6, 10, generator=generator)
        muon_update(weight, grad, momentum, muon_direction, lr=0.02, decay=0.1, nesterov=nesterov)
        plain_momentum = 0.95 * plain_momentum + grad.double()
        update = 0.95 * plain_momentum + grad.double() if nesterov else plain_momentum
        plain = plain * (1 - 0.02 * 0.1) - 0.02 * plain_newton_schulz(update) * 10**0.5 * 0.18
    torch.testing.assert_close(weight.double(), plain, rtol=0, atol=1e-6)
    torch.testing.assert_close(momentum.double(), plain_momentum, rtol=0, atol=1e-5)


def test_bf16_momentum_rounds_only_what_is_kept():
    grad = torch.randn(6, 10, generator=torch.Generator().manual_seed(6))
    one, two = torch.zeros(6, 10), torch.zeros(6, 10)
    short = torch.zeros(6, 10, dtype=torch.bfloat16)
    muon_update(one, grad, torch.zeros(6, 10), muon_direction, lr=0.1, decay=0.0)
    muon_update(two, grad, short, muon_direction, lr=0.1, decay=0.0)
    assert torch.equal(one, two)
    assert torch.equal(short, grad.bfloat16())
