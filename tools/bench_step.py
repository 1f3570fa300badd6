"""Time forward and backward of a whole model on one GPU, and show where the time goes.

    python tools/bench_step.py [--preset proxy] [--tokens 4096] [--ops '*=hopper, triton, grouped, blocked, split']
    python tools/bench_step.py --tokens 65536 --model num_hidden_layers=4 compress_ratios=[1,1,1,1] ...  # other depths

Random tokens of one document, bf16, no optimizer. Printed: milliseconds (median, range), tokens/s, TFLOP/s of the
architecture's own count, peak memory, how often the host waited for the device inside a step, and device time by kernel
from a profiler run of its own. Gradients are new in every step (the first micro-batch) or added to those there are.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.utils.checkpoint import checkpoint

from megatron_dsv41.backends.te.machine import low_precision
from megatron_dsv41.cli.devices import check_device
from megatron_dsv41.config import DSV41Config
from megatron_dsv41.experiments.flops import count_parameters, flops_per_token
from megatron_dsv41.experiments.memory import Layout, memory_per_rank
from megatron_dsv41.modules.primitives import TorchPrimitives
from megatron_dsv41.modules.transformer import Transformer, make_batch, one_document_per_row
from megatron_dsv41.ops.registry import Ops, read_choice
from megatron_dsv41.phase import Phase
from megatron_dsv41.precision import Precision
from megatron_dsv41.presets import PRESETS
from megatron_dsv41.run_config import Recompute
from megatron_dsv41.testing.bench import FASTEST, table

SHOWN = 25


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="proxy")
    parser.add_argument("--tokens", type=int, default=4096, help="sequence length (default 4096)")
    parser.add_argument("--ops", action="append", metavar="OP=PROVIDERS", help=f"may be repeated (default '{FASTEST}')")
    parser.add_argument(
        "--index-loss", choices=("off", "sparse"), default="off", help="indexer objective (default off)"
    )
    parser.add_argument("--model", nargs="+", default=[], metavar="KEY=VALUE", help="change the preset's settings")
    parser.add_argument(
        "--fp8", choices=("off", "delayed", "current", "block", "mxfp8"), default="off", help="linears (default off)"
    )
    parser.add_argument("--recompute", choices=("none", "block"), default="none", help="(default none)")
    parser.add_argument("--gradients", choices=("new", "added"), default="added", help="(default added)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cuda", help="(default cuda)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    check_device(args.device)
    choice = read_choice(args.ops or ([FASTEST] if args.device == "cuda" else []))
    changes = {key: yaml.safe_load(value) for key, value in (entry.split("=", 1) for entry in args.model)}
    step = Step(
        PRESETS[args.preset]().with_overrides(changes),
        args.tokens,
        Ops(choice),
        Phase(index_loss=args.index_loss),
        torch.device(args.device),
        adds=args.gradients == "added",
        recompute=args.recompute,
        precision=Precision(fp8=args.fp8),
    )
    found = step.measure(args.repeats)
    print(step.model.ops.table())
    print(table(("what", "value"), [(key, f"{value:,.4g}") for key, value in found.items()]))
    kernels = step.kernels()
    total = sum(kernels.values())
    rows = [(name[:90], f"{ms:.2f}", f"{ms / total:.1%}") for name, ms in kernels.most_common(SHOWN)]
    print(table(("kernel", "ms", "of all"), [*rows, ("all kernels", f"{total:.2f}", "100%")]))
    if args.json:
        args.json.write_text(json.dumps(found | {"kernels_ms": dict(kernels.most_common())}, indent=1))


class Step:
    """A model with random weights and one batch of random tokens."""

    def __init__(
        self,
        config: DSV41Config,
        tokens: int,
        ops: Ops,
        phase: Phase,
        device: torch.device,
        *,
        adds: bool = True,
        recompute: Recompute = "none",
        precision: Precision | None = None,
    ):
        self.phase, self.tokens, self.device = phase, tokens, device
        self.adds = adds
        self.recompute: Recompute = recompute
        self.config = config.with_overrides({"dtype": "bfloat16"}) if device.type == "cuda" else config
        token_map = torch.arange(self.config.vocab_size, device=device) % self.config.engram_compressed_vocab_size
        torch.manual_seed(0)
        primitives = TorchPrimitives(self.config, ops, substitute=low_precision(self.config, precision or Precision()))
        with device:
            self.model = Transformer(self.config, token_map, phase=phase, ops=ops, primitives=primitives)
        if recompute == "block":
            for block in self.model.layers:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        self.ids_BS = torch.randint(4, self.config.vocab_size, (1, tokens), device=device)

    def _layout(self) -> Layout:
        whole_logits = self.model.ops.chosen["head.losses"] == "ref"
        return Layout(seq_length=self.tokens, recompute=self.recompute, whole_logits=whole_logits)

    def run(self) -> None:
        """Forward, loss, backward."""
        if not self.adds:
            self.model.zero_grad(set_to_none=True)
        documents = one_document_per_row(self.config, self.ids_BS)
        batch = make_batch(self.config, self.model.engram_hash, self.ids_BS, documents)
        hidden_SBD, aux = self.model.hidden(self.ids_BS, batch)[:2]
        losses_T = self.model.head(hidden_SBD.flatten(0, 1), self.ids_BS.roll(-1, 1).flatten())
        (losses_T.mean() + aux.loss.sum()).backward()

    def measure(self, repeats: int) -> dict[str, float]:
        """Wall time of one step, device synchronized, and what follows from it."""
        for _ in range(2):
            self.run()
        resting = 0
        if self.device.type == "cuda":
            resting = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        times = [self._timed() for _ in range(repeats)]
        seconds = statistics.median(times)
        flops = flops_per_token(self.config, self.tokens, self.phase).training_total * self.tokens
        found = {
            "parameters": float(count_parameters(self.config).total),
            "ms": seconds * 1e3,
            "least ms": min(times) * 1e3,
            "largest ms": max(times) * 1e3,
            "tokens/s": self.tokens / seconds,
            "TFLOP/s": flops / seconds / 1e12,
        }
        if self.device.type == "cuda":
            peak, layout = torch.cuda.max_memory_allocated(), self._layout()
            found["peak GiB"] = peak / 2**30
            if self.adds:  # otherwise gradients are part of what a step allocates
                found["of it, activations GiB"] = (peak - resting) / 2**30
                found["planned activations GiB"] = memory_per_rank(self.config, layout)[0].activations / 2**30
            found["host waits"] = float(self._waits())
        return found

    def _waits(self) -> int:
        """Calls inside one step that made the host wait for the device, by torch's own count."""
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits = Counter(f"{w.filename}:{w.lineno}" for w in caught if "synchronizing" in str(w.message))
        for place, count in waits.most_common():
            print(f"host waits {count}x at {place}")
        return sum(waits.values())

    def _timed(self) -> float:
        self._synchronize()
        began = time.perf_counter()
        self.run()
        self._synchronize()
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def kernels(self) -> Counter[str]:
        """Milliseconds by kernel of one step (by operator on a CPU)."""
        activity = torch.profiler.ProfilerActivity
        cuda = self.device.type == "cuda"
        with torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU]) as profile:
            self.run()
            self._synchronize()
        found: Counter[str] = Counter()
        for event in profile.key_averages():
            entry: Any = event
            found[entry.key] += (entry.self_device_time_total if cuda else entry.self_cpu_time_total) / 1e3
        return found


if __name__ == "__main__":
    main()
