"""The same as `dsv41 prep`, as a plain script."""

import sys

from megatron_dsv41.cli import main

if __name__ == "__main__":
    sys.exit(main(["prep", *sys.argv[1:]]))
