import pytest
import torch

from megatron_dsv41.ops.routing import ref
from megatron_dsv41.testing.bench import relative_error
from megatron_dsv41.testing.interpreter import DEVICE, INTERPRETED

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("rows", [1, 7] if INTERPRETED else [1, 127, 4001])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_gradients(rows: int, weighted: bool, joined: bool, dtype: torch.dtype):
    from megatron_dsv41.ops.routing import triton_swiglu

    both = (6 * torch.randn(rows, 2, 2304, device=DEVICE)).to(dtype)
    both[0, :, :4] = torch.tensor([10.0, -10.0, 1e30, -1e30], device=DEVICE, dtype=dtype)
    inputs = [both.requires_grad_()]
    if weighted:
        inputs.append(torch.rand(rows, device=DEVICE, requires_grad=True))

    def run(function, leaves):
        weight = leaves[1] if weighted else None
        halves = (leaves[0].flatten(1), None) if joined else leaves[0].unbind(1)
        out = function(*halves, 10.0, weight)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(out.device, out.dtype)
        return out, *torch.autograd.grad(out, leaves, grad)

    exact = run(ref.swiglu, [t.detach().double().requires_grad_() for t in inputs])
    for want, own, got in zip(exact, run(ref.swiglu, inputs), run(triton_swiglu.swiglu, inputs), strict=True):
        # A row's weight gradient is a sum of 2304 products that cancel: its last bits follow the order of the sum.
        assert relative_error(got, want) <= 1.5 * relative_error(own, want) + (1e-6 if want.ndim > 1 else 5e-5)


@pytest.mark.parametrize("half", [0, 1])
def test_nan_is_not_clamped_away(half):
    from megatron_dsv41.ops.routing import triton_swiglu

    halves = torch.ones(2, 3, 40, device=DEVICE)
    halves[half, 1, 7] = torch.nan
    gate, up = (x.clone().requires_grad_() for x in halves)
    out = triton_swiglu.swiglu(gate, up, 10.0)
    out.sum().backward()
    gradient = (up if half == 0 else gate).grad  # that of the other half has the NaN as a factor
    assert gradient is not None
    for found in (out, gradient):
        assert found.isnan().nonzero().tolist() == [[1, 7]]
