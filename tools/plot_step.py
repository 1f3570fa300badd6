"""Where the time of a step goes, beside the floor of its arithmetic: from what tools/bench_step.py --json wrote.

    python tools/plot_step.py step.json [step2.json ...] --picture step.png

Kernels are counted to components by their names. Floors: the architecture's own FLOPs at --tflops (700: what bf16
products of these shapes reach on an H200); mHC streams and added gradients by their bytes at --tbps (4.3).
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from megatron_dsv41.config import DSV41Config
from megatron_dsv41.experiments.flops import count_parameters, flops_per_token
from megatron_dsv41.experiments.plots import COLOURS, new_axes, save_axes
from megatron_dsv41.presets import PRESETS
from megatron_dsv41.testing.bench import table

# Component: pattern of its kernels' names; the first that matches counts.
KERNELS = {
    "routed experts": "GroupProblemShape",
    "head products": "nvjet_sm90_tss",
    "dense linears": "nvjet|gemm|splitK",
    "sparse attention": "^(void )?(attend_|prepare$)",
    "mHC": "^(void )?(site_|predict_|fn_gradient|sum_gradients|sum_mix|sum_fn)",
    "selection": "^score_|^largest|^block_maxima",
    "gradients added": "CUDAFunctor_add<c10::BFloat16>",
    "rotary": "^_rotate$",
    "SwiGLU and norms": "^_forward$|^_backward$|^_sum_weight$|^_fake$",
    "rows of experts": "^spread_|^sum_forward$",
    "Engram gate": "^gate_",
    "all else": "",
}
FLOPS = {
    "routed experts": ("experts",),
    "dense linears": ("attention linears", "engram projections", "compressors", "routers", "indexer projections"),
    "sparse attention": ("attention window + selected",),
    "selection": ("indexer scores",),
    "head products": ("head",),
}


def main() -> None:
    """Print one table per file and draw the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="proxy")
    parser.add_argument("--tflops", type=float, default=700.0)
    parser.add_argument("--tbps", type=float, default=4.3)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    config = PRESETS[args.preset]()
    for file in args.files:
        found = json.loads(file.read_text())
        took, least = components(found["kernels_ms"]), floors(config, found, args.tflops, args.tbps)
        rows = [(name, f"{ms:.1f}", f"{least[name]:.1f}" if name in least else "") for name, ms in took.items()]
        total = (f"{sum(took.values()):.1f}", f"{sum(least.values()):.1f}")
        print(f"{file}: {found['ms']:.1f} ms, {found['tokens/s']:,.0f} tokens/s")
        print(table(("component", "ms", "floor ms"), [*rows, ("all", *total)]))
        if args.picture and file == args.files[0]:
            draw(args.picture, took, least, f"{sum(took.values()):.0f} ms of kernels on one H200")


def components(kernels: dict[str, float]) -> dict[str, float]:
    """Milliseconds by component, largest first."""
    took = dict.fromkeys(KERNELS, 0.0)
    for kernel, ms in kernels.items():
        took[next(name for name, pattern in KERNELS.items() if re.search(pattern, kernel))] += ms
    return dict(sorted(took.items(), key=lambda item: -item[1]))


def floors(config: DSV41Config, found: dict[str, Any], tflops: float, tbps: float) -> dict[str, float]:
    """Milliseconds that a component takes at least. Shared experts count to the dense linears."""
    tokens = round(found["tokens/s"] * found["ms"] / 1e3)
    training = flops_per_token(config, tokens).training
    least = {name: sum(training[part] for part in parts) for name, parts in FLOPS.items()}
    shared = least["routed experts"] * config.n_shared_experts / (config.n_shared_experts + config.num_experts_per_tok)
    least["routed experts"] -= shared
    least["dense linears"] += shared
    least = {name: flops * tokens / tflops / 1e9 for name, flops in least.items()}
    # Per site: streams read and written, output and next input; backward 15 tensors of d (docs/benchmarks.md).
    width, sites = config.hidden_size * 2, 2 * config.num_hidden_layers
    least["mHC"] = sites * tokens * width * ((2 * config.hc_mult + 2) + 15) / tbps / 1e9
    least["gradients added"] = count_parameters(config).total * 3 * 2 / tbps / 1e9
    return least


def draw(picture: Path, took: dict[str, float], least: dict[str, float], title: str) -> None:
    """Bars of what components take, and of their floors."""
    axes = new_axes(f"one step by component: {title}", "ms", "")
    names = list(took)[::-1]
    places = range(len(names))
    axes.barh([p + 0.2 for p in places], [took[n] for n in names], height=0.4, color=COLOURS[0], label="measured")
    axes.barh(
        [p - 0.2 for p in places], [least.get(n, 0.0) for n in names], height=0.4, color=COLOURS[1], label="floor"
    )
    axes.set_yticks(list(places), names)
    axes.legend(frameon=False, loc="lower right")
    save_axes(axes, picture)


if __name__ == "__main__":
    main()
