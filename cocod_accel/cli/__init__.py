"""The ``cocod`` command: one file a subcommand, each with ``add_parser`` and ``run``."""

from cocod_accel.cli.main import main

__all__ = ["main"]
