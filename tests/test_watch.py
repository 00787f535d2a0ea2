"""``cocod watch``, real runs from the first row to the last, and what wandb is told of them."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from cocod_accel import cli
from cocod_accel.report.watch import duration, is_locked, lines, snapshot, watch
from cocod_accel.runs.reading import read_parts, text_config
from cocod_accel.runs.spans import read_spans
from tests.run_folders import write_run

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


def cut(folder: Path, num_rows: int) -> None:
    """Leave the first rows only, as if the run had come no further."""
    path = folder / "metrics.jsonl"
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:num_rows]))


def test_a_snapshot_says_how_far_a_run_is_and_how_long_it_will_take(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "run", [0.5, 0.8, 0.7, 0.6], seconds_per_epoch=2.0, finished=False)
    cut(folder, 1 + 3 + 3 + 1)  # the plan, two epochs, and half of the third
    now = snapshot(read_parts(folder), [])
    assert (now.step, now.num_steps, now.done_epochs, now.epochs) == (25, 40, 2.5, 4)
    assert (now.accuracy, now.best_accuracy, now.train_seconds) == (0.8, 0.8, 5.0)
    # 25 steps took 5 s, so the 15 that are left take 3 s; a second of them has passed since the last row.
    assert now.left_seconds == pytest.approx(3.0)
    assert snapshot(read_parts(folder), [], row_age_seconds=1.0).left_seconds == pytest.approx(2.0)
    # Spans: 20 steps end at 2.1 s of which 4 s are training in the rows, so nothing is added.
    with_spans = snapshot(read_parts(folder), read_spans(folder))
    assert with_spans.left_seconds == pytest.approx(3.0)
    assert with_spans.waits is not None
    assert [*with_spans.waits] == [0, 1]
    assert with_spans.waits[1] == pytest.approx((0.4, 2.0))
    text = "\n".join(lines(with_spans))
    for words in ("62%  epoch 3 of 4, step 25 of 40", "about 3.0 s", "80.00% (best 80.00%)", "worker 1   waited 0.4 s"):
        assert words in text


def test_before_the_first_evaluation_nothing_is_promised(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "run", finished=False)
    cut(folder, 2)
    now = snapshot(read_parts(folder), [])
    assert (now.left_seconds, now.accuracy, now.num_steps) == (None, None, None)
    text = "\n".join(lines(now))
    assert "time left  known after the first evaluation" in text
    assert "each worker's waiting: known after the first epoch" in text
    cut(folder, 0)
    assert "epoch 1 of 2, step 0" in "\n".join(lines(snapshot(read_parts(folder), [])))


def test_durations_are_words() -> None:
    found = [duration(seconds) for seconds in (0.04, 59.9, 59.96, 61, 3599, 3600, 7260)]
    assert found == ["0.0 s", "59.9 s", "1 min 00 s", "1 min 01 s", "59 min 59 s", "1 h 00 min", "2 h 01 min"]


def test_a_lock_is_seen_and_not_taken(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    assert not is_locked(tmp_path)
    with (tmp_path / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_locked(tmp_path)
        out = io.StringIO()
        folder = write_run(tmp_path, "run", finished=False)
        os.link(tmp_path / ".lock", folder / ".lock")
        assert watch(folder, out, once=True) == 0
        assert out.getvalue().startswith("run\n[")
    assert not is_locked(tmp_path)


@pytest.mark.parametrize(
    ("prepare", "code", "line"),
    [
        (lambda root: root / "gone", 2, "error: {}/gone: no such folder; give the folder of a run\n"),
        (lambda root: root, 2, "error: {}: is not a run folder; give one of cocod train\n"),
        (
            lambda root: write_run(root, "done", [0.5, 0.8]),
            0,
            "done: finished, accuracy 80.00% (best 80.00%) after 4.0 s of training",
        ),
        (
            lambda root: write_run(root, "killed", finished=False),
            1,
            "killed: is not running on this machine; it was stopped",
        ),
    ],
)
def test_what_does_not_run_is_one_line(
    prepare: Callable[[Path], Path], code: int, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = prepare(tmp_path)
    assert cli.main(["watch", str(folder)]) == code
    out, err = capsys.readouterr()
    assert (err if code == 2 else out).startswith(line.format(tmp_path))
    assert len((out + err).splitlines()) == 1


def test_it_waits_for_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    ready = write_run(tmp_path / "elsewhere", "run", [0.5, 0.8])
    folder, out = tmp_path / "run", io.StringIO()
    later = threading.Timer(0.3, lambda: ready.rename(folder))
    later.start()
    assert watch(folder, out, once=False, every_seconds=0.05) == 0
    later.join()
    first, *_, last = out.getvalue().splitlines()
    assert first == f"{folder}: not there yet; waiting for a run to begin (Ctrl-C ends this)"
    assert "run: finished" in last


def test_waiting_follows_the_rows(tmp_path: Path) -> None:
    """Spans, and so each worker's waiting, come once an epoch."""
    folder = write_run(tmp_path, "run", finished=False)
    row = {"kind": "train", "step": 7, "epoch": 1, "loss": 0.5, "train_seconds": 4.0, "comm_exposed_seconds": 1.0}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    text = "\n".join(lines(snapshot(read_parts(folder), [])))
    assert "waiting    1.0 s for communication (25% of training), worker 0" in text


def test_it_refreshes_in_place_and_ends_with_the_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "run", [0.5, 0.8])
    summary = (folder / "summary.json").rename(tmp_path / "summary.json")
    cut(folder, 4)
    out = io.StringIO()
    later = threading.Timer(0.5, lambda: summary.rename(folder / "summary.json"))
    later.start()
    assert watch(folder, out, once=False, every_seconds=0.1) == 0
    later.join()
    first, *others = out.getvalue().split("\x1b[")
    height = len(first.splitlines())
    assert len(others) >= 4
    assert all(part.startswith(f"{height}A") for part in others[::2]), "goes up exactly as far as it has written"
    assert out.getvalue().splitlines()[-1].endswith("waited 1.0 s for communication")


# ------------------------------------------------------------------------------------------- one real run


def launch(root: Path, name: str, epochs: int) -> subprocess.Popen[bytes]:
    arguments = [
        "configs/quickstart.yaml", "task.name=synthetic", "model.name=mlp", "batch_size=8", f"schedule.epochs={epochs}",
        "schedule.decay_epochs=[]", "algorithm.period=[[0, 1], [1, 3]]", "logging.every_steps=4", "logging.group=real",
        "optimizer.learning_rate=0.000001", "evaluation.targets=[0.001, 1.0]",  # the second is never reached
        f"output={root}", f"name={name}",
    ]  # fmt: skip
    return subprocess.Popen(
        [str(BIN / "cocod"), "train", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def until(happened: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def processes_of(root: Path) -> list[str]:
    """Whoever still trains into a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"output={root}" in path.read_text():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def in_terminal(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    """Run a command of cocod with a terminal for its output."""
    ours, theirs = pty.openpty()
    parts: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # the other side is closed
            while got := os.read(ours, 4096):
                parts.append(got)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", terminal)
            code = cli.main(list(arguments))
    finally:
        reader.join()
        os.close(ours)
    return code, b"".join(parts).decode()


def test_a_real_run_is_watched_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = launch(tmp_path, "real", epochs=40)
    folder = tmp_path / "real"
    try:
        until(lambda: (folder / "metrics.jsonl").exists() and process.poll() is None, "training did not begin")
        code, text = in_terminal(monkeypatch, "watch", str(folder), "--every", "0.2")
        assert code == 0
        assert "worker 1   waited" in text
        assert "\x1b[" in text
        assert "real: finished, accuracy" in text.splitlines()[-1]
        assert process.wait(timeout=60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


#: Trains in this process, and says what wandb's own run object was given and then holds.
WANDB_CODE = """
import json, sys
import wandb

calls = {"log": [], "define_metric": []}
runs = []

def noting(name):
    real = getattr(wandb.Run, name)
    def call(run, *given, **options):
        runs.append(run)
        calls[name].append([list(given), options])
        return real(run, *given, **options)
    setattr(wandb.Run, name, call)

def finish(run, *given, **options):
    held.update({key: run.summary.get(key) for key in sys.argv[1].split(",")})  # a run that has ended shows none
    return real_finish(run, *given, **options)

noting("log")
noting("define_metric")
held, real_finish, wandb.Run.finish = {}, wandb.Run.finish, finish
from cocod_accel.train import main
code = main(sys.argv[2:])
run = runs[0]
assert all(other is run for other in runs)
about = {"name": run.name, "group": run.group, "job": run.job_type, "offline": run.offline, "config": dict(run.config)}
print(json.dumps({"code": code, **calls, **about, "held": held}))
"""


def test_wandb_is_told_what_the_run_folder_holds(tmp_path: Path) -> None:
    settings = [
        "task.name=synthetic", "model.name=mlp", "batch_size=8", "schedule.epochs=2", "schedule.warmup_epochs=0",
        "algorithm.period=3", "cluster.num_workers=1", "cluster.device=cpu", "logging.every_steps=5", "logging.group=mine",
        "evaluation.targets=[0.001,0.999999]", f"output={tmp_path}", "name=told", "seed=3",
        "optimizer.learning_rate=1e-9",  # the second target is never reached
    ]  # fmt: skip
    keys = "final_accuracy,train_seconds,comm_bytes,time_to_accuracy.0.001,time_to_accuracy.0.999999"
    done = subprocess.run(
        [sys.executable, "-c", WANDB_CODE, keys, *settings],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "WANDB_MODE"},
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["code"] == 0
    run = read_parts(tmp_path / "told")
    assert (told["name"], told["group"], told["job"], told["offline"]) == ("told", "mine", "cocod", True)
    assert text_config(told["config"]) == run.config
    # Every row of the folder, under wandb's names: loss as train/loss, drift as comm/drift.
    rows = []
    for given, options in told["log"]:
        values = given[0]
        if not values:
            continue  # closes the last step
        kind = "eval" if "eval/accuracy" in values else "train"
        row = {"kind": kind, "step": options["step"], "train_seconds": values["train_seconds"]}
        row |= {key.partition("/")[2]: value for key, value in values.items() if "/" in key}
        rows.append(row)
        assert {key.partition("/")[0] for key in values if "/" in key} == ({"eval"} if kind == "eval" else {"train", "comm"})
    assert rows == [row for row in run.rows if row["kind"] != "plan"]
    defined = {given[0]: options for given, options in told["define_metric"]}
    assert all(defined[f"{kind}/*"] == {"step_metric": "train_seconds"} for kind in ("eval", "train", "comm"))
    assert defined["eval/accuracy"] == {"step_metric": "train_seconds", "summary": "max"}
    assert defined["eval/test_loss"]["summary"] == "min"
    measures, held = run.measures(), told["held"]
    assert {key: held[key] for key in ("final_accuracy", "train_seconds", "comm_bytes")} == {
        key: measures[key] for key in ("final_accuracy", "train_seconds", "comm_bytes")
    }
    assert isinstance(held["time_to_accuracy.0.001"], float)
    assert held["time_to_accuracy.0.999999"] is None, "no words in a column of numbers"


def test_a_killed_run_is_said_to_be_one_and_still_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = launch(tmp_path, "killed", epochs=5000)
    folder = tmp_path / "killed"
    try:
        until(
            lambda: (folder / "metrics.jsonl").exists() and '"eval"' in (folder / "metrics.jsonl").read_text(),
            "no evaluation",
        )
        assert cli.main(["watch", str(folder), "--once"]) == 0
        assert "epoch" in capsys.readouterr().out
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    until(lambda: not processes_of(tmp_path), "a process is left", seconds=30)
    until(lambda: not is_locked(folder), "a process holds the lock", seconds=30)
    assert cli.main(["watch", str(folder)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("killed: is not running on this machine; it was stopped or killed at step ")
    assert cli.main(["compare", str(folder)]) == 0
    assert "cocod (unfinished)" in capsys.readouterr().out
