"""Experts in FP8: products and gradients against the definition; on a CPU with the operands' rounding written out."""

import pytest
import torch

from megatron_dsv41.ops.routing import ref
from megatron_dsv41.testing.bench import relative_error

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
# Of outputs and gradients of x, share, w13, w2. A product of two operands that E4M3 rounds by 2.6% each is 3.7% off,
# three in a row 6.4%; the gradient of a share is one number of a row, which may be small.
TOLERANCES = (0.08, 0.08, 0.13, 0.08, 0.08)


def rounded(x, dim):
    """E4M3 with a scale along `dim`, and the scale without it."""
    scale = x.float().abs().amax(dim, keepdim=True).clamp_min(1e-30) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale.squeeze(dim)


def multiply(a, b, scale_a, scale_b, *, offs, out_dtype, use_fast_accum):
    """What `torch._scaled_grouped_mm` does."""
    parts = a.float().split(torch.diff(offs, prepend=offs.new_zeros(1)).tolist())
    products = [part @ matrix.float() * scale for part, matrix, scale in zip(parts, b, scale_b, strict=True)]
    return (torch.cat(products) * scale_a[:, None]).to(out_dtype)


@pytest.fixture
def on_cpu(monkeypatch):
    """The kernels' definitions in their places."""
    pytest.importorskip("triton")
    from megatron_dsv41.ops.routing import grouped_fp8

    def rows(x, factors=None, groups=None):
        return rounded(x if factors is None else x.float() * factors[groups], 1)

    def transposes(x, scale):
        return (x.float() / scale[..., None]).to(torch.float8_e4m3fn).transpose(1, 2).contiguous()

    monkeypatch.setattr(grouped_fp8, "scaled_rows", rows)
    monkeypatch.setattr(grouped_fp8, "scaled_transposes", transposes)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", multiply)


def operands(counts, dim, inner, device):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(device, torch.bfloat16).requires_grad_()

    rows, experts = sum(counts), len(counts)
    share = (torch.rand(rows, generator=generator) + 0.1).to(device).requires_grad_()
    w13, w2 = draw(experts, 2, inner, dim, scale=dim**-0.5), draw(experts, dim, inner, scale=inner**-0.5)
    return draw(rows, dim), torch.tensor(counts, device=device), share, w13, w2


def run(function, x, counts, share, w13, w2):
    y = function(x, counts, share, w13, w2, 10.0, ref.swiglu)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device, y.dtype)
    return [y, *torch.autograd.grad(y, [x, share, w13, w2], grad)]


def compare(counts, dim, inner, device):
    from megatron_dsv41.ops.routing import grouped_fp8

    args = operands(counts, dim, inner, device)
    wide = [t if t is args[1] else t.detach().double().requires_grad_() for t in args]
    pairs = zip(run(ref.experts, *wide), run(grouped_fp8.experts, *args), TOLERANCES, strict=True)
    for want, got, tolerance in pairs:
        assert got.shape == want.shape and 0.01 < relative_error(got, want) < tolerance
    return args


@pytest.mark.parametrize("counts", [[5], [0, 7, 0, 1], [3, 4, 5, 6, 7], [0, 0, 9]])
def test_gradients_are_those_of_the_definition(counts, on_cpu):
    compare(counts, 64, 48, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [[64], [0, 700, 0, 1, 33], [0, 0, 900], [128] * 16])
def test_on_a_gpu(counts):
    from megatron_dsv41.ops.routing import grouped_fp8

    args = compare(counts, 5120, 2304, "cuda")
    first, second = (run(grouped_fp8.experts, *args) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_rows(on_cpu):
    from megatron_dsv41.ops.routing import grouped_fp8

    y, grad, *_ = run(grouped_fp8.experts, *operands([0, 0], 32, 16, "cpu"))
    assert y.shape == grad.shape == (0, 32)


def test_refusals(on_cpu):
    from megatron_dsv41.ops.routing import grouped_fp8

    x, counts, share, w13, w2 = operands([4], 32, 16, "cpu")
    with pytest.raises(ValueError, match="takes bfloat16, got torch.float32; choose 'grouped'"):
        grouped_fp8.experts(x.float(), counts, share, w13, w2, 10.0, ref.swiglu)
    with pytest.raises(ValueError, match=r"multiples of 16, got \[1, 32, 8\]; choose 'grouped'"):
        grouped_fp8.experts(x, counts, share, w13[:, :, :8], w2[:, :, :8], 10.0, ref.swiglu)
