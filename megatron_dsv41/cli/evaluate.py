"""`dsv41 evaluate`: validation loss and bits per byte of a checkpoint, per domain."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megatron_dsv41.cli.devices import check_device
from megatron_dsv41.cli.tables import make_table, open_console

HELP = "loss and bits per byte of a checkpoint on prepared data, per domain"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument(
        "checkpoint", help="a run's folder or RUN/iter_N, a native folder, or a folder in the released layout"
    )
    parser.add_argument(
        "--data",
        action="append",
        metavar="[NAME=]PREFIX",
        help="prepared data, one domain each; may be repeated (default: the run's data.valid)",
    )
    parser.add_argument("--tokenizer", help="that of the data (default: the one named by the prepared files)")
    parser.add_argument("--step", type=int, help="of a run (default: the newest complete checkpoint)")
    parser.add_argument("--seq-length", type=int, help="tokens of a sequence (default: the run's, else 4096)")
    parser.add_argument("--rows", type=int, default=8, help="sequences at a time (default: 8)")
    parser.add_argument("--limit", type=int, help="tokens of each domain (default: all)")
    parser.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    parser.add_argument(
        "--ops", action="append", default=[], metavar="OP=PROVIDER", help="as in dsv41 parity; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Evaluate every domain, then print the table."""
    for name in ("seq_length", "rows", "limit"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
    check_device(args.device)
    source, config, training = open_checkpoint(Path(args.checkpoint), args.step)
    named = args.data or (list(training.data.valid) if training else [])
    domains = _domains(named)
    if not domains:
        raise ValueError(f"{args.checkpoint} names no data.valid: give --data PREFIX")
    from megatron_dsv41.data.check import check_prepared

    for prefix in domains.values():  # before minutes of reading weights
        check_prepared(prefix, config, min_tokens=2)
    model = _load(source, config, training, next(iter(domains.values())), args)
    seq_length = args.seq_length or (training.data.seq_length if training else 4096)
    rows = [_row(name, prefix, model, seq_length, args) for name, prefix in domains.items()]
    if args.json:
        print(json.dumps({"checkpoint": args.checkpoint, "seq_length": seq_length, "domains": rows}))
    else:
        _print(rows)
    return 0


def open_checkpoint(path: Path, step: int | None) -> tuple[Any, Any, Any]:
    """The weights, their config, and the run as it was in the phase that saved them (None: not a run's).

    ValueError when there is no checkpoint, or none of `step`.
    """
    from megatron_dsv41.backends.megatron.run_source import RunSource, named_checkpoint
    from megatron_dsv41.checkpoint.convert import open_source

    named = named_checkpoint(path, step)
    if named is not None:
        found = RunSource(*named)
        return found, found.config, found.run.leg_of(found.step).run
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder with a checkpoint")
    source = open_source(path)
    return source, source.config, None


def _domains(entries: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in entries:
        name, _, prefix = entry.rpartition("=")
        if (name or prefix) in found:
            raise ValueError(f"--data names {name or prefix!r} twice")
        found[name or prefix] = prefix
    return found


def _load(source: Any, config: Any, training: Any, prefix: str, args: argparse.Namespace) -> Any:
    import torch

    from megatron_dsv41.data.prepared import prepared_paths
    from megatron_dsv41.data.token_map import load_token_map
    from megatron_dsv41.modules.transformer import Transformer
    from megatron_dsv41.ops.registry import Ops, read_choice
    from megatron_dsv41.phase import Phase

    choice, stored = read_choice(args.ops), set(source.names())
    token_map = load_token_map(prepared_paths(prefix).token_map, config).ids.to(args.device)
    ops, phase = Ops(choice), training.phase if training else Phase()
    with torch.device(args.device):
        model = Transformer(config, token_map, phase=phase, ops=ops)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in stored:
                tensor.copy_(source.read(name))
    return model.eval()


def _row(name: str, prefix: str, model: Any, seq_length: int, args: argparse.Namespace) -> dict[str, Any]:
    from megatron_dsv41.data.evaluation import evaluate
    from megatron_dsv41.data.prepared import read_sidecar
    from megatron_dsv41.data.progress import progress
    from megatron_dsv41.data.text_bytes import token_bytes
    from megatron_dsv41.data.tokenizer import open_tokenizer

    sidecar = read_sidecar(prefix)
    tokenizer = open_tokenizer(args.tokenizer or sidecar.tokenizer)
    if tokenizer.sha256 != sidecar.tokenizer_sha256:
        raise ValueError(f"{tokenizer.path} is not the tokenizer that {prefix} was prepared with: give --tokenizer")
    total = min(sidecar.tokens - 1, args.limit or sidecar.tokens)
    with progress(name, total, "tokens") as advance:
        score = evaluate(
            model,
            prefix,
            token_bytes(tokenizer),
            seq_length=seq_length,
            rows=args.rows,
            limit=args.limit,
            advance=lambda tokens: advance(tokens, ""),
        )
    return {
        "domain": name,
        "tokens": score.predicted,
        "text_bytes": score.text_bytes,
        "nats_per_token": score.nats_per_token,
        "bits_per_byte": score.bits_per_byte,
    }


def _print(rows: list[dict[str, Any]]) -> None:
    columns = ("domain", "tokens", "bytes of text", "nats per token", "bits per byte")
    cells = [
        (
            row["domain"],
            f"{row['tokens']:,}",
            f"{row['text_bytes']:,}",
            f"{row['nats_per_token']:.4f}",
            f"{row['bits_per_byte']:.4f}",
        )
        for row in rows
    ]
    open_console().print(make_table(columns, cells))
