"""`python -m megatron_dsv41` is `dsv41`."""

import sys

from megatron_dsv41.cli import main

if __name__ == "__main__":
    sys.exit(main())
