"""Mixing coefficients: golden Sinkhorn, orientation, precision."""

import pytest
import torch

from megatron_dsv41.ops.mhc.ref import coefficients, collapse, expand, sinkhorn


def test_sinkhorn_golden_values():
    logits = torch.tensor([[1.0, 0, 0, 0], [0, 2, 0, 0], [0, 0, 3, 0], [0, 1, 0, 4]])
    golden = [
        [0.680134, 0.144733, 0.100531, 0.074607],
        [0.167389, 0.715446, 0.067255, 0.049912],
        [0.100539, 0.058157, 0.811345, 0.029979],
        [0.051938, 0.081664, 0.020868, 0.845502],
    ]
    comb = sinkhorn(logits, 20, 1e-6)
    assert [[f"{v:.6f}" for v in row] for row in comb.tolist()] == [[f"{v:.6f}" for v in row] for row in golden]


def test_sinkhorn_is_doubly_stochastic_and_ends_on_columns():
    comb = sinkhorn(torch.randn(50, 4, 4, dtype=torch.float64), 20, 1e-6)
    torch.testing.assert_close(comb.sum(-2), torch.ones(50, 4, dtype=torch.float64), rtol=0, atol=3e-6)
    torch.testing.assert_close(comb.sum(-1), torch.ones(50, 4, dtype=torch.float64), rtol=0, atol=1e-4)


def test_first_steps_are_softmax_plus_eps_then_columns():
    # With a large eps the order shows: a row normalisation without eps, or rows first, would differ.
    logits, eps = torch.tensor([[1.0, 2.0], [0.5, -1.0]], dtype=torch.float64), 0.1
    p = logits.softmax(-1) + eps
    torch.testing.assert_close(sinkhorn(logits, 1, eps), p / (p.sum(0) + eps))
    once = p / (p.sum(0) + eps)
    rows = once / (once.sum(1, keepdim=True) + eps)
    torch.testing.assert_close(sinkhorn(logits, 2, eps), rows / (rows.sum(0) + eps))


def test_mixing_has_a_direction():
    # Stream 0 flows into stream 1 and nowhere else; a transposed matrix would move stream 1 into stream 0.
    streams = torch.tensor([[10.0], [20.0]])
    comb = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    out = expand(torch.tensor([1.0]), streams, torch.tensor([0.5, 2.0]), comb)
    assert out.tolist() == [[0.5], [12.0]]


def test_collapse_weighs_streams():
    streams = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    assert collapse(streams, torch.tensor([0.5, 2.0])).tolist() == [20.5, 41.0]


def test_coefficients_by_hand():
    n, d = 2, 3
    streams = torch.randn(5, n, d, dtype=torch.float64)
    fn, base, scale = (torch.randn(*shape, dtype=torch.float64) for shape in [(8, n * d), (8,), (3,)])
    pre, post, comb = coefficients(streams, fn, base, scale, 3, 0.01, 1e-20)
    for t in range(5):
        x = streams[t].flatten()
        z = (fn @ x) / (x.square().mean() + 1e-20).sqrt()
        s = torch.cat([scale[0].repeat(2), scale[1].repeat(2), scale[2].repeat(4)])
        z = z * s + base
        torch.testing.assert_close(pre[t], z[:2].sigmoid() + 0.01)
        torch.testing.assert_close(post[t], 2 * z[2:4].sigmoid())
        torch.testing.assert_close(comb[t], sinkhorn(z[4:].view(2, 2), 3, 0.01))


def test_pre_carries_eps_and_post_does_not():
    zeros = torch.zeros(8, 6)
    base = torch.tensor([-200.0, -200, -200, -200, 0, 0, 0, 0])
    pre, post, _ = coefficients(torch.randn(2, 2, 3), zeros, base, torch.ones(3), 20, 1e-6, 1e-20)
    assert torch.equal(pre, torch.full((2, 2), 1e-6)) and torch.equal(post, torch.zeros(2, 2))


def test_rms_eps_is_tiny():
    # At 1e-6 a hard-coded 1e-6 would shrink the coefficients to nothing.
    fn, base, scale = torch.randn(8, 6), torch.zeros(8), torch.ones(3)
    x = torch.randn(4, 2, 3)
    big, small = (coefficients(x * k, fn, base, scale, 20, 1e-6, 1e-20)[0] for k in (1.0, 1e-6))
    torch.testing.assert_close(big, small, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", ["coefficients", "expand", "collapse"])
def test_gradcheck(function):
    torch.manual_seed(0)
    streams = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)
    random = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    if function == "coefficients":
        call = lambda *a: coefficients(*a, 20, 1e-6, 1e-20)  # noqa: E731
        assert torch.autograd.gradcheck(call, (streams, random(8, 6), random(8), random(3)))
    elif function == "expand":
        assert torch.autograd.gradcheck(expand, (random(2, 3), streams, random(2, 2), random(2, 2, 2)))
    else:
        assert torch.autograd.gradcheck(collapse, (streams, random(2, 2)))


def test_bf16_streams_are_summed_in_fp32_and_cast_once():
    torch.manual_seed(0)
    streams = torch.randn(3, 4, 8).bfloat16()
    y, post, comb = torch.randn(3, 8).bfloat16(), torch.rand(3, 4), torch.rand(3, 4, 4)
    exact = post[..., None] * y.float()[..., None, :] + comb.transpose(-1, -2) @ streams.float()
    assert torch.equal(expand(y, streams, post, comb), exact.bfloat16())
    assert torch.equal(collapse(streams, post), (streams.float() * post[..., None]).sum(-2).bfloat16())
