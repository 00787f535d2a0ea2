"""``python -m benchmarks.links configs/bench/links.yaml``: runs the benchmark, then prints the tables.

Run from a checkout, as ``make bench`` does. The network lab needs root.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.links.results import draw, read_rows, summary
from benchmarks.links.runner import BenchError, run_bench
from benchmarks.links.settings import load_settings
from cocod_accel.config.strict import ConfigError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.links",
        description="Step time and time to accuracy on slow links, compared with the alternatives.",
    )
    parser.add_argument("configs", nargs="*", metavar="A.yaml|key=value", help="e.g. configs/bench/links.yaml")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results/links"),
        metavar="DIR",
        help="where to write; default: %(default)s",
    )
    parser.add_argument("--no-lab", action="store_true", help="emulate links; only for our own algorithms")
    parser.add_argument("--only-tables", action="store_true", help="do not measure; use existing rows")
    options = parser.parse_intermixed_args(arguments)
    try:
        return _run(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    settings = load_settings(options.configs)
    path = options.out / "rows.jsonl"
    if not options.only_tables:
        run_bench(settings, options.out, uses_lab=not options.no_lab)
    elif not path.is_file():
        raise ConfigError(f"--only-tables: {path} does not exist; run the benchmark first")
    rows = read_rows(path)
    text = summary(rows, settings)
    print(text)
    (options.out / "tables.txt").write_text(text + "\n")
    for suffix in ("png", "svg"):
        draw(rows, options.out / f"step_time.{suffix}")
    print(f"\nraw rows, tables and figure: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
