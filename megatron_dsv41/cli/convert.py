"""`dsv41 convert`: the released layout in, the released layout out, and is a checkpoint whole?"""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dsv41.cli import convert_layout, convert_processes

if TYPE_CHECKING:
    from megatron_dsv41.checkpoint.pieces import Effort
    from megatron_dsv41.checkpoint.team import Team
    from megatron_dsv41.config import DSV41Config

HELP = "import, export and verify checkpoints in the released (Hugging Face) layout"
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}

EPILOG = """examples:
  dsv41 convert import DeepSeek-V4.1-Flash native/           # decoded to the config's dtype, nothing rounded
  dsv41 convert import DeepSeek-V4.1-Flash native/ --storage source
  dsv41 convert import DeepSeek-V4.1-Flash native/ --layout tp=2,pp=4,ep=4 --processes 4
  torchrun --nnodes 4 --nproc-per-node 2 --no-python dsv41 convert import DeepSeek-V4.1-Flash /shared/native/
  dsv41 convert export native/ out/                          # as it came in: the same bytes where nothing changed
  dsv41 convert export native/ out/ --storage bf16 --shards 10GB
  dsv41 convert export runs/first out/                       # a training run's newest checkpoint, its tokenizer too
  dsv41 convert export native/ out/ --storage released --plain 'layers.*.attn.*'
  dsv41 convert export native/ out/ --merge adapter/         # with a LoRA adapter added
  dsv41 convert verify DeepSeek-V4.1-Flash                   # names, shapes, scales, non-finite values
  dsv41 convert verify native/ out/                          # compare two, tensor by tensor

An interrupted conversion leaves DST.incomplete; the same command continues it, with any number of processes.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    add = actions.add_parser("import", help="released folder -> native folder").add_argument
    add("src", metavar="SRC", help="folder in the released layout")
    add("dst", metavar="DST", help="new or empty folder")
    add(
        "--storage",
        choices=("config", "source"),
        default="config",
        help="decode to the config's dtype (default), or keep quantized tensors as they are",
    )
    add("--layers", type=int, metavar="N", help="only the first N layers (ids kept, drafts dropped)")
    add("--experts", type=int, metavar="N", help="only the first N experts of every layer")
    add("--layout", metavar="SIZES", help=convert_layout.HELP)
    add("--tokenizer", help="tokenizer of the checkpoint (default: the one in SRC); its digest is recorded")
    _add_writing(add)

    add = actions.add_parser("export", help="native folder -> released folder").add_argument
    add(
        "src",
        metavar="SRC",
        help="native folder, training run or RUN/iter_N, or a released folder to store differently",
    )
    add("dst", metavar="DST", help="new or empty folder")
    add(
        "--storage",
        choices=("source", "bf16", "fp32", "released"),
        help="as the checkpoint came in (default), plain, or quantized as the release",
    )
    add("--plain", action="append", default=[], metavar="PATTERN", help="keep matching released names in bfloat16")
    add("--like", metavar="FOLDER", help="where the model came from (default: SRC knows)")
    add("--step", type=int, help="which checkpoint of a training run (default: the newest)")
    add("--shards", help="source, release, or a size such as 5GB per file (default: source with --storage source)")
    add("--merge", metavar="ADAPTER", help="add a LoRA adapter (PEFT's folder), in float32, before storing")
    _add_writing(add)

    add = actions.add_parser("verify", help="check one checkpoint, or compare two").add_argument
    add("a", metavar="A", help="released or native folder; shards may be missing (export a training run first)")
    add("b", metavar="B", nargs="?", help="compare with this one")
    add("--tokenizer", help="compare the recorded hash constants with this tokenizer's (default: the one in A)")
    add("--checksums", action="store_true", help="print a SHA-256 over all tensors of A")
    add("--names-only", action="store_true", help="read headers, not the tensors")
    _add_effort(add)


def _add_writing(add) -> None:
    add("--allow-non-finite", action="store_true", help="convert NaN and infinity instead of stopping at them")
    add(
        "--processes",
        type=int,
        default=1,
        help="processes on this machine (default: 1, or all of torchrun)",
    )
    _add_effort(add)


def _add_effort(add) -> None:
    add("--max-memory", default="4GiB", help="memory to use on a machine, by all processes (default: 4GiB)")
    add("--workers", type=int, default=0, help="threads of a process (default: one per CPU, at most 8 on a machine)")
    add("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """0 done or whole and equal, 1 verify found something."""
    if args.action == "verify":
        return _verify(args)
    return convert_processes.carry_out(_import if args.action == "import" else _export, args)


def _import(args: argparse.Namespace, team: Team) -> int:
    from megatron_dsv41.checkpoint.convert import import_checkpoint

    config, digest = team.first(lambda: _import_settings(args))
    import_checkpoint(
        args.src,
        args.dst,
        storage=args.storage,
        hash_digest=digest,
        layers=args.layers,
        experts=args.experts,
        layout=convert_layout.parse_layout(args.layout, config) if args.layout else None,
        finite=not args.allow_non_finite,
        effort=_effort(args),
        team=team,
    )
    if team.leads:
        print(f"imported {args.src} to {args.dst}" + ("" if digest else " (no tokenizer: hash constants not recorded)"))
    return 0


def _import_settings(args: argparse.Namespace) -> tuple[DSV41Config, str | None]:
    """The config of what is imported, and the digest of its hash constants."""
    from megatron_dsv41.checkpoint.truncate import truncate
    from megatron_dsv41.config import DSV41Config

    config = DSV41Config.load(_folder(args.src))
    config = truncate(config, args.layers, args.experts)  # fewer Engram layers, other constants
    if args.layout:
        convert_layout.parse_layout(args.layout, config)
    return config, hash_digest(args.tokenizer or args.src, config, required=bool(args.tokenizer))


def _export(args: argparse.Namespace, team: Team) -> int:
    from megatron_dsv41.backends.megatron.run_source import named_checkpoint
    from megatron_dsv41.checkpoint.convert import export_checkpoint

    options = {
        "storage": args.storage,
        "shards": args.shards if args.shards in (None, "source", "release") else parse_size(args.shards),
        "plain": args.plain,
        "merge": args.merge,
        "finite": not args.allow_non_finite,
        "effort": _effort(args),
        "team": team,
    }
    if args.like is not None:
        _folder(args.like)
    found = named_checkpoint(args.src, args.step)
    if found is not None:
        from megatron_dsv41.backends.megatron.run_export import export_run

        step, missing = export_run(found[0], args.dst, step=found[1], like=args.like, **options)
        note = f" (without the tokenizer: {missing})" if missing else ""
        if team.leads:
            print(f"exported step {step} of {found[0]} to {args.dst}{note}")
        return 0
    if args.step is not None:
        raise ValueError(f"--step chooses among the checkpoints of a training run; {args.src} is none")
    export_checkpoint(_folder(args.src), args.dst, like=args.like, **options)
    if team.leads:
        print(f"exported {args.src} to {args.dst}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from megatron_dsv41.checkpoint.verify import compare, verify
    from megatron_dsv41.config import DSV41Config

    effort, other = _effort(args), _folder(args.b) if args.b else None
    config = DSV41Config.load(_folder(args.a))
    digest = hash_digest(args.tokenizer or args.a, config, required=bool(args.tokenizer))
    report = verify(args.a, hash_digest=digest, data=not args.names_only, checksums=args.checksums, effort=effort)
    print(report)
    if other is None:
        return 0 if report.ok else 1
    comparison = compare(args.a, other, effort=effort)
    print(comparison)
    return 0 if report.ok and comparison.ok else 1


def hash_digest(tokenizer: str | Path, config: DSV41Config, *, required: bool) -> str | None:
    """Digest of the Engram hash constants with a tokenizer; None where there is no tokenizer and none is required."""
    from megatron_dsv41.data.token_map import load_token_map
    from megatron_dsv41.modules.engram import EngramHash

    path = Path(tokenizer)
    if not required and not (path / "tokenizer.json").is_file():
        return None
    return EngramHash(config, load_token_map(path if path.exists() else tokenizer, config).ids).digest


def parse_size(text: str) -> int:
    """Bytes of "500", "5GB" or "4GiB"."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMGT]?I?)B?\s*", text.upper())
    if not match or match[2] not in UNITS or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is not a size: write 5GB, 4GiB or a number of bytes")
    return int(float(match[1]) * UNITS[match[2]])


def _effort(args: argparse.Namespace) -> Effort:
    from megatron_dsv41.checkpoint.pieces import Effort

    return Effort(max_memory=parse_size(args.max_memory), workers=args.workers, progress=not args.quiet)


def _folder(path: str) -> Path:
    if (Path(path) / "config.json").is_file():
        return Path(path)
    _refuse_run(path)
    raise ValueError(f"{path} is not a checkpoint folder: it has no config.json")


def _refuse_run(path: str) -> None:
    """ValueError with the command that exports it where a path is a training run or one of its checkpoints."""
    from megatron_dsv41.backends.megatron.run_source import run_and_step

    found = run_and_step(path)
    if found is None:
        return
    run, step = found
    named = run if run.name not in ("", "..") else run.resolve()
    command = ["dsv41", "convert", "export", str(named), f"{named}-exported"]
    command += [] if step is None else ["--step", str(step)]
    raise ValueError(
        f"{path} is {'a training run' if step is None else 'a checkpoint of a training run'}, and here belongs a "
        f"folder in the released layout or a native one: write one with `{shlex.join(command)}`"
    )
