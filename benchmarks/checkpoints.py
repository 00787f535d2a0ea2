"""What checkpoints cost: the share of the quickstart's wall time that one every 200 steps takes, from the run's spans.

    python -m benchmarks.checkpoints [--repeats 3]

A ratio within one run, because two runs on such a machine differ by more than a checkpoint costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from tqdm import tqdm

from benchmarks.runs import train


def shares(folder: Path, name: str) -> list[float]:
    """For each worker: seconds in checkpoints over seconds from its first step to its last."""
    run = train(folder, name, "checkpoint.every_epochs=null", "checkpoint.every_steps=200")
    found = []
    for file in sorted((run / "spans").glob("*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        steps = [row for row in rows if row["name"] == "compute"]
        saves = [
            row["end"] - row["start"] for row in rows if row["name"] == "checkpoint" and row["start"] > steps[0]["start"]
        ]
        assert len(saves) == 3, "624 steps"
        found.append(sum(saves) / (steps[-1]["end"] - steps[0]["start"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        found = [share for repeat in tqdm(range(repeats), unit="run") for share in shares(Path(folder), str(repeat))]
    spread = f"{min(found):.2%} to {max(found):.2%}, {len(found)} workers of {repeats} runs"
    print(f"a checkpoint every 200 steps takes {statistics.median(found):.2%} of the wall time ({spread})")


if __name__ == "__main__":
    main()
