"""mHC ops of a provider against the definition: operands as in training, outputs with every gradient, and the bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_dsv41.ops.mhc import ref
from megatron_dsv41.testing.bench import relative_error

CONSTANTS = (20, 1e-6, 1e-20)  # of a site: iterations, eps of Sinkhorn, eps of RMS


def operands(tokens: int, dim: int, dtype: torch.dtype, device: str, seed: int = 0) -> list[Tensor]:
    """y, streams, post, comb, pre, fn, base, scale, as a site gets them in training. dtype: of y and streams."""
    g = torch.Generator().manual_seed(seed)
    streams, y = torch.randn(tokens, 4, dim, generator=g), torch.randn(tokens, dim, generator=g)
    post, pre = 2 * torch.rand(tokens, 4, generator=g), torch.rand(tokens, 4, generator=g)
    comb = ref.sinkhorn(torch.randn(tokens, 4, 4, generator=g), 20, 1e-6)
    fn = torch.randn(24, 4 * dim, generator=g) / (4 * dim) ** 0.5
    base, scale = torch.randn(24, generator=g), torch.rand(3, generator=g) + 0.5
    tensors = [y.to(dtype), streams.to(dtype), post, comb, pre, fn, base, scale]
    return [t.to(device).requires_grad_() for t in tensors]


def hostile(inputs: list[Tensor], size: float) -> list[Tensor]:
    """The same with y and streams of another size, in place."""
    with torch.no_grad():
        inputs[0] *= size
        inputs[1] *= size
    return inputs


def run(
    function: Callable[..., Any], inputs: list[Tensor], dtype: torch.dtype | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and the gradients of `inputs` under fixed random output gradients. dtype: computed in it."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in inputs]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    g = torch.Generator().manual_seed(7)
    grads = [torch.randn(o.shape, generator=g).to(inputs[1 if len(inputs) > 1 else 0].dtype) for o in outputs]
    grads = [grad.to(o.device, o.dtype) for grad, o in zip(grads, outputs, strict=True)]
    return outputs, list(torch.autograd.grad(outputs, leaves, grads))


def pick(op: str, inputs: list[Tensor]) -> list[Tensor]:
    """What `call(provider, op)` takes of all operands."""
    y, streams, post, comb, pre, fn, base, scale = inputs
    return {
        "site": inputs,
        "first site": [streams, pre, fn, base, scale],
        "collapse": [streams, pre],
        "expand": [y, streams, post, comb],
    }[op]


def call(provider: Any, op: str) -> Callable[..., Any]:
    """An op of a provider's module."""
    if op == "first site":  # no update: its streams come back as they are
        return lambda streams, *a: provider.site(None, streams, None, None, *a, *CONSTANTS)
    function = getattr(provider, op)
    return (lambda *a: function(*a, *CONSTANTS)) if op == "site" else function


def assert_errors_are_the_definitions(op: str, inputs: list[Tensor], fused: tuple[list[Tensor], list[Tensor]]) -> None:
    """`fused`, of `run`, is at most 1.5 times as far from the definition in fp64 as the definition in bf16 is."""
    exact = run(call(ref, op), inputs, torch.float64)
    plain = run(call(ref, op), inputs)
    for kind, e, p, f in zip(("value", "gradient"), exact, plain, fused, strict=True):
        for i, (want, own, got) in enumerate(zip(e, p, f, strict=True)):
            bound = 1.5 * relative_error(own, want) + 5e-6
            assert relative_error(got, want) <= bound, f"{kind} {i}: {relative_error(got, want)} against {bound}"
