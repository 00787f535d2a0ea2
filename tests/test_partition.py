"""A network that is cut in two: both sides end by their heartbeats, not by TCP's patience, and say so in one line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.links.lab import Lab, _in, why_not
from tests.test_faults import end, until, workers_of
from tests.test_trainer import ROOT, TINY

_REASON = why_not()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))

RUN = [
    *TINY, "schedule.epochs=4000", "logging.trackers=[]", "name=run", "cluster.frozen_seconds=6", "cluster.num_workers=3",
    "checkpoint.every_epochs=null",
]  # fmt: skip


def start(lab: Lab, host: int, output: Path, port: int) -> subprocess.Popen[str]:
    """The workers of one machine: two on the first, one on the other. Neither sees the other's processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", str(host)]
    launcher += ["--nproc_per_node", str(2 - host), "--master_addr", lab.address(0), "--master_port", str(port)]
    alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [*alone, *launcher, "-m", "cocod_accel.train", *RUN, f"output={output}"]
    streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return lab.start(host, command, env=env, **streams)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("what", ["cut", "the first machine is lost"])
def test_both_sides_of_a_partition_end_by_heartbeats(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Lab(2) as lab:
        sides = [start(lab, host, tmp_path, lab.free_port()) for host in range(2)]
        try:
            rows = tmp_path / "run" / "metrics.jsonl"
            begun = re.compile(r'"train_seconds": [1-9]')
            until(lambda: rows.is_file() and begun.search(rows.read_text()), "training did not begin")
            begin = time.monotonic()
            if what == "cut":
                _in(lab._name("switch"), "ip", "link", "set", "port1", "nomaster")
            else:  # and with it the store that all heartbeats are kept in
                os.killpg(sides[0].pid, signal.SIGKILL)
            ended = []
            for side in sides if what == "cut" else sides[1:]:
                _, said = side.communicate(timeout=100)
                ended.append((time.monotonic() - begin, said))
        finally:
            for side in sides:
                end(side, tmp_path)
    with capsys.disabled():
        print(f"\n  {what}: over after {', '.join(f'{seconds:.0f} s' for seconds, _ in ended)}")
    lines = [[line for line in said.splitlines() if line.startswith("error: ")] for _, said in ended]
    for line in lines:
        assert len(line) == 1, ended
    if what == "cut":
        assert re.fullmatch(r"error: worker 2 has not responded for \d+ s; it was at .+", lines[0][0]), lines
    lost = r"error: (cut off: the process that started the workers has not answered for \d+ s|lost contact with .+)"
    assert re.fullmatch(lost, lines[-1][0]), lines
    for _, said in ended:
        assert "cocod_accel/" not in said, "a raw traceback"
    assert not workers_of(tmp_path)


@pytest.mark.timeout(120)
def test_so_do_the_workers_of_a_loop_of_ones_own() -> None:
    """With ``sync.watch()``; one worker on each machine."""
    with Lab(2) as lab:
        env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": lab.address(0), "WORLD_SIZE": "2"}
        env["MASTER_PORT"] = str(lab.free_port())
        alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        line = [*alone, sys.executable, "-m", "tests.peer_loop", "cut", "ssgd", "30"]
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
        sides = [lab.start(host, line, env={**env, "RANK": str(host)}, **streams) for host in range(2)]
        assert sides[1].stdout is not None
        assert sides[1].stdout.readline().startswith("pid")
        _in(lab._name("switch"), "ip", "link", "set", "port1", "nomaster")
        said = [side.communicate(timeout=80)[1] for side in sides]
        assert [side.returncode for side in sides] == [1, 1], said
    assert re.search(
        r"^error: worker 1 has not responded for \d+ s; it was at step \d+; worker 0 ends as well$", said[0], re.M
    )
    lost = (
        r"^error: (cut off: the process that started the workers has not answered for \d+ s|lost contact with .+); worker 1"
    )
    assert re.search(lost, said[1], re.M), said[1]
    assert all("Traceback" not in text for text in said)
