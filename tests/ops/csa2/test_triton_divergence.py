"""Provider "triton" of csa2.index_divergence against the definition. On CUDA, or with TRITON_INTERPRET=1 on the CPU."""

import pytest
import torch

from megatron_dsv41.ops.csa2 import ref
from megatron_dsv41.testing.interpreter import DEVICE

pytestmark = pytest.mark.triton


def case(tokens, heads, topk, dim, dtype, seed=0):
    """q, weights, keys, slots with -1, teacher; query 0 has no slot, query 1 no teacher mass."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    slots = torch.randint(-1, 30, (tokens, topk), generator=generator, dtype=torch.int32)
    slots[0] = -1
    teacher = torch.rand(tokens, topk, generator=generator)
    teacher[1:2] = 0
    tensors = draw(tokens, heads, dim), draw(tokens, heads) / heads, draw(30, dim), slots, teacher
    return tuple(x.to(DEVICE) for x in tensors)


def run(function, inputs, dtype=None):
    leaves = [x.detach().clone().to(dtype or x.dtype).requires_grad_() for x in inputs[:3]]
    loss = function(*leaves, *inputs[3:])
    (loss * torch.linspace(0.5, 2, loss.shape[0], device=loss.device)).sum().backward()
    return [x.detach().double() for x in (loss, *(leaf.grad for leaf in leaves))]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(
    ("tokens", "heads", "topk", "dim"), [(1, 3, 5, 16), (5, 4, 70, 32), (3, 32, 96, 128), (2, 2, 1100, 16)]
)
def test_value_and_gradients(dtype, tolerance, tokens, heads, topk, dim):
    from megatron_dsv41.ops.csa2.triton_divergence import index_divergence

    inputs = case(tokens, heads, topk, dim, dtype)
    for mine, truth in zip(
        run(index_divergence, inputs), run(ref.index_divergence, inputs, torch.float64), strict=True
    ):
        assert (mine - truth).norm() <= tolerance * truth.norm() + 1e-6


def test_what_it_does_not_take_is_an_error():
    from megatron_dsv41.ops.csa2.triton_divergence import index_divergence

    q, weights, keys, slots, teacher = case(2, 3, 5, 16, torch.float32)
    with pytest.raises(ValueError, match="both in"):
        index_divergence(q, weights, keys.bfloat16(), slots, teacher)
    with pytest.raises(ValueError, match="channels"):
        index_divergence(q[..., :8], weights, keys[:, :8], slots, teacher)


def test_a_nan_shows_in_the_loss_of_its_query():
    from megatron_dsv41.ops.csa2.triton_divergence import index_divergence

    q, *rest = case(4, 3, 5, 16, torch.float32)
    q[2, 1, 5] = torch.nan
    for function in (ref.index_divergence, index_divergence):
        assert function(q, *rest).isnan().tolist() == [False, False, True, False]
