"""``cocod compare``: runs side by side, in the terminal and as a folder of tables, figures and a page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cocod_accel.cli.common import Commands, say_without_figures
from cocod_accel.config.strict import printable, printable_lines


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser("compare", help="compare runs: a table, the paper's figures, an interactive page")
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folders, or folders that contain them")
    parser.add_argument("--target", type=float, help="target for the time to accuracy, e.g. 0.85")
    parser.add_argument("--baseline", help="what speedups are relative to: an algorithm or a row's name; default: ssgd")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write tables, figures and report.html to this folder")
    return parser


def run(options: argparse.Namespace) -> int:
    from cocod_accel.report.groups import compare
    from cocod_accel.report.tables import terminal
    from cocod_accel.report.writing import collect, write_all

    if not options.runs:
        raise ValueError("RUN: none given; name run folders, or a folder that contains them")
    runs, problems = collect(options.runs)
    if not runs:
        raise ValueError(problems[0] if len(problems) == 1 else f"{problems[0]} (and {len(problems) - 1} more like it)")
    comparison = compare(runs, options.target, options.baseline)
    print(printable_lines(terminal(comparison)))
    for problem in problems:
        print(f"skipped: {printable(problem)}", file=sys.stderr)
    if options.out is None:
        print("for figures and an interactive page, add --out DIR")
    else:
        written = write_all(comparison, options.out)
        print(f"{len(written)} files in {options.out}; open {options.out / 'report.html'}")
        say_without_figures()
    return 0
