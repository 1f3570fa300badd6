import pytest
import torch

from megatron_dsv41.ops.rope import ref
from megatron_dsv41.testing.bench import relative_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(1, 512), (127, 64, 512), (4001, 128), (33, 2, 48)])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_the_definition(shape: tuple[int, ...], inverse: bool, dtype: torch.dtype):
    from megatron_dsv41.ops.rope import triton_rotate

    x = torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)
    position = torch.arange(shape[0], device="cuda") * 37
    cos, sin = ref.cos_sin(position, ref.plain_frequencies(min(64, shape[-1] // 2), 10000.0))
    got, want = triton_rotate.rotate(x, cos, sin, inverse), ref.rotate(x, cos, sin, inverse)
    # The same products, summed with or without a fused multiply-add: at most a rounding apart, and seldom.
    bound = 1e-3 if dtype == torch.bfloat16 else 1e-7
    assert relative_error(got, want) < bound
    still = shape[-1] - 2 * cos.shape[-1]
    assert torch.equal(got[..., :still], want[..., :still])
    grad = torch.randn_like(x)
    (of_got,), (of_want,) = torch.autograd.grad(got, x, grad), torch.autograd.grad(want, x, grad)
    assert relative_error(of_got, of_want) < 4 * bound


def test_inverse_undoes():
    from megatron_dsv41.ops.rope import triton_rotate

    x = torch.randn(65, 4, 128, device="cuda")
    cos, sin = ref.cos_sin(torch.arange(65, device="cuda"), ref.plain_frequencies(64, 10000.0))
    back = triton_rotate.rotate(triton_rotate.rotate(x, cos, sin), cos, sin, inverse=True)
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-6)
