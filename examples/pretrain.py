"""The same as `dsv41 train --config run.yaml key=value ...`, as a script to copy and change.

torchrun --nproc-per-node=8 examples/pretrain.py examples/pretrain.yaml checkpoint.folder=runs/first
"""

from __future__ import annotations

import sys

from megatron_dsv41.backends.megatron.train import train
from megatron_dsv41.run_config import load_run


def main() -> int:
    """Train one rank of the run that the arguments describe."""
    if not sys.argv[1:]:
        sys.exit(__doc__)
    path, *overrides = sys.argv[1:]
    return train(load_run(path, overrides))


# Checkpoint writers are spawned processes that import this file again.
if __name__ == "__main__":
    sys.exit(main())
