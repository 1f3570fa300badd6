"""Time forward and backward of one model with its products in several precisions, turn by turn on one GPU.

    python tools/bench_precision.py [--tokens 4096 16384] [--variants bf16 delayed current block experts block+experts]

A variant is bf16, a recipe of `precision.fp8`, experts (`routing.experts: grouped_fp8`) or RECIPE+experts. All share
one set of weights and gradients, so that they differ in nothing else. Printed: milliseconds (median, range), tokens/s,
time against bf16, peak memory, and device time by kind of kernel from a profiler run of each.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from bench_step import FASTEST, Step
from torch import nn

from megatron_dsv41.backends.te.machine import low_precision
from megatron_dsv41.modules.primitives import Linear, Substitute
from megatron_dsv41.ops.registry import Ops, load, read_choice
from megatron_dsv41.phase import Phase
from megatron_dsv41.precision import Precision
from megatron_dsv41.presets import PRESETS
from megatron_dsv41.testing.bench import table

VARIANTS = ("bf16", "delayed", "current", "block", "experts", "block+experts")
# A kernel is of the first kind that has one of these words in its lower-case name.
KINDS = {
    "grouped products": ("groupproblemshape", "grouped"),
    "other products": ("nvjet", "gemm", "cublas", "xmma", "cutlass"),
    "quantization": (
        "quantize",
        "cast",
        "transpose",
        "amax",
        "compute_scale",
        "_rows",
        "block_scaled",
        "mxfp8",
        "nvfp4",
    ),
    "attention": ("attend", "score", "largest"),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="proxy")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), help=f"default: {' '.join(VARIANTS)}")
    parser.add_argument("--ops", action="append", metavar="OP=PROVIDERS", help=f"may be repeated (default '{FASTEST}')")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    choice, config = read_choice(args.ops or [FASTEST]), PRESETS[args.preset]()
    step = Step(config, args.tokens[0], Ops(choice), Phase(), torch.device(args.device))
    variants = [Variant(name, step) for name in args.variants]
    found: list[dict[str, Any]] = []
    for tokens in args.tokens:
        step.tokens = tokens
        step.ids_BS = torch.randint(4, config.vocab_size, (1, tokens), device=step.device)
        rows = measure(variants, step, args.repeats)
        found += [row | {"tokens": tokens} for row in rows]
        print(f"\n{tokens} tokens")
        print(
            table(("variant", "ms", "tokens/s", "time to bf16", "peak GiB", *KINDS, "rest"), [_cells(r) for r in rows])
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


class Variant:
    """The model's linears and experts in one precision."""

    def __init__(self, name: str, step: Step):
        self.name, self.model = name, step.model
        recipe, _, experts = name.partition("+")
        if recipe == "experts":
            recipe, experts = "bf16", "experts"
        precision = Precision(fp8="off" if recipe == "bf16" else recipe)  # type: ignore[arg-type]
        self.substitute: Substitute | None = low_precision(step.config, precision)
        self.experts = load("routing.experts", "grouped_fp8") if experts else step.model.ops["routing.experts"]
        plain = {n: part for n, part in step.model.named_modules() if type(part) is Linear and n.startswith("layers.")}
        self.linears: dict[str, nn.Module] = {
            name: part if self.substitute is None else self.substitute(name.split(".", 2)[2], part)
            for name, part in plain.items()
        }

    def use(self) -> None:
        """From here on the model multiplies so."""
        for name, part in self.linears.items():
            parent, leaf = name.rsplit(".", 1)
            setattr(self.model.get_submodule(parent), leaf, part)
        self.model.primitives.substitute = self.substitute  # type: ignore[attr-defined]
        self.model.ops._functions["routing.experts"] = self.experts


def measure(variants: list[Variant], step: Step, repeats: int) -> list[dict[str, Any]]:
    """One row per variant; every repeat goes through all of them."""
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    peaks: dict[str, float] = {}
    for repeat in range(repeats + 1):
        for variant in variants:
            variant.use()
            if step.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds = step._timed()
            if repeat:  # the first compiles
                times[variant.name].append(seconds * 1e3)
            if step.device.type == "cuda":
                peaks[variant.name] = torch.cuda.max_memory_allocated() / 2**30
    rows: list[dict[str, Any]] = []
    for variant in variants:
        variant.use()
        kinds: Counter[str] = Counter()
        for kernel, ms in step.kernels().items():
            words = kernel.lower()
            kinds[next((kind for kind, marks in KINDS.items() if any(m in words for m in marks)), "rest")] += ms
        mine = times[variant.name]
        row = {"variant": variant.name, "ms": statistics.median(mine), "least": min(mine), "largest": max(mine)}
        rows.append(row | {"peak": peaks.get(variant.name, 0.0), "tokens/s": step.tokens / row["ms"] * 1e3} | kinds)
    against = next((row["ms"] for row in rows if row["variant"] == "bf16"), rows[0]["ms"])
    return [row | {"to bf16": row["ms"] / against} for row in rows]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    ms = f"{row['ms']:.1f} ({row['least']:.1f}-{row['largest']:.1f})"
    kinds = (f"{row.get(kind, 0.0):.1f}" for kind in (*KINDS, "rest"))
    return (row["variant"], ms, f"{row['tokens/s']:,.0f}", f"{row['to bf16']:.3f}", f"{row['peak']:.1f}", *kinds)


if __name__ == "__main__":
    main()
