"""Transformer Engine's linear in place of a plain one, by role.

Tokens move at the edges of a site, so every linear is a local product: whatever tensor or sequence parallelism cuts,
its part here is an ordinary `te.Linear` over this rank's weight. Parameters keep their names, shapes and marks.
"""

from __future__ import annotations

import contextlib
from typing import Any

import transformer_engine.pytorch as te
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformer_engine.common import recipe as recipes

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.modules.primitives import Linear
from megatron_dsv41.precision import Precision, low_roles

CLASSES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}


def recipe_of(name: str) -> Any:
    """Transformer Engine's recipe with its own defaults."""
    return getattr(recipes, CLASSES[name])()


class LowPrecision:
    """Makes the linears of the chosen roles multiply in low precision.

    group: ranks that hold the same layers, over which delayed scaling takes its largest values (None: this one alone).
    """

    def __init__(self, config: DSV41Config, precision: Precision, group: ProcessGroup | None = None):
        assert precision.name is not None
        self.roles, self.group = frozenset(low_roles(config, precision)), group
        self.recipe, self.delayed = recipe_of(precision.name), precision.name == "delayed"

    def __call__(self, role: str, linear: Linear) -> nn.Module:
        """The linear that takes the place of `linear`, with its parameter; itself where the role is not chosen."""
        return LowPrecisionLinear(linear, self) if role in self.roles else linear

    def multiplying(self) -> contextlib.AbstractContextManager[Any]:
        """Where a linear runs, in a recomputation too."""
        return te.autocast(enabled=True, recipe=self.recipe, amax_reduction_group=self.group)

    def forward_pass(self) -> contextlib.AbstractContextManager[Any]:
        """Around one forward pass: when the outermost context ends, delayed scaling takes note of largest values."""
        return self.multiplying() if self.delayed else contextlib.nullcontext()


class LowPrecisionLinear(te.Linear):
    """x [..., d_in] -> [..., d_out], over the parameter of a plain linear."""

    # A module whose class has other methods of these names puts an entry of its own into state dicts.
    get_extra_state = nn.Module.get_extra_state  # type: ignore[assignment]
    set_extra_state = nn.Module.set_extra_state  # type: ignore[assignment]

    def __init__(self, linear: Linear, low: LowPrecision):
        d_out, d_in = linear.weight.shape
        super().__init__(d_in, d_out, bias=False, params_dtype=linear.weight.dtype, device="meta")
        self.weight, self.low = linear.weight, low

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """See class."""
        with self.low.multiplying():
            return super().forward(x)
