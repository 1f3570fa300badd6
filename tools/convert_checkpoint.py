"""Convert checkpoints; the same as `dsv41 convert`."""

import sys

from megatron_dsv41.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
