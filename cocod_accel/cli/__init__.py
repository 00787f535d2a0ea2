"""The ``cocod`` command: one file a subcommand."""

from cocod_accel.cli.main import main

__all__ = ["main"]
