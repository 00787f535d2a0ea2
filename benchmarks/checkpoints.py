"""What checkpoints cost: the quickstart with one every 200 steps against the quickstart with none, interleaved.

    python -m benchmarks.checkpoints [--repeats 5]

Compared is the whole time between the beginning and the end of training, checkpoints included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm


def seconds(folder: Path, name: str, *overrides: str) -> float:
    """From the first step to the last row, by the run's own spans, which count from one moment and go on in a checkpoint."""
    command = [
        sys.executable,
        "-m",
        "cocod_accel.cli",
        "train",
        "configs/quickstart.yaml",
        f"output={folder}",
        f"name={name}",
    ]
    options = ["logging.trackers=[]", "evaluation.every_epochs=8", "checkpoint.every_epochs=null", *overrides]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / name / "spans" / "rank_0.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["name"] == "compute"]
    return float(steps[-1]["end"] - steps[0]["start"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in tqdm(range(repeats), unit="pair"):
            # In turn first and second, because a machine changes with time.
            kinds = {"without": [], "with": ["checkpoint.every_steps=200"]}
            order = list(kinds) if repeat % 2 else list(reversed(kinds))
            took = {kind: seconds(Path(folder), f"{kind}-{repeat}", *kinds[kind]) for kind in order}
            ratios.append(took["with"] / took["without"])
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}, n={repeats}"
    print(f"a checkpoint every 200 steps / none: {statistics.median(ratios):.3f} ({spread})")


if __name__ == "__main__":
    main()
