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
from torch import Tensor

from megatron_dsv41.backends.te.machine import low_precision
from megatron_dsv41.experiments.plots import plot_loss
from megatron_dsv41.modules.primitives import TorchPrimitives
from megatron_dsv41.modules.transformer import Transformer, next_token_loss
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.precision import Precision
from megatron_dsv41.presets import tiny
from megatron_dsv41.testing.bench import table

VOCABULARY, LENGTH, ROWS = 2048, 256, 8
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
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [parameter.detach().float().requires_grad_() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses = []
    for step in range(steps):
        ids_BS = progressions(step).cuda()
        output = model(ids_BS)
        weight_BS = torch.ones_like(ids_BS).index_fill(1, torch.tensor([LENGTH - 1], device="cuda"), 0)
        loss = next_token_loss(output.logits, ids_BS.roll(-1, 1), weight_BS)
        (loss + output.aux.loss.sum()).backward()
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad, parameter.grad = None if parameter.grad is None else parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / 20)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def progressions(step: int) -> Tensor:
    """Tokens int64 [rows, length]: runs of arithmetic progressions of random length, start and stride, so that there is
    something to learn for long."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.rand(ROWS, LENGTH, generator=generator) < 1 / 24
    starts[:, 0] = True
    run = starts.cumsum(1) - 1
    first = torch.randint(4, VOCABULARY, (ROWS, LENGTH), generator=generator).gather(1, run)
    stride = torch.randint(1, 17, (ROWS, LENGTH), generator=generator).gather(1, run)
    begin = torch.where(starts, torch.arange(LENGTH), 0).cummax(1).values
    return (first + stride * (torch.arange(LENGTH) - begin) - 4) % (VOCABULARY - 4) + 4


if __name__ == "__main__":
    main()
