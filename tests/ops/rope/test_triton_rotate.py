"""Rotary embedding in Triton against the definition. On CUDA, or with TRITON_INTERPRET=1 on the CPU."""

import pytest
import torch

from megatron_dsv41.ops.rope import ref
from megatron_dsv41.testing.bench import relative_error
from megatron_dsv41.testing.interpreter import DEVICE, INTERPRETED

pytestmark = pytest.mark.triton
LARGE = [(9, 64, 512), (201, 128)] if INTERPRETED else [(127, 64, 512), (4001, 128)]
SHAPES = [(1, 512), (33, 2, 48), (0, 4, 64), *LARGE]


def operands(shape, dtype, pairs=None):
    """Values, and the angles of far positions; at most 32 pairs turn."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    position = torch.arange(shape[0], device=DEVICE) * 37
    pairs = min(32, shape[-1] // 4) if pairs is None else pairs
    return x, ref.cos_sin(position, ref.plain_frequencies(2 * pairs, 10000.0))


def same_bits(a, b):
    """Equal bit by bit: 0.0 is not -0.0. One NaN is another: conversions make them all alike."""
    a, b = (t.where(~t.isnan(), torch.nan) for t in (a, b))
    integer = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_the_definition(shape: tuple[int, ...], inverse: bool, dtype: torch.dtype):
    from megatron_dsv41.ops.rope import triton_rotate

    x, (cos, sin) = operands(shape, dtype)
    x.requires_grad_()
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

    x, (cos, sin) = operands((65, 4, 128), torch.float32, pairs=32)
    back = triton_rotate.rotate(triton_rotate.rotate(x, cos, sin), cos, sin, inverse=True)
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_owned_has_the_same_bits_in_the_same_memory(shape, inverse, dtype):
    from megatron_dsv41.ops.rope import triton_rotate

    x, turn = operands(shape, dtype)
    want = triton_rotate.rotate(x, *turn, inverse)
    got = triton_rotate.rotate_owned(x, *turn, inverse)
    assert same_bits(got, want) and got.data_ptr() == x.data_ptr() and not got.requires_grad


@pytest.mark.parametrize("pairs", [1, 3, 24])
def test_any_number_of_pairs(pairs):
    from megatron_dsv41.ops.rope import triton_rotate

    x, turn = operands((7, 3, 48), torch.float32, pairs)
    want = ref.rotate(x, *turn)
    torch.testing.assert_close(triton_rotate.rotate(x, *turn), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(triton_rotate.rotate_owned(x, *turn), want, rtol=1e-6, atol=1e-6)


def test_other_channels_pass_bit_by_bit_whatever_they_hold():
    from megatron_dsv41.ops.rope import triton_rotate

    x, turn = operands((5, 2, 64), torch.bfloat16, pairs=8)
    hostile = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 0.0, 1e-40, 3e38, -1.0], dtype=torch.bfloat16)
    x[..., :48] = hostile.repeat(6).to(DEVICE)
    want = x[..., :48].clone()
    assert same_bits(triton_rotate.rotate(x, *turn)[..., :48], want)
    assert same_bits(triton_rotate.rotate_owned(x, *turn)[..., :48], want)


def test_owned_leaves_what_it_must_copy():
    from megatron_dsv41.ops.rope import triton_rotate

    source, turn = operands((6, 4, 32), torch.float32)
    kept = source.clone()
    for x in (source[:, :1].expand(-1, 3, -1), source.transpose(1, 2).contiguous().transpose(1, 2), source[:, ::2]):
        assert same_bits(triton_rotate.rotate_owned(x, *turn), triton_rotate.rotate(x, *turn))
    assert same_bits(source, kept)


def test_owned_refuses_leaves_and_their_views():
    from megatron_dsv41.ops.rope import triton_rotate

    x, turn = operands((6, 4, 32), torch.float32)
    x.requires_grad_()
    for owned in (x, x.flatten(0).view(6, 4, 32)):
        with torch.no_grad(), pytest.raises(ValueError, match="is a leaf"):
            triton_rotate.rotate_owned(owned, *turn)


def test_a_backward_that_needs_the_old_values_raises():
    from megatron_dsv41.ops.rope import triton_rotate

    x, turn = operands((6, 4, 32), torch.float32)
    made = x.requires_grad_().exp()  # whose backward reads its result
    with torch.no_grad():
        triton_rotate.rotate_owned(made, *turn)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.sum().backward()


def test_a_gradient_of_several_consumers_is_left_alone():
    """Autograd hands one tensor to both operands of a sum; the caller's own gradient enters the graph as it is."""
    from megatron_dsv41.ops.rope import triton_rotate

    x, turn = operands((6, 4, 32), torch.float32)
    other, grad = torch.zeros_like(x).requires_grad_(), torch.randn_like(x)
    kept = grad.clone()
    (triton_rotate.rotate(x.requires_grad_(), *turn) + other).backward(grad)
    assert same_bits(grad, kept) and other.grad is not None and same_bits(other.grad, kept)
    assert x.grad is not None and same_bits(x.grad, triton_rotate.rotate(kept, *turn, inverse=True))


@pytest.mark.parametrize("name", ["rotate", "rotate_owned"])
def test_what_it_does_not_take_is_an_error(name):
    from megatron_dsv41.ops.rope import triton_rotate

    function = getattr(triton_rotate, name)
    x, (cos, sin) = operands((6, 4, 32), torch.float32)
    with pytest.raises(ValueError, match=f"rope.{name}: provider 'triton' takes bfloat16"):
        function(x.double(), cos, sin)
    for wrong in (x[:, :, :31], x[:5], x[0, 0], x[..., :8]):
        with pytest.raises(ValueError, match=rf"rope.{name}: x \[.*\] must be"):
            function(wrong, cos, sin)
