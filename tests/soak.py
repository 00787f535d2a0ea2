"""Kill workers of a run at random moments, again and again; it must end with the bits of a run that nobody disturbed.

python -m tests.soak [--kills 50] [--seed 0]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cocod_accel.report import read_summary

ROOT = Path(__file__).parents[1]
SETTINGS = [
    "configs/quickstart.yaml", "task.name=synthetic", "task.args={num_train: 2048, size: 8}", "task.augment=true",
    "model.name=tests.own_code:with_dropout_and_batch_norm", "batch_size=4", "schedule.warmup_epochs=1",
    "logging.trackers=[]",
    "schedule.decay_epochs=[]", "algorithm.period=[[0, 1], [1, 5]]", "cluster.speeds=[1, 2]", "cluster.proportional=true",
    "checkpoint.every_steps=97", "checkpoint.every_epochs=1", "cluster.frozen_seconds=20",
]  # fmt: skip


def launch(output: Path, name: str, epochs: int, restarts: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cocod_accel.cli", "train", *SETTINGS, f"schedule.epochs={epochs}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, f"output={output}", f"name={name}", "--max-restarts", str(restarts)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def workers_of(marker: str) -> list[int]:
    """Process ids of the workers that were started with an argument."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text().split("\0")
        except OSError:
            continue
        if marker in line and "cocod_accel.train" in line and "launch" not in line:
            found.append(int(path.parent.name))
    return sorted(found)


def soak(output: Path, kills: int, seed: int) -> dict[str, Any]:
    """An undisturbed run, and one whose workers are killed; what they have in common."""
    epochs = 4 * kills
    undisturbed = launch(output, "undisturbed", epochs, 0)
    _, err = undisturbed.communicate(timeout=600)
    assert undisturbed.returncode == 0, err
    chance = random.Random(seed)
    # So that the last kill does not come after the end, however fast the machine: workers need longer than this to start,
    # and between two kills they train for no more than their share of the whole.
    longest = 2.5 + read_summary(output / "undisturbed")["train_seconds"] / kills
    process = launch(output, "soaked", epochs, kills)
    done = 0
    try:
        with tqdm(total=kills, unit="kill", disable=not sys.stderr.isatty()) as bar:
            while done < kills and process.poll() is None:
                # From before the workers know each other to the middle of training.
                time.sleep(chance.uniform(0.2, longest))
                pids = workers_of("name=soaked")
                if not pids:
                    continue
                try:
                    os.kill(chance.choice(pids), signal.SIGKILL)
                except ProcessLookupError:
                    continue
                done += 1
                bar.update()
                deadline = time.monotonic() + 90
                while set(workers_of("name=soaked")) & set(pids) and time.monotonic() < deadline:
                    time.sleep(0.05)
        _, err = process.communicate(timeout=900)
    finally:
        for pid in workers_of("name=soaked"):
            os.kill(pid, signal.SIGKILL)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, err
    first, second = read_summary(output / "undisturbed"), read_summary(output / "soaked")
    return {
        "kills": done,
        "left": workers_of("name=soaked"),
        "half_written": [str(path) for path in (output / "soaked").rglob("*.tmp")]
        + [str(p) for p in output.glob("soaked-*")],
        "digest": second["model_digest"],
        "undisturbed": first["model_digest"],
        "steps": first["steps"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = soak(Path(folder), options.kills, options.seed)
    good = found["digest"] == found["undisturbed"] and not found["left"] and not found["half_written"]
    print(f"{found['kills']} kills; {'the same bits, nobody left, nothing half-written' if good else found}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
