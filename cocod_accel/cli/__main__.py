"""``python -m cocod_accel.cli``: the same as ``cocod``."""

import sys

from cocod_accel.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
