"""Time the parts of an Engram step on one device, each beside its bandwidth floor.

    python tools/bench_engram.py [--tokens 4096 65536] [--rows 384006168] [--shard-rows 48000771] [--gate triton]
    python tools/bench_engram.py --device cpu --tokens 64 --rows 20000 --shard-rows 2000   # the same code, small

Parts: row numbers from token ids, distinct rows, gather and decode of FP8 rows, gate forward and backward, gradients
summed by row, the balanced update of one owner's rows. A floor is the bytes that the part must move at least, over
`--bandwidth`, 4.3 TB/s by default: what an H200 copies at.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_dsv41 import presets
from megatron_dsv41.modules.engram import EngramHash
from megatron_dsv41.ops.documents import documents_from_lengths
from megatron_dsv41.ops.engram.rows import RowFormat
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.optim.row_blocks import row_sparse
from megatron_dsv41.optim.sinkhorn import sinkhorn_update
from megatron_dsv41.parallel.engram import Merge
from megatron_dsv41.testing.bench import table

LAYER = 1


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 65536])
    parser.add_argument("--rows", type=int, default=384_006_168, help="of the table that rows are gathered from")
    parser.add_argument("--shard-rows", type=int, default=48_000_771, help="of the owner whose update is timed")
    parser.add_argument("--gate", default="ref", help="provider of engram.gate")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes per second")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    rows = []
    for tokens in args.tokens:
        rows += measure_tokens(tokens, args.rows, args.gate, device, args.repeats)
    rows.append(measure_update(args.shard_rows, max(args.tokens), device, args.repeats))
    for row in rows:
        row["floor ms"] = row["bytes"] / args.bandwidth * 1e3
    columns = ("part", "tokens", "ms", "floor ms", "of the floor")
    print(f"{device}, {args.rows:,} rows, floors at {args.bandwidth / 1e12:g} TB/s")
    shown = [[*(r[c] for c in columns[:2]), *(f"{r[c]:.3f}" for c in columns[2:4]), rate(r)] for r in rows]
    print(table(columns, shown))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def rate(row: dict[str, Any]) -> str:
    """The floor as a share of the time."""
    return f"{row['floor ms'] / row['ms']:.0%}"


def measure_tokens(tokens: int, table_rows: int, gate: str, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """The parts that work on the tokens of one micro-batch."""
    config, generator = presets.flash(), torch.Generator(device).manual_seed(0)
    columns, streams, hidden = config.engram_columns, config.hc_mult, config.hidden_size
    token_map = torch.arange(config.vocab_size, device=device) % config.engram_compressed_vocab_size
    hashing = EngramHash(config, token_map)
    ids_T = torch.randint(config.vocab_size, (tokens,), device=device, generator=generator)
    documents = documents_from_lengths([[tokens]], tokens, device)
    numbers_TC = hashing(ids_T, documents, [LAYER])[LAYER] % table_rows
    unique_U, slots_E = torch.unique(numbers_TC.flatten(), return_inverse=True)
    form = RowFormat("float8", config.engram_head_dim)
    published = torch.empty(table_rows, form.width, dtype=torch.uint8, device=device)
    published[unique_U] = form.encode(torch.randn(len(unique_U), form.dim, device=device, generator=generator))
    dtype, entries = torch.bfloat16, tokens * columns
    merge = Merge.of(slots_E)
    grads_ED = torch.randn(entries, form.dim, device=device, dtype=dtype, generator=generator)
    run_gate = Ops({"engram.gate": gate})["engram.gate"]

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator).requires_grad_()

    inputs = drawn(tokens, streams, hidden), drawn(tokens, streams, hidden), drawn(tokens, hidden)
    weights = drawn(streams, hidden), drawn(streams, hidden)
    open_T = torch.ones(tokens, dtype=torch.bool, device=device)
    out = run_gate(*inputs, *weights, open_T, config.rms_norm_eps)
    grad = torch.randn_like(out)
    gate_bytes = tokens * hidden * dtype.itemsize
    parts: list[tuple[str, Callable[[], object], float]] = [
        ("row numbers", lambda: hashing(ids_T, documents, [LAYER]), tokens * 8 + entries * 8),
        ("distinct rows", lambda: torch.unique(numbers_TC.flatten(), return_inverse=True), entries * 24),
        (
            "gather and decode",
            lambda: form.decode(published.index_select(0, numbers_TC.flatten()), dtype),
            entries * (form.width + form.dim * dtype.itemsize),
        ),
        (
            "gate forward",
            lambda: run_gate(*inputs, *weights, open_T, config.rms_norm_eps),
            gate_bytes * (3 * streams + 1),
        ),
        (
            "gate backward",
            lambda: torch.autograd.grad(out, [*inputs, *weights], grad, retain_graph=True),
            gate_bytes * (5 * streams + 2),
        ),
        (
            "gradients by row",
            lambda: merge(grads_ED),
            entries * form.dim * dtype.itemsize + len(unique_U) * form.dim * 4,
        ),
    ]
    return [
        {"part": name, "tokens": tokens, "ms": elapsed_ms(call, device, repeats), "bytes": size}
        for name, call, size in parts
    ]


def measure_update(rows: int, tokens: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """The balanced update of one owner's rows: bf16 master and momentum, gradients of the rows of `tokens` tokens."""
    config = presets.flash()
    dim, touched = config.engram_head_dim, min(rows, tokens * config.engram_columns)
    weight = torch.zeros(rows, dim, dtype=torch.bfloat16, device=device)
    momentum = torch.randn(rows, dim, dtype=torch.bfloat16, device=device)
    ids = torch.arange(touched, device=device) * (rows // touched)
    grad = row_sparse(ids, torch.randn(touched, dim, device=device), rows)
    # Passes that read the momentum: norms, five pairs of steps, the last step with both written.
    size = rows * dim * 2 * (7 + 3) + touched * dim * 4 * 7
    call = lambda: sinkhorn_update(weight, grad, momentum, lr=1e-3)  # noqa: E731
    return {"part": "balanced update", "tokens": tokens, "ms": elapsed_ms(call, device, repeats), "bytes": size}


def elapsed_ms(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median milliseconds of a call, device work included."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    times = []
    for _ in range(repeats):
        finish()
        begin = time.perf_counter()
        call()
        finish()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()
