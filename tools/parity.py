"""`dsv41 parity` as a plain script: python tools/parity.py FOLDER [--json]."""

import sys

from megatron_dsv41.cli import main

if __name__ == "__main__":
    sys.exit(main(["parity", *sys.argv[1:]]))
