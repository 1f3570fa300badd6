"""The `dsv41` command. Each sub-command is a module of this package, imported when it is asked for.

A command module has `HELP` (one line), `add_arguments(parser)` and `run(args) -> int`; `TAKES_OVERRIDES = True` where
it takes `section.key=value`. The listing reads HELP from the source text, so `dsv41 --help` imports neither torch nor
any command.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from megatron_dsv41.config import nearest

COMMANDS = ("prep", "plan", "train", "evaluate", "ladder", "convert", "parity")  # in the order in which one meets them
USER_ERRORS = (ValueError, OSError, ImportError)


def command_help(command: str) -> str:
    """The one-line HELP of a command, read without importing it."""
    tree = ast.parse((Path(__file__).parent / f"{command}.py").read_text())
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "HELP" for target in targets):
            return str(ast.literal_eval(node.value))  # type: ignore[union-attr]
    raise ValueError(f"command {command} has no HELP line")


def overview() -> str:
    """What `dsv41 --help` prints."""
    lines = "\n".join(f"  {command:<8} {command_help(command)}" for command in COMMANDS)
    return (
        "usage: dsv41 COMMAND [arguments]\n\n"
        "Trains DeepSeek-V4.1-Flash family models on stock Megatron-core.\n\n"
        f"commands:\n{lines}\n\n"
        "`dsv41 COMMAND --help` explains one.\n"
        "`--traceback` (or DSV41_TRACEBACK=1) shows where an error came from.\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 the command says no, 2 a user's mistake."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_traceback = "--traceback" in arguments or os.environ.get("DSV41_TRACEBACK") == "1"
    arguments = [a for a in arguments if a != "--traceback"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview(), end="")
        return 0
    if arguments[0] == "--version":
        from megatron_dsv41 import __version__

        print(f"dsv41 {__version__}")
        return 0
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        print(
            f"dsv41: no command {command!r}{nearest(command, set(COMMANDS))} (dsv41 --help lists them)",
            file=sys.stderr,
        )
        return 2
    try:
        return _run(command, rest)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except USER_ERRORS as error:
        if show_traceback:
            traceback.print_exc()
        print(f"dsv41 {command}: {_message(error)}", file=sys.stderr)
        return 2


def _run(command: str, arguments: Sequence[str]) -> int:
    module = importlib.import_module(f"megatron_dsv41.cli.{command}")
    parser = argparse.ArgumentParser(prog=f"dsv41 {command}", description=module.HELP)
    module.add_arguments(parser)
    # Overrides may stand on either side of options. argparse can do that for commands without actions of their own.
    parse = parser.parse_intermixed_args if getattr(module, "TAKES_OVERRIDES", False) else parser.parse_args
    return module.run(parse(arguments))


def _message(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"the package {error.name!r} is not installed ({error})"
    return str(error) or type(error).__name__
