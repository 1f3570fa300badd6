"""`--layout tp=2,pp=4,ep=4,engram=3`: which ranks a distributed checkpoint is written for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_dsv41.checkpoint.shares import Layout
    from megatron_dsv41.config import DSV41Config

HELP = "write a distributed checkpoint for these ranks: tp, pp, vpp, ep, etp, engram, as tp=2,pp=4,ep=4"
SIZES = ("tp", "pp", "vpp", "ep", "etp", "engram")


def parse_layout(text: str, config: DSV41Config) -> Layout:
    """ValueError for an unknown axis, and for one that does not divide the model."""
    from megatron_dsv41.backends.megatron.layouts import check_layout, stage_layers
    from megatron_dsv41.checkpoint.shares import Layout
    from megatron_dsv41.run_config import Parallel

    sizes: dict[str, Any] = {}
    for entry in text.split(","):
        axis, equals, size = (part.strip() for part in entry.partition("="))
        if axis not in SIZES or not equals or not size.isdigit() or int(size) < 1 or axis in sizes:
            raise ValueError(f"--layout {text!r}: {entry!r} must be one of {', '.join(SIZES)}, '=', and a size")
        sizes[axis] = int(size)
    engram = sizes.pop("engram", 1)
    parallel = Parallel(sp=sizes.get("tp", 1) > 1, **sizes)
    check_layout(config, parallel)
    chunks = stage_layers(config, parallel)
    stages = [tuple(layer for chunk in chunks[rank :: parallel.pp] for layer in chunk) for rank in range(parallel.pp)]
    return Layout(tuple(stages), parallel.tp, parallel.ep, parallel.expert_tp, engram)
