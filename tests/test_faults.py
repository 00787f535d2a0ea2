"""A worker that raises, exits, is killed or freezes: the others say which one and where, and end, with nobody left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from cocod_accel.report import read_summary
from tests.soak import soak
from tests.test_trainer import BIN, ROOT, TINY, read_quietly

RUN = [
    "configs/quickstart.yaml", *TINY, "schedule.epochs=4000", "logging.trackers=[]", "name=run",
    "cluster.frozen_seconds=3", "checkpoint.every_epochs=null",
]  # fmt: skip


def start(tmp_path: Path, *overrides: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [str(BIN / "cocod"), "train", *RUN, f"output={tmp_path}", *overrides],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def workers_of(tmp_path: Path) -> dict[int, int]:
    """Process ids of the workers of a run, by rank."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        if f"output={tmp_path}" in read_quietly(path) and "cocod_accel.train" in read_quietly(path):
            settings = read_quietly(path.parent / "environ").split("\0")
            ranks = [setting.removeprefix("RANK=") for setting in settings if setting.startswith("RANK=")]
            if ranks:
                found[int(ranks[0])] = int(path.parent.name)
    return found


def wait_for_rows(tmp_path: Path, process: subprocess.Popen[str]) -> None:
    """Until training has gone on for two of its own seconds, so that heartbeats have told of it."""
    rows = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not rows.is_file() or not re.search(r'"train_seconds": [2-9]', rows.read_text()):
        assert time.monotonic() < deadline, "training did not begin"
        assert process.poll() is None
        time.sleep(0.05)


WHERE = r"(step \d+|the evaluation after epoch \d+)"
FAULTS = {
    "killed": (signal.SIGKILL, "error: worker {rank} died at " + WHERE),
    "frozen": (signal.SIGSTOP, r"error: worker {rank} has not responded for \d+ s; it was at " + WHERE),
}


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("fault", "algorithm", "rank"),
    [
        ("killed", "cocod", 1),
        pytest.param("killed", "ssgd", 0, marks=pytest.mark.slow),
        pytest.param("frozen", "cocod", 0, marks=pytest.mark.alone),
        pytest.param("frozen", "ssgd", 1, marks=pytest.mark.alone),
    ],
)
def test_a_worker_that_dies_or_freezes_ends_the_run_by_name(
    fault: str, algorithm: str, rank: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number, pattern = FAULTS[fault]
    # A worker that is only slow, because other tests run, must not be taken for a frozen one.
    # Of three, the dead one's neighbours on both sides find out, and the others only if they are told.
    more = ["cluster.frozen_seconds=60", "cluster.num_workers=3"] if fault == "killed" else []
    process = start(tmp_path, f"algorithm.name={algorithm}", *more)
    try:
        wait_for_rows(tmp_path, process)
        os.kill(workers_of(tmp_path)[rank], number)
        begin = time.monotonic()
        assert process.stderr is not None
        lines: list[str] = []
        while not any(re.fullmatch(pattern.format(rank=rank), line) for line in lines):
            line = process.stderr.readline()
            assert line, f"the launcher ended without naming the worker: {lines}"
            lines.append(line.rstrip())
        surfaced = time.monotonic() - begin
        _, rest = process.communicate(timeout=60)
        ended = time.monotonic() - begin
    finally:
        end(process, tmp_path)
    with capsys.disabled():
        print(f"\n  {fault}, {algorithm}, worker {rank}: named after {surfaced:.1f} s, all ended after {ended:.1f} s")
    assert process.returncode not in (0, None)
    assert "Traceback" not in "".join(lines) + rest
    assert not workers_of(tmp_path), "somebody is left"


def end(process: subprocess.Popen[str], tmp_path: Path) -> None:
    for pid in workers_of(tmp_path).values():
        os.kill(pid, signal.SIGKILL)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("kill", range(4))
def test_of_several_workers_the_killed_one_is_always_named(kill: int, tmp_path: Path) -> None:
    """``python -m tests.kills`` kills 20."""
    from tests.kills import kills

    (found,) = kills(tmp_path, 1, 3 + kill % 2, seed=kill)
    assert found.is_named, found
    assert found.left == 0


def is_importing(pid: int) -> bool:
    return "libtorch_cpu" in read_quietly(Path(f"/proc/{pid}/maps"))


def until(is_so: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def are_importing(pids: Iterable[int]) -> bool:
    maps = [read_quietly(Path(f"/proc/{pid}/maps")) for pid in pids]
    return bool(maps) and all("libtorch_cpu" in text for text in maps)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "moment", ["at once", *(pytest.param(name, marks=pytest.mark.slow) for name in ("importing", "connecting"))]
)
def test_a_launcher_that_is_killed_leaves_no_worker(moment: str, tmp_path: Path) -> None:
    """Before the run folder exists, nobody keeps heartbeats yet."""
    mark = tmp_path / "building"
    model = ["model.name=tests.own_code:never_ready_on_one", f"model.args={{mark: {mark}}}"]
    process = start(tmp_path, "task.name=tests.own_code:make_tensors", "batch_size=2", *model)
    try:
        until(lambda: workers_of(tmp_path), "no worker has begun")
        if moment == "importing":
            until(lambda: are_importing(workers_of(tmp_path).values()), "the workers do not import torch")
        elif moment == "connecting":
            until(mark.exists, "no worker builds its model")
        process.kill()
        process.wait()
        until(lambda: not workers_of(tmp_path), "workers are left")
        assert not (tmp_path / "run").exists()
    finally:
        end(process, tmp_path)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("raises", r"error: worker 1 failed at step 7: no such kernel"),
        ("exits", r"error: worker 1 died at (starting|the checkpoint of step 0|step \d)"),
    ],
)
def test_a_worker_that_raises_or_exits_ends_the_run_by_name(model: str, message: str, tmp_path: Path) -> None:
    own = ["task.name=tests.own_code:make_tensors", f"model.name=tests.own_code:{model}", "batch_size=2"]
    process = start(tmp_path, *own, "algorithm.period=3")
    try:
        _, err = process.communicate(timeout=80)
    finally:
        end(process, tmp_path)
    assert process.returncode not in (0, None)
    assert any(re.fullmatch(message, line) for line in err.splitlines()), err
    assert not workers_of(tmp_path)


@pytest.mark.timeout(280)
@pytest.mark.parametrize("kills", [pytest.param(n, marks=pytest.mark.slow) for n in (1, 5)])
def test_killed_again_and_again_the_run_ends_with_the_same_bits(kills: int, tmp_path: Path) -> None:
    """At random moments; python -m tests.soak kills 50 times."""
    found: dict[str, Any] = soak(tmp_path, kills=kills, seed=1)
    assert found["kills"] == kills
    assert found["left"] == []
    assert found["half_written"] == []
    assert found["digest"] == found["undisturbed"]
    assert read_summary(tmp_path / "soaked")["steps"] == found["steps"]
