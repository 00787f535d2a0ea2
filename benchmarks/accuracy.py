"""Do all five algorithms learn the embedded default equally well? Five seeds each, through ``accelerate launch``.

    python -m benchmarks.accuracy [--seeds 5] [--out benchmarks/results/accuracy]

Two CPU processes per run, about half a minute each; existing runs are not repeated. Accuracy is on 2,500 test images.
Times are not compared: nothing is done to keep the machine quiet.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from tqdm import tqdm

from benchmarks.runs import train
from cocod_accel import ALGORITHMS
from cocod_accel.report import read_summary
from cocod_accel.runs.tables import aligned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/accuracy"))
    options = parser.parse_args()
    cells = [(name, seed) for seed in range(options.seeds) for name in ALGORITHMS]
    for name, seed in tqdm(cells, unit="run"):
        folder = options.out / f"{name}-{seed}"
        if (folder / "summary.json").is_file():
            continue
        train(options.out, folder.name, f"algorithm.name={name}", f"seed={seed}")
    rows = [["algorithm", "", "mean", "lowest", "highest", "st. dev.", "n"]]
    means = {}
    for name in ALGORITHMS:
        finals = [read_summary(options.out / f"{name}-{seed}")["final_accuracy"] for seed in range(options.seeds)]
        means[name] = statistics.mean(finals)
        spread = statistics.stdev(finals) if len(finals) > 1 else 0.0
        shown = [f"{value:.2%}" for value in (means[name], min(finals), max(finals), spread)]
        rows.append([name, "", *shown, str(len(finals))])
    print(aligned(rows))
    print(f"means differ by {100 * (max(means.values()) - min(means.values())):.2f} points")


if __name__ == "__main__":
    main()
