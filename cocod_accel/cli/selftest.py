"""``cocod selftest``: whether everything is right on the devices of this machine."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from cocod_accel.cli.common import Commands


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "selftest", help="check results, overlap, resuming and a killed worker on this machine's devices"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="default: one a GPU; without two GPUs, 2 CPU processes")
    parser.add_argument("--device", default="auto", choices=("auto", "gpu", "cpu"), help="default: GPUs, if there are two")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="new folder for selftest.json and trace.json")
    return parser


def run(options: argparse.Namespace) -> int:
    from cocod_accel.selftest import results
    from cocod_accel.selftest.workers import Row, devices_here, run_workers

    kind, count = devices_here(options.device)
    num_workers = options.workers if options.workers is not None else count or 2
    if num_workers < 2:
        raise ValueError(f"--workers={num_workers}: must be at least 2")
    if count and num_workers > count:
        raise ValueError(f"--workers={num_workers}: there are {count} devices here; use --workers {count}, or --device cpu")
    if num_workers > 64:
        raise ValueError(f"--workers={num_workers}: must be at most 64, on one machine")
    folder = options.out or Path(f"selftest-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise ValueError(f"--out={folder}: exists; name a new folder") from error
    except OSError as error:
        raise ValueError(f"--out={folder}: cannot be made ({error.strerror})") from error

    def show(row: Row) -> None:
        print(results.line(row), flush=True)

    what = "CPU processes; this says nothing about GPUs" if kind == "cpu" else "devices"
    print(f"{num_workers} {what}; two minutes at most", flush=True)
    rows, machine = run_workers(kind, num_workers, folder.resolve(), show)
    results.write(folder / "selftest.json", rows, machine, kind, num_workers)
    failed = [row["check"] for row in rows if row["state"] == "failed"]
    print(results.heading(machine, kind, num_workers))
    print(f"{'failed: ' + ', '.join(failed) if failed else 'all is well'}; {folder / 'selftest.json'}")
    if (folder / "trace.json").is_file():
        print(f"a trace of worker 0 for ui.perfetto.dev: {folder / 'trace.json'}")
    return 1 if failed else 0
