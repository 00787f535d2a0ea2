"""``cocod watch``: the progress of a run, in the terminal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cocod_accel.cli.common import Commands


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser("watch", help="follow a run in the terminal")
    parser.add_argument("folder", type=Path, metavar="RUN", help="its run folder")
    parser.add_argument("--once", action="store_true", help="print its progress once and exit; default without a terminal")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="refresh interval; default: 1")
    return parser


def run(options: argparse.Namespace) -> int:
    from cocod_accel.report.watch import watch

    return watch(options.folder, sys.stdout, once=options.once or not sys.stdout.isatty(), every_seconds=options.every)
