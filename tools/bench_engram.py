"""Time the parts of an Engram step on one device, each beside its bandwidth floor.

    python tools/bench_engram.py [--tokens 4096 65536] [--rows 384006168] [--shard-rows 48000771] [--provider triton]
    python tools/bench_engram.py --device cpu --tokens 64 --rows 20000 --shard-rows 2000   # the same code, small

Parts: row numbers from token ids, distinct rows, gather and decode of FP8 rows, gate forward and backward, gradients
summed by row, the balanced update of one owner's rows, their encoding in FP8. A floor is the bytes that the part must
move at least, over `--bandwidth`, 4.3 TB/s by default: what an H200 copies at.

On a GPU, medians (lowest-highest) over CUDA-graph replays; "distinct rows" waits for the host and is timed eagerly. At
few tokens, replays take turns over several inputs, so that none is found in the cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_dsv41 import presets
from megatron_dsv41.modules.engram import EngramHash
from megatron_dsv41.ops.documents import documents_from_lengths
from megatron_dsv41.ops.engram.rows import RowFormat
from megatron_dsv41.ops.engram.runs import Runs
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.ops.row_blocks import row_blocks, row_sparse
from megatron_dsv41.testing.bench import Timing, backward_call, device_ms, eager_ms, table

LAYER = 1
UNIQUE = "distinct rows"
CACHED_TOKENS = 1 << 14  # up to here inputs take turns
Calls = Sequence[Callable[[], object]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 65536])
    parser.add_argument("--rows", type=int, default=384_006_168, help="of the table that rows are gathered from")
    parser.add_argument("--shard-rows", type=int, default=48_000_771, help="of the owner whose update is timed")
    parser.add_argument("--provider", help="of all ops; default: triton on a GPU, ref on a CPU")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes per second")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    provider = args.provider or ("triton" if device.type == "cuda" else "ref")
    ops = Ops({"engram": provider, "sinkhorn": provider})
    rows = []
    for tokens in args.tokens:
        rows += measure_tokens(tokens, args.rows, ops, device, args.repeats)
        gc.collect()  # of the table, before the next is made
    rows += measure_shard(args.shard_rows, max(args.tokens), ops, device, args.repeats)
    columns = ("part", "tokens", "ms", "floor ms", "of the floor")
    for row in rows:
        row["floor ms"] = row["bytes"] / args.bandwidth * 1e3
    print(f"{device}, {provider}, {args.rows:,} rows, floors at {args.bandwidth / 1e12:g} TB/s")
    shown = [[r["part"], r["tokens"], str(Timing(*spread(r))), f"{r['floor ms']:.3f}", rate(r)] for r in rows]
    print(table(columns, shown))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def rate(row: dict[str, Any]) -> str:
    """The floor as a share of the time."""
    return f"{row['floor ms'] / row['ms']:.0%}"


def spread(row: dict[str, Any]) -> tuple[float, float, float]:
    """Median, lowest and highest milliseconds of a result."""
    return row["ms"], row["low ms"], row["high ms"]


def measure_tokens(tokens: int, table_rows: int, ops: Ops, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """The parts that work on the tokens of one micro-batch."""
    config, generator = presets.flash(), torch.Generator(device).manual_seed(0)
    columns, streams, hidden = config.engram_columns, config.hc_mult, config.hidden_size
    token_map = torch.arange(config.vocab_size, device=device) % config.engram_compressed_vocab_size
    hashing = EngramHash(config, token_map, ops["engram.hash"])
    documents = documents_from_lengths([[tokens]], tokens, device)
    sets = range(6 if tokens <= CACHED_TOKENS else 1)
    ids = [torch.randint(config.vocab_size, (tokens,), device=device, generator=generator) for _ in sets]
    numbers = [hashing(part, documents, [LAYER])[LAYER].flatten() % table_rows for part in ids]
    runs = [Runs.of(part) for part in numbers]
    form, dtype, entries = RowFormat("float8", config.engram_head_dim), torch.bfloat16, tokens * columns

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator)

    published = torch.empty(table_rows, form.width, dtype=torch.uint8, device=device)
    for run in runs:
        published[run.rows_M] = form.encode(drawn(len(run.rows_M), form.dim))
    grads = [drawn(entries, form.dim) for _ in sets]
    distinct = statistics.mean(len(run.rows_M) for run in runs)
    values = entries * form.dim * dtype.itemsize
    shapes = (
        (tokens, streams, hidden),
        (tokens, streams, hidden),
        (tokens, hidden),
        (streams, hidden),
        (streams, hidden),
    )
    inputs = [drawn(*shape).requires_grad_() for shape in shapes]
    is_open, one = torch.ones(tokens, dtype=torch.bool, device=device), tokens * hidden * dtype.itemsize
    gate = lambda: [ops["engram.gate"](*inputs, is_open, config.rms_norm_eps)]  # noqa: E731
    parts = [
        ("row numbers", each(lambda i: hashing(i, documents, [LAYER]), ids), tokens * 8 + entries * 8),
        (UNIQUE, [lambda: torch.unique(numbers[0], return_inverse=True)], entries * 24),
        (
            "gather and decode",
            each(lambda n: ops["engram.read_rows"](published, n, form, dtype), numbers),
            entries * form.width + values,
        ),
        ("gate forward", [gate], one * (3 * streams + 1)),
        ("gate backward", [backward_of(gate, inputs, device)], one * (5 * streams + 2)),
        ("gradients by row", each(ops["engram.merge"], grads, runs), values + distinct * form.dim * 4),
    ]
    return [timed(name, tokens, calls, size, device, repeats) for name, calls, size in parts]


def measure_shard(rows: int, tokens: int, ops: Ops, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """One owner's rows with bf16 master and momentum: the update by gradients of `tokens` tokens, and publishing."""
    config = presets.flash()
    form, touched = RowFormat("float8", config.engram_head_dim), min(rows, tokens * config.engram_columns)
    dim = form.dim
    weight = torch.zeros(rows, dim, dtype=torch.bfloat16, device=device)
    momentum = torch.randn(rows, dim, dtype=torch.bfloat16, device=device)
    published = torch.empty(rows, form.width, dtype=torch.uint8, device=device)
    ids = torch.arange(touched, device=device) * (rows // touched)
    grad = row_sparse(ids, torch.randn(touched, dim, device=device), rows)

    def publish() -> None:
        for block in row_blocks(rows, dim):
            published[block] = ops["engram.encode_rows"](weight[block], form)

    # Passes that read the momentum: norms, five pairs of steps, the last step with both written.
    size = rows * dim * 2 * (7 + 3) + touched * dim * 4 * 7
    update = lambda: ops["sinkhorn.update"](weight, grad, momentum, lr=1e-3)  # noqa: E731
    return [
        timed("balanced update", tokens, [update], size, device, repeats),
        timed("rows in FP8", 0, [publish], rows * (2 * dim + form.width), device, repeats),
    ]


def each(function: Callable[..., object], *arguments: Sequence[Any]) -> Calls:
    """One call per set of arguments."""
    return [lambda group=group: function(*group) for group in zip(*arguments, strict=True)]


def backward_of(forward: Callable[[], list[torch.Tensor]], inputs: list[torch.Tensor], device: torch.device) -> Any:
    """A call of the backward alone."""
    if device.type == "cuda":
        return backward_call(forward, inputs)
    out = forward()
    grads = [torch.randn_like(part) for part in out]
    return lambda: torch.autograd.grad(out, inputs, grads, retain_graph=True)


def timed(name: str, tokens: int, calls: Calls, size: float, device: torch.device, repeats: int) -> dict[str, Any]:
    """A result: milliseconds of one call with their range, beside the bytes that it must move."""
    with torch.set_grad_enabled(name == "gate backward"):
        if device.type != "cuda":
            timing = wall_clock(calls[0], repeats)
        elif name == UNIQUE:
            timing = eager_ms(calls[0], repeats)
        else:
            timing = device_ms(*calls, repeats=repeats)
    return {
        **{"part": name, "tokens": tokens, "bytes": size},
        **{"ms": timing.median, "low ms": timing.low, "high ms": timing.high},
    }


def wall_clock(call: Callable[[], object], repeats: int) -> Timing:
    """Milliseconds of a call on the CPU."""
    call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    return Timing(statistics.median(times), min(times), max(times))


if __name__ == "__main__":
    main()
