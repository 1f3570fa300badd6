"""Time one step of the published optimizer on one GPU, and count what it remembers.

    python tools/bench_optim.py [--preset proxy] [--ns-dtype bfloat16] [--momentum-dtype float32] [--json out.json]

Random gradients, fp32 weights. Per group: milliseconds, arithmetic of Newton-Schulz over its time as a share of this
GPU's own bf16 matrix rate, measured first, and bytes of state per element, which must equal what `dsv41 plan` prints.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from megatron_dsv41.checkpoint.mapping import parameter_bindings
from megatron_dsv41.optim.groups import Algorithm, ParameterGroup, group_parameters
from megatron_dsv41.optim.optimizer import whole_optimizer
from megatron_dsv41.optim.settings import Optimizer
from megatron_dsv41.phase import Phase
from megatron_dsv41.presets import PRESETS
from megatron_dsv41.testing.bench import eager_ms, table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="proxy")
    parser.add_argument("--ns-dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--momentum-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_optim times a GPU: there is no CUDA device")
    settings = Optimizer(name="published", ns_dtype=args.ns_dtype, momentum_dtype=args.momentum_dtype)
    rate = matrix_rate()
    rows = measure(args.preset, settings, rate)
    columns = ("parameter", "update", "elements", "ms", "TFLOP/s", "of GEMM rate", "state B/element", "planned")
    print(f"{torch.cuda.get_device_name()}, bf16 GEMM {rate / 1e12:.0f} TFLOP/s, Newton-Schulz in {args.ns_dtype}")
    print(table(columns, [[row[column] for column in columns] for row in rows]))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def measure(preset: str, settings: Optimizer, rate: float) -> list[dict[str, Any]]:
    """One row per parameter group and one for all; state is that of the groups alone."""
    config = PRESETS[preset]()
    shapes = {binding.native: binding.shape for binding in parameter_bindings(config)}
    rows, total = [], {"elements": 0, "ms": 0.0, "flop": 0.0, "ns ms": 0.0, "state": 0}
    for group in group_parameters(shapes, config, Phase(index_loss="sparse"), settings):
        parameters = {name: torch.randn(shape, device="cuda") * 0.02 for name, shape in group.shapes.items()}
        for tensor in parameters.values():
            tensor.grad = torch.randn_like(tensor)
        optimizer = whole_optimizer(parameters, [group], settings)
        moments = [value for states in optimizer.state.values() for value in states.values() if value.is_cuda]
        state = sum(value.numel() * value.element_size() for value in moments)
        ms, flop = eager_ms(optimizer.step, 5).median, newton_schulz_flop(group, settings)
        rows.append(
            row(group.role, group.algorithm, group.num_parameters, ms, flop, rate, state / group.num_parameters)
        )
        rows[-1]["planned"] = group.state_bytes(settings, low_precision=False)
        total["elements"] += group.num_parameters
        total["ms"] += ms
        total["flop"] += flop
        total["ns ms"] += ms if flop else 0.0
        total["state"] += state
        del optimizer, parameters, tensor, moments
        torch.cuda.empty_cache()
    rows.append(row("muon", "", 0, total["ns ms"], total["flop"], rate, 0))
    rows.append(row("all", "", total["elements"], total["ms"], 0, rate, total["state"] / total["elements"]))
    return rows


def row(role: str, update: str, elements: int, ms: float, flop: float, rate: float, state: float) -> dict[str, Any]:
    """The columns of one line."""
    return {
        "parameter": role,
        "update": str(update),
        "elements": f"{elements:,}" if elements else "",
        "ms": f"{ms:.2f}",
        "TFLOP/s": f"{flop / ms / 1e9:.0f}" if flop else "",
        "of GEMM rate": f"{flop / ms * 1e3 / rate:.0%}" if flop else "",
        "state B/element": f"{state:.3f}" if state else "",
        "planned": "",
    }


def newton_schulz_flop(group: ParameterGroup, settings: Optimizer) -> float:
    """Arithmetic of the iteration for one step of a group: per matrix and step X X^T, its square, and the product."""
    if group.algorithm is not Algorithm.MUON:
        return 0.0
    short, long = sorted(group.matrix)
    per_matrix = len(settings.newton_schulz) * (4 * short * short * long + 2 * short**3)
    return float(per_matrix * group.matrices * len(group.shapes))


def matrix_rate(size: int = 8192) -> float:
    """FLOP/s of a large bf16 product."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (eager_ms(lambda: a @ b, 15).median / 1e3)


if __name__ == "__main__":
    main()
