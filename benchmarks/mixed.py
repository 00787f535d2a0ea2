"""What proportional sampling gains on two CPU workers, one slowed down (emulated); are measured speeds right?

    python -m benchmarks.mixed [--repeats 3] [--out FOLDER]

Every figure is a ratio within one run, from its spans. "ideal" is the throughput if no worker ever waited: sum_i
samples of worker i / (its seconds minus those it was blocked). The batch size is 64, from where on this model's step
time is proportional to it on a CPU core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

from tqdm import tqdm

from benchmarks import runs
from cocod_accel.report import read_summary
from cocod_accel.runs.tables import aligned

SLOW = 2
VARIANTS = ["ssgd", "ssgd_ps", "cocod", "cocod_ps"]


def train(folder: Path, name: str, *overrides: str) -> Path:
    return runs.train(folder, name, "batch_size=64", "schedule.decay_epochs=[]", *overrides)


def balance(run: Path) -> tuple[float, float]:
    """Throughput as a share of the ideal, and the share of time that the fast worker was blocked."""
    summary = read_summary(run)
    ideal = 0.0
    for rank, batch in enumerate(summary["batches"]):
        rows = [json.loads(line) for line in (run / "spans" / f"rank_{rank}.jsonl").read_text().splitlines()]
        seconds = {name: [row["end"] - row["start"] for row in rows if row["name"] == name] for name in ("compute", "wait")}
        ideal += len(seconds["compute"]) * batch / (sum(seconds["compute"]) - sum(seconds["wait"]))
    return summary["samples_per_second"] / ideal, sum(seconds["wait"]) / sum(seconds["compute"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="keep the run folders here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or Path(temporary)
        bar = tqdm(total=options.repeats * (len(VARIANTS) + 2) + 1, unit="run")
        shares: dict[str, list[tuple[float, float]]] = defaultdict(list)
        ratios: dict[int, list[float]] = defaultdict(list)
        for repeat in range(options.repeats):  # variants interleaved, because the machine's speed drifts
            for variant in VARIANTS:
                sampling = f"cluster.proportional={str(variant.endswith('_ps')).lower()}"
                mixed = [f"emulate.slowdown=[{SLOW}, 1]", f"cluster.speeds=[1, {SLOW}]", sampling]
                # Evaluate only at the end: it synchronises the workers, which would then wait in every epoch.
                mixed += ["schedule.epochs=8", "evaluation.every_epochs=8"]
                name = f"{variant}-{repeat}"
                run = train(out, name, f"algorithm.name={variant.removesuffix('_ps')}", "algorithm.period=5", *mixed)
                shares[variant].append(balance(run))
                bar.update()
            for slow in (2, 3):
                mixed = [
                    f"emulate.slowdown=[{slow}, 1]",
                    "cluster.speeds=measure",
                    "schedule.epochs=1",
                    "algorithm.period=5",
                ]
                run = train(out, f"measure{slow}-{repeat}", *mixed)
                ratios[slow].append(json.loads((run / "speeds.json").read_text())["speeds"][1])
                bar.update()
        moving = ["cluster.speeds=[1, 1]", "cluster.proportional=true", "cluster.replan_epochs=1", "schedule.epochs=6"]
        run = train(out, "replan", *moving, "emulate.slowdown=[[[0, 1], [2, 2]], 1]")
        bar.close()
        plans = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"plan"' in line]

    rows = [["variant", "", "of the ideal", "lowest", "highest", "fast worker blocked", "n"]]
    for variant, pairs in shares.items():
        kept = [share for share, _ in pairs]
        idle = statistics.median(blocked for _, blocked in pairs)
        shown = [f"{value:.3f}" for value in (statistics.median(kept), min(kept), max(kept))]
        rows.append([variant, "", *shown, f"{idle:.1%}", str(len(pairs))])
    print(f"two workers, the first {SLOW}x slower (emulated); throughput as a share of the sum of both speeds")
    print(aligned(rows))
    print()
    print("cluster.speeds: measure, one worker slowed down (emulated)")
    rows = [["slowdown", "", "ratio found", "lowest", "highest", "n"]]
    for slow, found in ratios.items():
        figures = [f"{value:.3f}" for value in (statistics.median(found), min(found), max(found))]
        rows.append([f"{slow}x", "", *figures, str(len(found))])
    print(aligned(rows))
    print()
    print("cluster.replan_epochs: 1, the first worker 2x slower (emulated) from the third epoch on")
    for plan in plans:
        print(f"  from epoch {plan['epoch'] + 1}: batches {plan['batches']}, speeds {plan['speeds']}")


if __name__ == "__main__":
    main()
