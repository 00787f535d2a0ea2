"""``cocod trace``: the spans of runs as a file for chrome://tracing and Perfetto."""

from __future__ import annotations

import argparse
from pathlib import Path

from cocod_accel.cli.common import Commands
from cocod_accel.config.strict import printable


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "trace", help="export who computed and communicated when, for chrome://tracing and ui.perfetto.dev"
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: trace.json in the run folder")
    return parser


def run(options: argparse.Namespace) -> int:
    from cocod_accel.report.trace import write_trace
    from cocod_accel.runs.reading import find_runs
    from cocod_accel.runs.spans import read_spans

    folders = [folder for given in options.runs for folder in find_runs(given)]
    if options.out is None and len(folders) > 1:
        raise ValueError(f"--out: required for {len(folders)} runs, which go into one file; e.g. --out trace.json")
    path = options.out or folders[0] / "trace.json"
    num_spans = write_trace({folder.name: read_spans(folder) for folder in folders}, path)
    print(printable(f"{num_spans} spans in {path}; open it in ui.perfetto.dev or chrome://tracing"))
    return 0
