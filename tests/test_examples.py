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


def check(name: str, done: subprocess.CompletedProcess[str], num_workers: int, output: Path) -> None:
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^(?:epoch \d+|step \d+|end): loss (\d+\.\d+)", done.stdout, re.MULTILINE)]
    assert losses[-1] < 0.8 * TINY[name][1], f"it has not learnt: {losses}"
    assert losses[-1] <= losses[0], f"the loss has not fallen: {losses}"
    found = re.findall(r"^worker (\d+): .*model ([0-9a-f]{8})$", done.stdout, re.MULTILINE)
    assert sorted(int(rank) for rank, _ in found) == list(range(num_workers)), done.stdout
    assert len({checksum for _, checksum in found}) == 1, f"workers end with different models: {found}"
    saved = load_file(output / "model.safetensors")
    assert saved
    assert all(value.isfinite().all() for value in saved.values())


def test_the_readme_has_a_command_for_every_example() -> None:
    scripts = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    assert scripts == sorted(TINY)
    assert sorted(re.search(r"examples/(\w+)\.py", command)[1] for command in COMMANDS) == scripts  # type: ignore[index]


@pytest.mark.parametrize("algorithm", ["cocod", "ssgd"])
@pytest.mark.parametrize("name", list(TINY))
def test_two_workers_learn_and_end_with_one_model(name: str, algorithm: str, tmp_path: Path) -> None:
    skip_without_transformers(name)
    (command,) = [command.split() for command in COMMANDS if f"/{name}.py" in command]
    arguments = ["--algorithm", algorithm, *TINY[name][0], "--output", str(tmp_path)]
    if name == "language_model":
        arguments += ["--bf16"] if algorithm == "cocod" else ["--payload", "fp32"]
    check(name, run([*command, *arguments]), 2, tmp_path)


@pytest.mark.parametrize("name", list(TINY))
def test_one_process_learns_without_a_launcher(name: str, tmp_path: Path) -> None:
    skip_without_transformers(name)
    check(name, run(["python", f"examples/{name}.py", *TINY[name][0], "--output", str(tmp_path)]), 1, tmp_path)


MISTAKES = [
    ("vision", ["--period", "0"], "period=0: a period must be at least 1"),
    ("language_model", ["--algorithm", "ssgd", "--payload", "int8"], "ssgd sends gradients as they are"),
    ("hf_trainer", ["--resume", "--output", "nowhere"], "nowhere holds no checkpoint; run it without first"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), MISTAKES, ids=[name for name, _, _ in MISTAKES])
def test_a_mistake_is_one_line(name: str, arguments: list[str], message: str) -> None:
    skip_without_transformers(name)
    done = run(["python", f"examples/{name}.py", *arguments])
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def skip_without_transformers(name: str) -> None:
    if name == "hf_trainer" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
