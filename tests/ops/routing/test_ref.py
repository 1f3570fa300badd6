"""Routing and the clamped SwiGLU."""

import torch
import torch.nn.functional as F

from megatron_dsv41.ops.norm.ref import rms_norm
from megatron_dsv41.ops.routing.ref import route, swiglu


def test_bias_selects_but_does_not_weigh():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 10.0])
    indices, weights, scores = route(logits, bias, 2, 1.5)
    assert indices.tolist() == [[3, 0]]
    expected = F.softplus(logits).sqrt()[0, [3, 0]]
    torch.testing.assert_close(weights[0], expected / expected.sum() * 1.5)
    torch.testing.assert_close(scores, F.softplus(logits).sqrt())


def test_equal_scores_take_the_smaller_expert():
    indices, weights, _ = route(torch.zeros(3, 8), torch.zeros(8), 3, 1.0)
    assert indices.tolist() == [[0, 1, 2]] * 3
    torch.testing.assert_close(weights, torch.full((3, 3), 1 / 3))


def test_underflowing_softplus_keeps_finite_gradients():
    logits = torch.tensor([[-200.0, -104.0, -50.0, -1000.0]], requires_grad=True)
    _, weights, scores = route(logits, torch.zeros(4), 2, 1.5)
    (weights[0, 0] + scores.sum()).backward()
    assert logits.grad is not None and logits.grad.isfinite().all() and weights.isfinite().all()


def test_clamp_is_one_sided_on_the_gate():
    gate = torch.tensor([-50.0, 50.0, 5.0, 5.0])
    up = torch.tensor([1.0, 1.0, 50.0, -50.0])
    silu = lambda v: v / (1 + torch.exp(-torch.tensor(v)))  # noqa: E731
    expected = torch.stack([silu(-50.0) * 1, silu(10.0) * 1, silu(5.0) * 10, silu(5.0) * -10])
    torch.testing.assert_close(swiglu(gate, up, 10.0), expected)


def test_clamped_gate_has_no_gradient_and_low_gate_has():
    gate = torch.tensor([-20.0, 20.0], requires_grad=True)
    up = torch.tensor([20.0, 3.0], requires_grad=True)
    swiglu(gate, up, 10.0).sum().backward()
    assert gate.grad is not None and up.grad is not None
    assert gate.grad[1] == 0 and gate.grad[0] != 0 and up.grad[0] == 0 and up.grad[1] != 0


def test_the_gradient_passes_at_the_limits_and_nan_stays():
    """In bfloat16 one value in some hundreds lies on a limit: providers and versions of torch must agree there."""
    gate = torch.tensor([10.0, 1.0, 1.0, torch.nan, 1.0], requires_grad=True)
    up = torch.tensor([1.0, 10.0, -10.0, 1.0, torch.nan], requires_grad=True)
    out = swiglu(gate, up, 10.0)
    out[:3].sum().backward()
    assert gate.grad is not None and up.grad is not None
    assert gate.grad[:3].all() and up.grad[:3].all() and out.isnan().tolist() == [False] * 3 + [True] * 2


def test_routing_weight_enters_before_the_cast():
    gate, up, weight = torch.randn(5, 8).bfloat16(), torch.randn(5, 8).bfloat16(), torch.rand(5)
    exact = F.silu(gate.float()) * up.float() * weight[:, None]
    assert torch.equal(swiglu(gate, up, 10.0, weight), exact.bfloat16())


def test_gradcheck_of_router_weights_and_swiglu():
    torch.manual_seed(0)
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: route(x, bias, 2, 1.5)[1:], (logits,))
    inputs = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    weight = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda g, u, w: swiglu(g, u, 10.0, w), (*inputs, weight))


def test_rms_norm_multiplies_before_the_cast_and_keeps_tiny_inputs():
    x, g = torch.randn(4, 16).bfloat16(), torch.randn(16).bfloat16()
    exact = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-20) * g.float()
    assert torch.equal(rms_norm(x, g, 1e-20), exact.bfloat16())
    tiny = torch.randn(2, 8) * 1e-6
    torch.testing.assert_close(rms_norm(tiny, torch.ones(8), 1e-20), rms_norm(tiny * 1e6, torch.ones(8), 1e-20))


def test_both_halves_in_one_tensor():
    both, weight = torch.randn(5, 16), torch.rand(5)
    assert torch.equal(swiglu(both, None, 10.0, weight), swiglu(*both.chunk(2, -1), 10.0, weight))
