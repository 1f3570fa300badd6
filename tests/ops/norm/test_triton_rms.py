"""RMSNorm in Triton against the definition. On CUDA, or with TRITON_INTERPRET=1 on the CPU."""

import pytest
import torch

from megatron_dsv41.ops.norm import ref
from megatron_dsv41.testing.interpreter import DEVICE, INTERPRETED

pytestmark = pytest.mark.triton
SIZES = [(1, 5120), (33, 80), (5, 1), (3, 5121), (40, 128), (7, 1280)]
SIZES += [(19, 512)] if INTERPRETED else [(127, 1280), (4001, 512), (4001, 5120), (300, 16384)]


def run(function, leaves, grad):
    """Output and both gradients."""
    out = function(*leaves, 1e-20)
    return out, *torch.autograd.grad(out, leaves, grad.to(out.device, out.dtype))


def operands(rows: int, size: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, size, generator=generator), torch.randn(size, generator=generator)
    x[0] *= 1e-8  # an eps of 1e-6 would show
    return [t.to(DEVICE, dtype).requires_grad_() for t in (x, weight)]


def some_gradient(x):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, x.dtype)


def compare(inputs, grad=None):
    """Everything at most 1.5 times as far from fp64 as the definition in the same dtype."""
    from megatron_dsv41.ops.norm import triton_rms

    grad = some_gradient(inputs[0]) if grad is None else grad
    leaves = [t.detach().double().requires_grad_() for t in inputs]
    exact = run(ref.rms_norm, leaves, grad)
    own, found = run(ref.rms_norm, inputs, grad), run(triton_rms.rms_norm, inputs, grad)
    # The gradient of x is a difference of two terms, of which a row of one channel leaves nothing but rounding.
    x, weight = leaves
    terms = (grad.double() * weight * x.square().mean(-1, keepdim=True).rsqrt()).detach()
    scales = [want.norm().clamp_min(1e-300) for want in (exact[0], terms, exact[2])]
    for want, plain, got, scale in zip(exact, own, found, scales, strict=True):
        assert got.dtype == plain.dtype and got.shape == plain.shape and bool(got.isfinite().all())
        of_plain, of_got = ((value.double() - want).norm() / scale for value in (plain, got))
        assert of_got <= 1.5 * of_plain + 1e-6


@pytest.mark.parametrize(("rows", "size"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_gradients(rows: int, size: int, dtype: torch.dtype):
    compare(operands(rows, size, dtype))


@pytest.mark.parametrize("programs", [1, 2, 5, 1000])
def test_any_number_of_programs_shares_the_rows(programs, monkeypatch):
    from megatron_dsv41.ops.norm import triton_rms

    monkeypatch.setattr(triton_rms, "PROGRAMS", programs)
    compare(operands(37, 1280, torch.float32))


@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_rows_far_from_one(size):
    x, weight = operands(9, 640, torch.float32)
    compare([(x.detach() * size).requires_grad_(), weight])


def test_gradients_that_are_views():
    """What sum() and a transpose hand back: one value for all, and rows that do not lie one after the other."""
    x, weight = operands(9, 96, torch.float32)
    compare([x, weight], torch.ones((), device=DEVICE).expand(9, 96))
    compare([x, weight], torch.randn(96, 9, device=DEVICE).T)


def test_same_bits_every_run():
    from megatron_dsv41.ops.norm import triton_rms

    inputs = operands(61 if INTERPRETED else 4001, 1280, torch.bfloat16)
    first, second = (run(triton_rms.rms_norm, inputs, some_gradient(inputs[0])) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_zero_rows_stay_zero():
    from megatron_dsv41.ops.norm import triton_rms

    x, weight = torch.zeros(3, 5120, device=DEVICE, dtype=torch.bfloat16), torch.ones(5120, device=DEVICE)
    assert not triton_rms.rms_norm(x, weight, 1e-20).any()


def test_no_rows():
    from megatron_dsv41.ops.norm import triton_rms

    x, weight = (torch.ones(*shape, device=DEVICE, requires_grad=True) for shape in ((0, 64), (64,)))
    out, of_x, of_weight = run(triton_rms.rms_norm, [x, weight], torch.ones(0, 64))
    assert out.shape == of_x.shape == (0, 64) and not of_weight.any()
