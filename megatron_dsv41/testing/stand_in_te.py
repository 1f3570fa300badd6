"""A package in the name of Transformer Engine whose linears multiply as plain ones do, for tests without a GPU."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron_dsv41.backends.te import machine
from megatron_dsv41.precision import Machine

OURS = "megatron_dsv41.backends.te.linears"


class Autocast:
    """Counts how deep and how often it is entered."""

    depth = entered = 0

    def __init__(self, **settings: Any):
        self.settings = settings

    def __enter__(self) -> None:
        Autocast.depth += 1
        Autocast.entered += 1

    def __exit__(self, *error: object) -> None:
        Autocast.depth -= 1


class _Product(torch.autograd.Function):
    """A node of its own whose output is a view, as Transformer Engine's is: autograd refuses to have it overwritten."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x.flatten(0, -2), weight).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


class Linear(nn.Module):
    """What `te.Linear` shows of itself: an extra state, and products that only make sense inside an autocast."""

    def __init__(self, d_in: int, d_out: int, bias: bool, params_dtype: torch.dtype, device: str):
        super().__init__()
        assert not bias
        self.weight = nn.Parameter(torch.empty(d_out, d_in, dtype=params_dtype, device=device))

    def get_extra_state(self) -> Tensor:
        """As Transformer Engine's: in every state dict, unless taken away."""
        return torch.zeros(1)

    def set_extra_state(self, state: Tensor) -> None:
        """Never, where there is none."""
        raise AssertionError("an extra state was loaded")

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d_in] -> [..., d_out]."""
        assert Autocast.depth, "outside of an autocast nothing would be rounded"
        return _Product.apply(x, self.weight)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Within the block `transformer_engine` is this, on a machine that may use it."""
    names = ("", ".common", ".pytorch", ".pytorch.quantization")
    modules: dict[str, Any] = {name: types.ModuleType(f"transformer_engine{name}") for name in names}
    modules[".common"].recipe = types.SimpleNamespace(Float8BlockScaling=object, DelayedScaling=object)
    modules[".pytorch"].Linear, modules[".pytorch"].autocast = Linear, Autocast
    modules[".pytorch.quantization"].check_recipe_support = lambda recipe: None
    modules[".pytorch"].quantization = modules[".pytorch.quantization"]
    modules[""].common, modules[""].pytorch = modules[".common"], modules[".pytorch"]
    replaced = {f"transformer_engine{name}": module for name, module in modules.items()}
    before, here = {name: sys.modules.get(name) for name in (*replaced, OURS)}, machine.this_machine
    sys.modules.update(replaced)
    sys.modules.pop(OURS, None)
    machine.this_machine = lambda: Machine((9, 0), True)
    Autocast.depth = Autocast.entered = 0
    try:
        yield
    finally:
        machine.this_machine = here
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
