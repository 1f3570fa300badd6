"""Time the CSA2 kernels beside every importable peer, on one GPU, in one run.

    python tools/bench_ops.py [--tokens 4096 16384] [--ops attend select] [--heads 64] [--json out.json]

Medians (lowest-highest) over CUDA-graph replays. The floor of a line is the largest of its arithmetic at 700 TFLOP/s,
its gathers at 8.2 TB/s and its fp32 reductions at 3.75 TB/s, all measured on one H200 (docs/benchmarks.md).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_dsv41.ops.csa2 import triton_attend, triton_divergence, triton_select
from megatron_dsv41.ops.csa2.attend import Problem, slot_table
from megatron_dsv41.ops.documents import documents_from_lengths
from megatron_dsv41.testing.bench import backward_call, device_ms, table

TFLOPS, GATHER_TBPS, REDUCE_TBPS = 700.0, 8.2, 3.75
OPS = ["attend", "select", "divergence"]
DIM, WINDOW, TOPK, INDEX_HEADS, INDEX_DIM = 512, 128, 512, 32, 128


class Work(NamedTuple):
    """What one call must do: 1e12 floating-point operations, 1e12 bytes gathered, 1e12 bytes reduced in fp32."""

    tflop: float
    gather: float = 0.0
    reduce: float = 0.0

    @property
    def floor_ms(self) -> float:
        """Milliseconds that no implementation on an H200 beats."""
        return 1e3 * max(self.tflop / TFLOPS, self.gather / GATHER_TBPS, self.reduce / REDUCE_TBPS)


class Line(NamedTuple):
    """One thing to time."""

    op: str
    provider: str
    shape: str
    work: Work
    call: Callable[[], object]


def random_topk(tokens: int, clustered: bool, generator: torch.Generator) -> torch.Tensor:
    """Selected entries int32 [T, 512] of one document of ratio 1: uniform over the past, or runs that queries share."""
    here = torch.arange(tokens, device="cuda")[:, None]
    if clustered:  # 16 runs of 32 entries, whose places move once per 64 queries
        place = torch.rand(tokens // 64 + 1, 16, generator=generator, device="cuda").repeat_interleave(64, 0)[:tokens]
        runs = (place * (here - 40).clamp_min(1)).long()[:, :, None] + torch.arange(32, device="cuda")
        chosen = runs.flatten(1)
    else:
        chosen = (torch.rand(tokens, TOPK, generator=generator, device="cuda") * (here + 1)).long()
    chosen = torch.minimum(chosen, here).sort(1).values
    return torch.where(torch.arange(TOPK, device="cuda") <= here, chosen, -1).to(torch.int32)


def attend_lines(tokens: int, heads: int, clustered: bool) -> Iterator[Line]:
    """Sparse attention of one layer: window 128 and Top-512 of `tokens` entries."""
    generator = torch.Generator("cuda").manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, device="cuda").bfloat16()  # noqa: E731
    q, grad_out, window_kv, keys = (
        draw(tokens, heads, DIM),
        draw(tokens, heads, DIM),
        draw(tokens, DIM),
        draw(tokens, DIM),
    )
    sink = torch.randn(heads, generator=generator, device="cuda")
    start = documents_from_lengths([[tokens]], tokens, torch.device("cuda")).window_start(WINDOW)
    topk = random_topk(tokens, clustered, generator)
    used = int((topk >= 0).sum()) + int((torch.arange(tokens) + 1).clamp_max(WINDOW).sum())
    flop = 2e-12 * used * heads * DIM
    gather = 1e-12 * used * DIM * 2
    shape = f"T={tokens} H={heads} {'clustered' if clustered else 'random'}"
    problem = Problem(tokens, heads, DIM, WINDOW, TOPK, 0, DIM**-0.5, False)
    ordered = Problem(tokens, heads, DIM, WINDOW, TOPK, 0, DIM**-0.5, True)
    inputs = (q, window_kv, keys, topk, sink, start)
    out, lse = triton_attend.forward(problem, *inputs)
    saved = (q, window_kv, keys, topk, start, out, lse, grad_out)
    forward = Work(2 * flop, gather)
    backward = Work(5 * flop, gather, 2e-12 * int((topk >= 0).sum()) * DIM * 2)
    yield Line("attend fwd", "triton", shape, forward, lambda: triton_attend.forward(problem, *inputs))
    if heads == 64 and importlib.util.find_spec("flash_mla"):
        from megatron_dsv41.ops.csa2 import flash_mla_attend

        rows = torch.cat([window_kv, keys]).unsqueeze(1)
        slots = slot_table(problem, topk, start, tokens, flash_mla_attend.SLOT_BLOCK).unsqueeze(1)

        def kernel() -> object:
            return flash_mla_attend.flash_mla_sparse_fwd(q, rows, slots, DIM**-0.5, attn_sink=sink, use_legacy=True)

        yield Line("attend fwd", "FlashMLA kernel alone", shape, forward, kernel)
        yield Line("attend fwd", "flash_mla", shape, forward, lambda: flash_mla_attend.forward(problem, *inputs))
    if torch.cuda.get_device_capability() == (9, 0):
        from megatron_dsv41.ops.csa2 import hopper_attend

        yield Line("attend fwd", "hopper", shape, forward, lambda: hopper_attend.forward(problem, *inputs))
        yield Line("attend bwd", "hopper", shape, backward, lambda: hopper_attend.backward(problem, *saved))
        ordered_backward = lambda: hopper_attend.backward(ordered, *saved)  # noqa: E731
        yield Line("attend bwd", "hopper, deterministic", shape, backward, ordered_backward)
        if importlib.util.find_spec("cudnn") and importlib.util.find_spec("cutlass"):
            yield from cudnn_lines(problem, saved, shape, backward)
    yield Line("attend bwd", "triton", shape, backward, lambda: triton_attend.backward(problem, *saved))
    yield Line("attend bwd", "triton, deterministic", shape, backward, lambda: triton_attend.backward(ordered, *saved))
    teacher = lambda: triton_attend.teacher_probabilities(problem, q, keys, topk, lse)  # noqa: E731
    yield Line("teacher", "triton", shape, Work(flop * TOPK / (TOPK + WINDOW), gather), teacher)


def cudnn_lines(problem: Problem, saved: tuple[torch.Tensor, ...], shape: str, work: Work) -> Iterator[Line]:
    """cuDNN's backward alone, its table prepared, and as the provider runs it."""
    from megatron_dsv41.ops.csa2 import cudnn_attend

    q, window_kv, keys, topk, start, out, lse, grad_out = saved
    rows = torch.cat([window_kv, keys])
    slots = slot_table(problem, topk, start, len(window_kv), cudnn_attend.SLOT_BLOCK)
    no_sink = torch.full_like(lse[0], -torch.inf)

    def kernel() -> object:
        return cudnn_attend.sparse_attention_backward_wrapper(
            q, rows, out, grad_out, lse, no_sink, slots, problem.scale
        )

    yield Line("attend bwd", "cuDNN kernels alone", shape, work, kernel)
    yield Line("attend bwd", "cudnn", shape, work, lambda: cudnn_attend.backward(problem, *saved))


def select_lines(tokens: int) -> Iterator[Line]:
    """The indexer of one layer of ratio 1: scores, block maxima, Top-512, and the parts that can be timed alone."""
    generator = torch.Generator("cuda").manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, device="cuda").bfloat16()  # noqa: E731
    q, weights, keys = draw(tokens, INDEX_HEADS, INDEX_DIM), draw(tokens, INDEX_HEADS) / 64, draw(tokens, INDEX_DIM)
    entries = documents_from_lengths([[tokens]], tokens, torch.device("cuda")).entries(1)
    pairs = tokens * (tokens + 1) / 2
    score = Work(2e-12 * pairs * INDEX_HEADS * INDEX_DIM)
    shape = f"T={tokens} ratio 1"
    some = range(max(0, tokens - triton_select.SCORES_AT_ONCE // tokens), tokens)
    part = f"{shape}, last {len(some)} rows"
    pairs_part = len(some) * (some.start + some.stop + 1) / 2
    scores = triton_select.score_rows(q, weights, keys, entries, some, None, 0)
    chosen = torch.empty(tokens, TOPK, dtype=torch.int32, device="cuda")
    yield Line("select", "triton", shape, score, lambda: triton_select.select(q, weights, keys, entries, TOPK))
    yield Line(
        "select + pool", "triton", shape, score,
        lambda: triton_select.select(q, weights, keys, entries, TOPK, None, 8, 2048),
    )  # fmt: skip
    yield Line(
        "index scores", "triton", part, Work(2e-12 * pairs_part * INDEX_HEADS * INDEX_DIM),
        lambda: triton_select.score_rows(q, weights, keys, entries, some, None, 0),
    )  # fmt: skip
    yield Line(
        "top-512", "triton", part, Work(0, 4e-12 * pairs_part),
        lambda: triton_select.largest(scores, entries, chosen, some, 0),
    )  # fmt: skip
    yield Line("top-512", "torch.topk", part, Work(0, 4e-12 * pairs_part), lambda: scores.topk(TOPK, dim=1))


def divergence_lines(tokens: int) -> Iterator[Line]:
    """The indexer's loss of one layer of ratio 1 over Top-512 of `tokens` entries, forward and backward."""
    generator = torch.Generator("cuda").manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, device="cuda").bfloat16()  # noqa: E731
    q, weights, keys = draw(tokens, INDEX_HEADS, INDEX_DIM), draw(tokens, INDEX_HEADS) / 64, draw(tokens, INDEX_DIM)
    leaves = [x.requires_grad_() for x in (q, weights, keys)]
    slots = random_topk(tokens, False, generator)
    teacher = torch.rand(tokens, TOPK, generator=generator, device="cuda")
    loss = lambda: triton_divergence.index_divergence(q, weights, keys, slots, teacher)  # noqa: E731
    used = int((slots >= 0).sum())
    flop, gather = 2e-12 * used * INDEX_HEADS * INDEX_DIM, 1e-12 * used * INDEX_DIM * 2
    shape = f"T={tokens} ratio 1"
    yield Line("divergence fwd", "triton", shape, Work(flop, gather), lambda: loss().detach())
    yield Line(
        "divergence bwd", "triton", shape, Work(3 * flop, gather, 1e-12 * used * INDEX_DIM * 4),
        backward_call(lambda: [loss()], leaves),
    )  # fmt: skip


def measure(line: Line) -> dict[str, Any]:
    """One line's numbers."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    line.call()
    peak = torch.cuda.max_memory_allocated() - before
    time = device_ms(line.call)
    return {
        "op": line.op, "provider": line.provider, "shape": line.shape, "ms": time.median, "low_ms": time.low,
        "high_ms": time.high, "tflops": 1e3 * line.work.tflop / time.median, "floor_ms": line.work.floor_ms,
        "share_of_floor": line.work.floor_ms / time.median, "peak_mib": peak / 2**20,
    }  # fmt: skip


def commit() -> str:
    """The commit that is measured, or 'unknown' outside a repository."""
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def lines(args: argparse.Namespace) -> Iterator[Line]:
    """Everything that was asked for, one shape after the other."""
    for tokens in args.tokens:
        if "attend" in args.ops:
            for clustered in (False, True):
                yield from attend_lines(tokens, args.heads, clustered)
        if "select" in args.ops:
            yield from select_lines(tokens)
        if "divergence" in args.ops:
            yield from divergence_lines(tokens)


def main() -> int:
    """Time, print a table, and with --json write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_ops: no CUDA device; the kernels are timed on a GPU", file=sys.stderr)
        return 1
    results = []
    for line in lines(args):
        results.append(measure(line))
        torch.cuda.empty_cache()
        print(f"{line.op}, {line.provider}, {line.shape}: {results[-1]['ms']:.3f} ms", file=sys.stderr, flush=True)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit()}
    rows = [
        (r["op"], r["provider"], r["shape"], f"{r['ms']:.3f} ({r['low_ms']:.3f}-{r['high_ms']:.3f})",
         f"{r['tflops']:.0f}", f"{r['floor_ms']:.3f}", f"{r['share_of_floor']:.0%}", f"{r['peak_mib']:.0f}")
        for r in results
    ]  # fmt: skip
    print(
        about, table(("op", "provider", "shape", "ms", "TFLOP/s", "floor ms", "of floor", "peak MiB"), rows), sep="\n"
    )
    if args.json:
        args.json.write_text(json.dumps(about | {"results": results}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
