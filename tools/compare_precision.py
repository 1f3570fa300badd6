"""Train one small model in several precisions on one GPU and compare their losses.

    python tools/compare_precision.py [--steps 200] [--variants bf16 bf16-ulp current block experts] [--plot FILE.png]

Variants: bf16; bf16-ulp, whose initial weights differ by one bf16 rounding, as a measure of what any change of rounding
does; a recipe of `precision.fp8`; experts (`routing.experts: grouped_fp8`); or RECIPE+experts. They start from the same
weights and see the same tokens. Printed: the mean loss of every fifth of the run, and how far the last fifth lies from
bf16's.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from megatron_dsv41.backends.te.machine import low_precision
from megatron_dsv41.experiments.plots import plot_loss
from megatron_dsv41.modules.primitives import TorchPrimitives
from megatron_dsv41.modules.transformer import Transformer
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.precision import Precision
from megatron_dsv41.presets import tiny
from megatron_dsv41.testing.bench import table
from megatron_dsv41.testing.learning import loss_curve

VOCABULARY = 2048
SHAPE = {"hidden_size": 512, "moe_intermediate_size": 256, "q_lora_rank": 128, "o_lora_rank": 64, "dtype": "bfloat16"}
VARIANTS = ("bf16", "bf16-ulp", "delayed", "current", "block", "experts")


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), help=f"default: {' '.join(VARIANTS)}")
    parser.add_argument("--jobs", type=int, default=3, help="variants that train at once (default 3)")
    parser.add_argument("--json", type=Path, help="write every loss")
    parser.add_argument("--plot", type=Path, help="draw the curves (PNG)")
    args = parser.parse_args()
    curves = compare(args.variants, args.steps, args.jobs)
    fifth = max(1, args.steps // 5)
    last = {name: sum(losses[-fifth:]) / fifth for name, losses in curves.items()}
    rows = []
    for name, losses in curves.items():
        means = [f"{sum(losses[i : i + fifth]) / fifth:.4f}" for i in range(0, fifth * 5, fifth)]
        rows.append((name, *means, f"{last[name] / last.get('bf16', last[name]) - 1:+.2%}"))
    print(table(("variant", *(f"steps {i * fifth + 1}-{(i + 1) * fifth}" for i in range(5)), "last to bf16"), rows))
    if args.json:
        args.json.write_text(json.dumps(curves))
    if args.plot:
        named = {name: (range(1, len(losses) + 1), losses) for name, losses in curves.items()}
        plot_loss(named, args.plot, title=f"loss over {args.steps} steps by precision")


def compare(variants: list[str], steps: int, jobs: int) -> dict[str, list[float]]:
    """Variant -> its loss at every step."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return dict(zip(variants, pool.map(train, variants, [steps] * len(variants)), strict=True))


def train(variant: str, steps: int) -> list[float]:
    """Losses of one variant: AdamW on fp32 copies of bf16 weights."""
    parts = variant.split("+")
    recipe = next((part for part in parts if part not in ("bf16", "bf16-ulp", "experts")), "off")
    experts = "grouped_fp8" if "experts" in parts else "grouped"
    ops = Ops({"*": "triton, blocked", "csa2": "ref", "routing.experts": experts})
    config = tiny().with_overrides(SHAPE)
    torch.manual_seed(0)
    substitute = low_precision(config, Precision(fp8=recipe))  # type: ignore[arg-type]
    primitives = TorchPrimitives(config, ops, substitute=substitute)
    model = Transformer(config, torch.arange(VOCABULARY), ops=ops, primitives=primitives).cuda()
    if variant == "bf16-ulp":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 2.0**-8 * (torch.rand_like(parameter, dtype=torch.float32) - 0.5))
    return loss_curve(model, steps)


if __name__ == "__main__":
    main()
