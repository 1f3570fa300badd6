"""`dsv41 prep`: text to prepared data."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import time
from types import FrameType

HELP = "turn text (hub dataset, Parquet, JSON lines, text files) into tokens for training"

EPILOG = """examples:
  dsv41 prep --input HuggingFaceFW/fineweb-edu --subset sample-10BT --tokenizer deepseek --output data/fineweb
  dsv41 prep --input 'corpus/*.jsonl.gz' --text-column content --tokenizer deepseek --output data/corpus
  dsv41 prep --input src/ --pattern '*.py' --tokenizer deepseek --output data/code --validation-documents 200
  dsv41 prep --chat --input chats.jsonl --tokenizer deepseek --output data/chats
  dsv41 prep --input python-stdlib --train-tokenizer 4096 --tokenizer data/bpe --output data/stdlib
"""


READ_WITH = {  # what else the two other ways to prepare read
    "adopt": {"adopt", "tokenizer", "output", "eod_token", "overwrite"},
    "chat": {"chat", "input", "tokenizer", "output", "reasoning_effort", "overwrite"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--input", nargs="+", metavar="X", help="files, folders, globs, a hub dataset id, or python-stdlib")
    add("--tokenizer", required=True, help="tokenizer.json, a folder with one, or 'deepseek': DeepSeek's own")
    add("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin, .idx, .json, .token_map.npz")
    add("--text-column", default="text", help="column of Parquet, JSON lines and hub rows (default: text)")
    add("--pattern", metavar="GLOB", help="which files of a folder, e.g. '*.py'; one text file is one document")
    add("--split", default="train", help="split of a hub dataset (default: train)")
    add("--subset", help="configuration name of a hub dataset")
    add("--revision", help="commit or tag of a hub dataset")
    add("--streaming", action="store_true", help="read a hub dataset while it downloads, without keeping it")
    add("--max-bytes", type=int, metavar="N", help="stop before the text that would pass N bytes")
    add("--skip-undecodable", action="store_true", help="leave out texts that are not UTF-8")
    add("--workers", type=int, default=_processors(), help="processes (default: all processors; same output)")
    add("--eod-token", metavar="TOKEN", help="token that ends a document (default: the tokenizer's end token)")
    add(
        "--special-tokens",
        choices=("parse", "text"),
        default="parse",
        help="what a special token written in a text is: itself (default), or plain text",
    )
    add("--validation-fraction", type=float, default=0.0, metavar="F", help="share split off to PREFIX-valid")
    add("--validation-documents", type=int, default=0, metavar="N", help="or so many documents, drawn evenly")
    add("--seed", type=int, default=1234, help="of that draw (default: 1234)")
    add("--train-tokenizer", type=int, metavar="VOCAB", help="first train a byte-level BPE on the input")
    add(
        "--chat",
        action="store_true",
        help="inputs are JSON lines of chats; only answers are trained (needs the extra 'chat')",
    )
    add("--reasoning-effort", choices=("low", "high", "xhigh", "max"), help="of chats that name none (with --chat)")
    add("--adopt", action="store_true", help="check .bin/.idx made by other tools and describe them for training")
    add("--overwrite", action="store_true", help="replace existing output")


def run(args: argparse.Namespace) -> int:
    """Prepare, adopt, or train a tokenizer and prepare."""
    from megatron_dsv41.data.prep import PrepOptions, adopt, prepare
    from megatron_dsv41.data.sources import SourceOptions

    signal.signal(signal.SIGTERM, _stop)  # so that what is half written is removed
    if args.adopt:
        _refuse_unread(args, "adopt")
        sidecar = adopt(args.output, args.tokenizer, args.eod_token, overwrite=args.overwrite)
        print(f"{args.output}: {sidecar.documents:,} documents, {sidecar.tokens:,} tokens, adopted")
        return 0
    if args.chat:
        _refuse_unread(args, "chat")
        return _prepare_chats(args)
    if args.reasoning_effort:
        raise ValueError("--reasoning-effort is for chats: give it with --chat")
    fields = {field.name for field in dataclasses.fields(SourceOptions)} - {"inputs"}
    source = SourceOptions(inputs=args.input or (), **{name: getattr(args, name) for name in fields})
    fields = {field.name for field in dataclasses.fields(PrepOptions)} - {"source"}
    options = PrepOptions(source=source, **{name: getattr(args, name) for name in fields})
    if args.train_tokenizer:
        _train_tokenizer(args, source)
    began = time.monotonic()
    sidecars = prepare(options)
    seconds = time.monotonic() - began
    for part, sidecar in sidecars.items():
        print(
            f"{options.prefixes[part]}: {sidecar.documents:,} documents, {sidecar.tokens:,} tokens ({sidecar.dtype}), "
            f"vocab_size {sidecar.vocab_size}, compressed {sidecar.num_classes}"
        )
    tokens = sum(sidecar.tokens for sidecar in sidecars.values())
    skipped = next(iter(sidecars.values())).skipped
    print(f"{skipped:,} texts without content skipped; {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s")
    return 0


def _refuse_unread(args: argparse.Namespace, way: str) -> None:
    """ValueError for options that this way to prepare would not look at."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name, value in vars(args).items():
        if name not in READ_WITH[way] and value != parser.get_default(name):
            raise ValueError(f"--{way} takes no --{name.replace('_', '-')}: leave it out")


def _prepare_chats(args: argparse.Namespace) -> int:
    from megatron_dsv41.data.chat_prep import prepare_chats

    sidecar = prepare_chats(
        args.input or (), args.tokenizer, args.output, effort=args.reasoning_effort, overwrite=args.overwrite
    )
    print(
        f"{args.output}: {sidecar.documents:,} assistant turns, {sidecar.tokens:,} tokens; train with best_fit packing"
    )
    return 0


def _train_tokenizer(args: argparse.Namespace, source) -> None:
    from pathlib import Path

    from megatron_dsv41.data.sources import open_source
    from megatron_dsv41.data.tokenizer import tokenizer_file, train_bpe

    path = tokenizer_file(Path(args.tokenizer))
    if path.exists() and not args.overwrite:
        raise ValueError(f"{path} exists: leave out --train-tokenizer to use it, or pass --overwrite")
    texts = (document.text for document in open_source(source).documents() if document.text)
    tokenizer = train_bpe(texts, args.train_tokenizer, path)
    print(f"{path}: byte-level BPE of {tokenizer.vocab_size:,} tokens (asked for {args.train_tokenizer:,})")


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _stop(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
