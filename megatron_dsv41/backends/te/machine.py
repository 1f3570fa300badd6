"""What this process can compute with, and what it then computes with. Imports Transformer Engine only if asked to."""

from __future__ import annotations

import importlib.util

import torch
from torch.distributed import ProcessGroup

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.modules.primitives import Substitute
from megatron_dsv41.precision import Machine, Precision, check_machine


def this_machine() -> Machine:
    """Of the current device."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return Machine(capability, importlib.util.find_spec("transformer_engine") is not None)


def check_here(precision: Precision) -> None:
    """ValueError when this process cannot multiply as asked, Transformer Engine's own reasons included."""
    check_machine(precision, this_machine())
    if precision.name is None:
        return
    try:
        from transformer_engine.pytorch.quantization import check_recipe_support

        from megatron_dsv41.backends.te.linears import recipe_of

        check_recipe_support(recipe_of(precision.name))
    except (ImportError, OSError) as error:
        raise ValueError(
            f"{precision.asked}: the installed transformer-engine cannot be imported ({error}): install one that is "
            f"built for this torch and CUDA, or {precision.remedy}"
        ) from error
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ValueError(f"{precision.asked}: Transformer Engine refuses: {error}; {precision.remedy}") from error


def low_precision(config: DSV41Config, precision: Precision, group: ProcessGroup | None = None) -> Substitute | None:
    """What makes linears multiply as asked, for `TorchPrimitives`; None where all keep the run's precision.

    group: ranks that hold the same layers. ValueError when this process cannot.
    """
    if precision.name is None:
        return None
    check_here(precision)
    from megatron_dsv41.backends.te.linears import LowPrecision

    return LowPrecision(config, precision, group)
