"""Is the period that ``cocod plan`` recommends the best one? Tries them all on the same link.

    python -m benchmarks.plan [--ratio 3] [--repeats 10] [--no-lab] [--out FOLDER]

Two workers on a link on which an average takes ``--ratio`` steps: in a network lab (root), else emulated. First ``cocod
plan`` measures; then blocks of CoCoD-SGD with every period from 1 to 10 are interleaved, each between two blocks
without communication, on a link that tracks the machine's speed. A figure is the median ratio of such blocks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from benchmarks.links.lab import Lab, Loopback, why_not
from benchmarks.links.results import Figure, read_rows
from benchmarks.links.runner import Bench, describe_machine
from benchmarks.links.settings import BenchSettings
from cocod_accel.runs.tables import aligned
from cocod_accel.simulator.cluster import load_cluster
from cocod_accel.simulator.simulate import configured, expected_times
from cocod_accel.theory.hiding import choose_period

PERIODS = list(range(1, 11))
_CLOSE = 0.05


def table(rows: list[dict[str, object]], recommended: int) -> str:
    """One row per period; the best and the recommended one are marked."""
    ratios: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "period":
            ratios[int(str(row["period"]))].append(float(str(row["seconds"])) / float(str(row["limit_seconds"])))
    figures = {period: Figure.of(values) for period, values in sorted(ratios.items())}
    best = min(figures, key=lambda period: figures[period].median)
    lines = [["period", "", "step / step without communication", "n", "over the best"]]
    for period, figure in figures.items():
        marks = [name for name, marked in (("best", best), ("recommended", recommended)) if marked == period]
        over = figure.median / figures[best].median - 1
        lines.append([str(period), ", ".join(marks), str(figure), str(figure.n), f"{over:+.1%}"])
    if recommended not in figures:
        return f"{aligned(lines)}\nrecommended: {recommended}, which was not tried"
    over = figures[recommended].median / figures[best].median - 1
    verdict = "yes" if over <= _CLOSE else "no"
    return f"{aligned(lines)}\nrecommended {recommended}, best {best}: {over:+.1%}; within {_CLOSE:.0%}: {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, default=3.0, help="duration of an average in steps; default: 3")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="minimum steps per block; default: 20")
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of the measurement; default: 30")
    parser.add_argument("--no-lab", action="store_true", help="emulate the link")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/plan"), help="for rows and tables")
    options = parser.parse_args()
    settings = BenchSettings()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "machine.json").write_text(json.dumps(describe_machine(), indent=2) + "\n")
    cluster_file, rows_file = options.out / "cluster.yaml", options.out / "rows.jsonl"
    reason = "--no-lab was given" if options.no_lab else why_not()
    if reason is not None:
        print(f"no network lab: {reason}. The link is emulated.", flush=True)
    job = {"periods": PERIODS, "repeats": options.repeats, "steps": options.steps, "seconds": options.seconds}
    with ExitStack() as stack:
        place: Lab | Loopback = Loopback() if reason is not None else Lab(settings.num_workers)
        stack.enter_context(place)
        file = stack.enter_context(rows_file.open("w"))
        bar = stack.enter_context(tqdm(total=len(PERIODS) * options.repeats, unit="block", disable=not sys.stderr.isatty()))
        bench = Bench(settings, place, options.out, file, bar)
        bench.periods(options.ratio, {**job, "cluster": str(cluster_file.absolute())})
    # All periods are tried in float32, which would be fastest with very long rounds: the shortest that hides.
    cluster = load_cluster(cluster_file)
    given = [settings.config, f"batch_size={settings.steps.batch_size}", "algorithm.period=1", "algorithm.payload=fp32"]
    times = expected_times(cluster, configured(cluster, given, "cocod"))
    where = "in a network lab" if reason is None else "on an emulated link"
    text = "\n".join(
        [
            f"two workers {where}, made for averages of {options.ratio:g} steps; cocod plan finds: a step takes "
            f"{1e3 * times.compute_seconds:.0f} ms, an average {times.comm_seconds / times.compute_seconds:.2f} steps, "
            f"interference {times.interference:.0%}",
            table(read_rows(rows_file), choose_period(times)),
        ]
    )
    print(text)
    (options.out / "tables.txt").write_text(text + "\n")


if __name__ == "__main__":
    main()
