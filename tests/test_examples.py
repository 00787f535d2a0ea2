"""The examples, launched as their README says, with less to do: they end, they learn, and all workers end with one model."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
COMMANDS = re.findall(r"^accelerate launch .*$", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE)
#: Less to do than by default, and the loss of a model that only guesses.
TINY: dict[str, tuple[list[str], float]] = {
    "vision": (["--epochs", "2"], math.log(10)),
    "language_model": (["--steps", "40", "--evaluate-every", "20", "--accumulate", "2"], math.log(100)),
    "hf_trainer": (["--epochs", "2", "--samples", "1600"], math.log(2)),
}
Ended = subprocess.CompletedProcess[str]


def run_together(commands: dict[str, list[str]], seconds: float) -> dict[str, Ended]:
    """Commands in the repository's folder, all at once, because starting keeps one core busy; all end with this call."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    deadline = time.monotonic() + seconds
    processes = {}
    try:
        for name, (program, *arguments) in commands.items():
            processes[name] = subprocess.Popen(
                [str(BIN / program), *arguments],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        ended = {}
        for name, process in processes.items():
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            ended[name] = subprocess.CompletedProcess(process.args, process.returncode, out, err)
        return ended
    finally:
        for process in processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def test_the_readme_has_a_command_for_every_example() -> None:
    scripts = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if path.stem != "__init__")
    assert scripts == sorted(TINY)
    assert sorted(re.findall(r"examples/(\w+)\.py", "\n".join(COMMANDS))) == scripts


@pytest.mark.timeout(180)
@pytest.mark.parametrize("ways", [("cocod",), pytest.param(("ssgd", "alone"), marks=pytest.mark.slow)], ids="+".join)
@pytest.mark.parametrize("name", [*(n for n in TINY if n != "vision"), pytest.param("vision", marks=pytest.mark.slow)])
def test_it_learns_and_all_workers_end_with_one_model(name: str, ways: tuple[str, ...], tmp_path: Path) -> None:
    """With two workers as its README says, alone without a launcher, and with plain S-SGD."""
    if name == "hf_trainer" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    (command,) = [command.split() for command in COMMANDS if f"/{name}.py" in command]
    ssgd = ["--algorithm", "ssgd"] + (["--payload", "fp32"] if name == "language_model" else [])
    lines = {
        "cocod": [*command, *(["--bf16"] if name == "language_model" else [])],
        "ssgd": [*command, *ssgd],
        "alone": ["python", f"examples/{name}.py"],
    }
    commands = {way: [*lines[way], *TINY[name][0], "--output", str(tmp_path / way)] for way in ways}
    for way, done in run_together(commands, seconds=170).items():
        assert done.returncode == 0, done.stderr
        said = re.findall(r"^(?:epoch \d+|step \d+|end): loss (\d+\.\d+)", done.stdout, re.MULTILINE)
        losses = [float(loss) for loss in said]
        assert losses[-1] < 0.9 * TINY[name][1], f"{way} has not learnt: {losses}"
        assert losses[-1] <= losses[0], f"{way}: the loss has not fallen: {losses}"
        found = re.findall(r"^worker (\d+): .*model ([0-9a-f]{8})$", done.stdout, re.MULTILINE)
        assert sorted(int(rank) for rank, _ in found) == list(range(1 if way == "alone" else 2)), done.stdout
        assert len({checksum for _, checksum in found}) == 1, f"{way}: workers end with different models: {found}"
        saved = load_file(tmp_path / way / "model.safetensors")
        assert saved
        assert all(value.isfinite().all() for value in saved.values())


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_hugging_face_example_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (command,) = [command.split() for command in COMMANDS if "/hf_trainer.py" in command]
    line = [*command, "--samples", "640", "--output", str(tmp_path)]
    logged = []
    for steps, more in ((20, ["--epochs", "1"]), (40, ["--epochs", "2", "--resume"])):
        (done,) = run_together({"it": [*line, *more]}, seconds=80).values()
        assert done.returncode == 0, done.stderr
        assert re.findall(r"^worker \d: (\d+) steps", done.stdout, re.MULTILINE) == [str(steps)] * 2
        logged.append(json.loads((tmp_path / f"checkpoint-{steps}" / "trainer_state.json").read_text())["log_history"])
    first, second = logged
    assert first == second[: len(first)] != second, "seconds are logged, too: only the same run has the same"
    assert "eval_runtime" in first[-1]


MISTAKES = [
    ("vision", ["--period", "0"], "period=0: a period must be at least 1"),
    ("language_model", ["--payload", "int5"], "payload='int5' is unknown; choose from fp32, bf16, int8, int4, ternary"),
    ("language_model", ["--text", "nowhere"], "No such file or directory: 'nowhere'"),
    ("hf_trainer", ["--resume", "--output", "nowhere"], "nowhere holds no checkpoint; run it without first"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), MISTAKES)
def test_a_mistake_is_one_line(
    name: str, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "hf_trainer":
        pytest.importorskip("transformers")
    path = ROOT / "examples" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(path), run_name="__main__")
    assert caught.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert message in line
