"""Train DeepSeek-V4.1-Flash family models on stock Megatron-core.

Importing this package imports no framework: what needs torch is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatron_dsv41 import presets
from megatron_dsv41.config import DSV41Config
from megatron_dsv41.layer_plan import LayerKind, LayerPlan, live_at, plan_layers
from megatron_dsv41.phase import Phase

if TYPE_CHECKING:
    from megatron_dsv41.modules.shared_state import SharedState
    from megatron_dsv41.modules.transformer import Transformer

__version__ = "0.1.0"
__all__ = [
    "DSV41Config",
    "LayerKind",
    "LayerPlan",
    "Phase",
    "SharedState",
    "Transformer",
    "live_at",
    "plan_layers",
    "presets",
]

_LAZY = {"SharedState": "modules.shared_state", "Transformer": "modules.transformer"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
