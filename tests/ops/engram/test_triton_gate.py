"""The gate in Triton against the definition. On CUDA, or with TRITON_INTERPRET=1 on the CPU."""

import pytest
import torch

from megatron_dsv41.ops.engram import ref
from megatron_dsv41.testing.bench import relative_error
from megatron_dsv41.testing.interpreter import DEVICE, INTERPRETED

pytestmark = pytest.mark.triton
SIZES = [(1, 64), *([(7, 1280), (40, 320)] if INTERPRETED else [(127, 5120), (4001, 320)])]


def operands(tokens: int, dim: int, dtype: torch.dtype):
    x, key = torch.randn(tokens, 4, dim), torch.randn(tokens, 4, dim)
    value = torch.randn(tokens, dim)
    gains = [1 + 0.1 * torch.randn(4, dim) for _ in range(2)]
    if tokens > 3:
        x[1], key[2] = 0.0, 0.0
    return [t.to(DEVICE, dtype).requires_grad_() for t in (x, key, value, *gains)], torch.rand(
        tokens, device=DEVICE
    ) > 0.2


def run(function, leaves, open_gate):
    out = function(*leaves, open_gate, 1e-20)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    return out, *torch.autograd.grad(out, leaves, grad.to(out.device, out.dtype))


@pytest.mark.parametrize(("tokens", "dim"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_gradients(tokens: int, dim: int, dtype: torch.dtype):
    from megatron_dsv41.ops.engram import triton_gate

    torch.manual_seed(0)
    inputs, open_gate = operands(tokens, dim, dtype)
    with torch.no_grad():  # a zero row makes the gradient of its factor 1e10: those rows only have to stay finite
        inputs[0][1:2].add_(0.5)
        inputs[1][2:3].add_(0.5)
    exact = run(ref.gate, [t.detach().double().requires_grad_() for t in inputs], open_gate)
    for want, own, got in zip(
        exact, run(ref.gate, inputs, open_gate), run(triton_gate.gate, inputs, open_gate), strict=True
    ):
        # Near dot = 0 the root's slope is steep: in fp32 both sides are only as exact as dot is.
        assert relative_error(got, want) <= 1.5 * relative_error(own, want) + 5e-5


def test_closed_and_zero_rows():
    from megatron_dsv41.ops.engram import triton_gate

    inputs, _ = operands(9 if INTERPRETED else 40, 512, torch.bfloat16)
    closed = torch.zeros(len(inputs[0]), dtype=torch.bool, device=DEVICE)
    out, of_x, of_key, of_value, *_ = run(triton_gate.gate, inputs, closed)
    assert torch.equal(out, inputs[0]) and not of_key.any() and not of_value.any() and of_x.isfinite().all()


def test_same_bits_every_run():
    from megatron_dsv41.ops.engram import triton_gate

    inputs, open_gate = operands(9 if INTERPRETED else 96, 1024, torch.bfloat16)
    for a, b in zip(run(triton_gate.gate, inputs, open_gate), run(triton_gate.gate, inputs, open_gate), strict=True):
        assert torch.equal(a, b)


def test_a_nan_of_the_key_opens_no_gate():
    """It stays in its token and stream, and in the gradients of that."""
    from megatron_dsv41.ops.engram import triton_gate

    inputs, _ = operands(5, 128, torch.float32)
    with torch.no_grad():
        inputs[1][3, 2, 7] = torch.nan
    opened = torch.ones(5, dtype=torch.bool, device=DEVICE)
    for function in (ref.gate, triton_gate.gate):
        out, of_x, of_key, of_value, *_ = run(function, inputs, opened)
        for found in (out, of_x, of_key):
            assert found.isnan().any(-1).nonzero().tolist() == [[3, 2]]
        assert of_value.isnan().any(-1).nonzero().tolist() == [[3]]
