import pytest
import torch

from megatron_dsv41.ops.norm import ref
from megatron_dsv41.testing.bench import relative_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("rows", "size"), [(1, 5120), (127, 1280), (4001, 512), (33, 80)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_gradients(rows: int, size: int, dtype: torch.dtype):
    from megatron_dsv41.ops.norm import triton_rms

    x = torch.randn(rows, size, device="cuda").to(dtype)
    x[0] *= 1e-8  # an eps of 1e-6 would show
    inputs = [x.requires_grad_(), torch.randn(size, device="cuda").to(dtype).requires_grad_()]

    def run(function, leaves):
        out = function(*leaves, 1e-20)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(out.device, out.dtype)
        return out, *torch.autograd.grad(out, leaves, grad)

    exact = run(ref.rms_norm, [t.detach().double().requires_grad_() for t in inputs])
    for want, own, got in zip(exact, run(ref.rms_norm, inputs), run(triton_rms.rms_norm, inputs), strict=True):
        assert relative_error(got, want) <= 1.5 * relative_error(own, want) + 1e-6


def test_zero_rows_stay_zero():
    from megatron_dsv41.ops.norm import triton_rms

    out = triton_rms.rms_norm(
        torch.zeros(3, 5120, device="cuda", dtype=torch.bfloat16), torch.ones(5120, device="cuda"), 1e-20
    )
    assert not out.any()
