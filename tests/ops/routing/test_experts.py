"""Experts over sorted rows: the definition against a plain sum, providers against the definition."""

import pytest
import torch

from megatron_dsv41.ops.routing.grouped import experts as grouped
from megatron_dsv41.ops.routing.ref import experts, swiglu
from megatron_dsv41.testing.bench import relative_error

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def operands(counts, dim=32, inner=16, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    rows, size = sum(counts), len(counts)

    def draw(*shape, scale=1.0):
        tensor = torch.randn(*shape, generator=generator) * scale
        return tensor.to(device=device, dtype=dtype).requires_grad_()

    x, share = draw(rows, dim), draw(rows)
    return x, torch.tensor(counts), share, draw(size, 2, inner, dim, scale=0.2), draw(size, dim, inner, scale=0.2)


def run(function, x, counts, share, w13, w2):
    y = function(x, counts, share, w13, w2, 10.0, swiglu)
    weight = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)
    return [y, *torch.autograd.grad((y.float() * weight).sum(), [x, share, w13, w2])]


def test_definition_by_hand():
    x, counts, share, w13, w2 = operands([2, 0, 3])
    y = experts(x, counts, share, w13, w2, 10.0, swiglu)
    expert_of = [0, 0, 2, 2, 2]
    for row, expert in enumerate(expert_of):
        gate, up = (w13[expert] @ x[row]).unbind(0)
        expected = w2[expert] @ (torch.nn.functional.silu(gate) * up * share[row])
        torch.testing.assert_close(y[row], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("counts", [[5], [0, 7, 0, 1], [3, 4, 5, 6, 7], [0, 0, 9], [0, 0]])
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_grouped_equals_the_definition(counts, device):
    # The GPU's grouped product takes bfloat16 alone; there both round every intermediate in the same places.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    own, found = (run(f, *operands(counts, dtype=dtype, device=device)) for f in (experts, grouped))
    bound = 2e-2 if device == "cuda" else 1e-5
    for want, got in zip(own, found, strict=True):
        assert got.dtype == want.dtype and relative_error(got, want.double()) < bound


@pytest.mark.gpu
def test_grouped_refuses_fp32_on_a_gpu():
    with pytest.raises(ValueError, match="takes bfloat16 on GPUs, got torch.float32; choose 'ref'"):
        grouped(*operands([4], device="cuda"), 10.0, swiglu)
