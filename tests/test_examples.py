"""The examples, launched as their README says, with less to do: they end, they learn, and all workers end with one model."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
COMMANDS = re.findall(r"^accelerate launch .*$", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE)
#: Less to do than by default, and the loss of a model that only guesses.
TINY: dict[str, tuple[list[str], float]] = {
    "vision": (["--epochs", "2"], math.log(10)),
    "language_model": (["--steps", "60", "--evaluate-every", "15", "--batch-size", "8"], math.log(100)),
    "hf_trainer": (["--epochs", "2", "--samples", "1000"], math.log(2)),
}


def run(command: list[str], seconds: float = 100) -> subprocess.CompletedProcess[str]:
    """A command in the repository's folder; whatever it has started is ended with it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        [str(BIN / command[0]), *command[1:]],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
