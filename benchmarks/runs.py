"""A training run of the quickstart, through the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: The paper's kind of schedule, of which the figures in docs/benchmarks.md are.
_PERIOD = "algorithm.period=[[0, 1], [1, 5]]"


def train(folder: Path, name: str, *overrides: str) -> Path:
    """Train in ``folder/name``, silently and without trackers; returns the run folder."""
    command = [sys.executable, "-m", "cocod_accel.cli", "train", "configs/quickstart.yaml", "logging.trackers=[]", _PERIOD]
    subprocess.run([*command, f"output={folder}", f"name={name}", *overrides], check=True, stdout=subprocess.DEVNULL)
    return folder / name
