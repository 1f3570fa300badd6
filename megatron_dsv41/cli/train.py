"""`dsv41 train`: one rank of a training run. Start it under torchrun or srun, or alone."""

from __future__ import annotations

import argparse
import sys

HELP = "train from a run file, on this rank (start one per GPU with torchrun or srun)"
TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `dsv41 train`."""
    parser.add_argument("--config", required=True, metavar="run.yaml", help="run file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the run file")


def run(args: argparse.Namespace) -> int:
    """Train or resume; 0 when the run or a requested stop ended well."""
    from megatron_dsv41.run_config import load_run

    settings = load_run(args.config, args.overrides)
    from megatron_dsv41.backends.megatron.faults import NonFiniteLoss
    from megatron_dsv41.backends.megatron.train import train

    try:
        return train(settings)
    except NonFiniteLoss as fault:
        print(f"dsv41 train: {fault}", file=sys.stderr)
        return 1
