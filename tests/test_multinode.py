"""Two nodes for real: network namespaces as machines, and on each the commands that the launchers and tutorials name."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.links.lab import Lab, why_not
from cocod_accel.comm.emulated import Link
from cocod_accel.report import read_summary
from cocod_accel.simulator.cluster import load_cluster
from tests.blocks import read_blocks
from tests.test_launch import manifest
from tests.test_trainer import BIN, ROOT, TINY, command, read_quietly
from tests.test_tutorials import logical_lines

_REASON = why_not()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
QUICKSTART = [
    "configs/quickstart.yaml", "schedule.epochs=1", "schedule.decay_epochs=[]", "algorithm.period=3", "task.train_limit=512",
    "task.test_limit=256", "cluster.num_workers=2", "cluster.device=cpu", "logging.trackers=[]",
]  # fmt: skip


Start = Callable[[Lab, list[str]], list[subprocess.Popen[Any]]]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(2) as lab:
        yield lab


def on_both(lab: Lab, lines: list[list[str]], variables: list[dict[str, str]]) -> list[subprocess.Popen[Any]]:
    """Start one line on each node."""
    common = {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return [lab.start(node, lines[node], core=node, env={**common, **variables[node]}, **pipes) for node in (0, 1)]


def texts(processes: list[subprocess.Popen[Any]], seconds: float) -> list[str]:
    """What both have said, when both have ended."""
    try:
        return ["".join(process.communicate(timeout=seconds)) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def torchrun(lab: Lab, arguments: list[str]) -> list[subprocess.Popen[Any]]:
    line = ["launch/torchrun_multinode.sh", *arguments]
    common = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": lab.address(0)}
    return on_both(lab, [line, line], [{**common, "NODE_RANK": str(node)} for node in (0, 1)])


def deepspeed(lab: Lab, arguments: list[str]) -> list[subprocess.Popen[Any]]:
    (output,) = [argument.removeprefix("output=") for argument in arguments if argument.startswith("output=")]
    hosts = Path(output) / "hosts"
    hosts.write_text("".join(f"{lab.address(node)} slots=1\n" for node in (0, 1)))
    line = ["launch/deepspeed_hostfile.sh", *arguments]
    common = {"HOSTFILE": str(hosts), "MASTER_ADDR": lab.address(0)}
    return on_both(lab, [line, line], [{**common, "NODE_RANK": str(node)} for node in (0, 1)])


def pods(lab: Lab, arguments: list[str]) -> list[subprocess.Popen[Any]]:
    """What the containers of the indexed Job run, with what the cluster puts into their lines."""
    _, job = manifest(*arguments, NNODES="2", NPROC_PER_NODE="1")
    (container,) = job["spec"]["template"]["spec"]["containers"]

    def line(node: int) -> list[str]:
        words = [*container["command"], *container["args"]]
        first = lab.address(0)
        return [word.replace("$(JOB_COMPLETION_INDEX)", str(node)).replace("cocod-0.cocod", first) for word in words]

    common = {entry["name"]: entry["value"] for entry in container["env"]}
    return on_both(lab, [line(0), line(1)], [common, common])


@dataclass(frozen=True)
class Trained:
    folder: Path
    said: list[str]


def trained(start: Start, lab: Lab, folder: Path) -> Trained:
    processes = start(lab, [*QUICKSTART, f"output={folder}", "name=run"])
    said = texts(processes, 150)
    assert [process.returncode for process in processes] == [0, 0], said
    return Trained(folder, said)


@pytest.fixture(scope="module")
def first(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(torchrun, lab, tmp_path_factory.mktemp("torchrun"))


@pytest.mark.timeout(240)
def test_two_nodes_train_one_model_into_one_folder(first: Trained) -> None:
    assert [path.parent.name for path in first.folder.glob("*/summary.json")] == ["run"]
    summary = read_summary(first.folder / "run")  # the trainer refuses to write it if the workers' models differ
    assert (summary["num_workers"], summary["steps"]) == (2, 8)
    assert sorted(path.name for path in (first.folder / "run" / "spans").iterdir()) == ["rank_0.jsonl", "rank_1.jsonl"]
    assert "accuracy" in first.said[0]
    assert "accuracy" not in first.said[1], "one of them speaks"


@pytest.mark.timeout(240)
@pytest.mark.slow
@pytest.mark.parametrize("start", [deepspeed, pods])
def test_however_they_are_started_it_is_the_same_model(start: Start, lab: Lab, first: Trained, tmp_path: Path) -> None:
    trained(start, lab, tmp_path)
    expected, found = read_summary(first.folder / "run"), read_summary(tmp_path / "run")
    assert [path.parent.name for path in tmp_path.glob("*/summary.json")] == ["run"]
    for key in ("model_digest", "final_accuracy", "steps", "num_workers", "comm_bytes"):
        assert found[key] == expected[key], key


def two_machine_blocks(title: str = "Two machines") -> list[list[str]]:
    """The tutorial's blocks for two machines: of each the line for the first and the one for the second."""
    page = (ROOT / "docs" / "tutorials" / "sixteen_gpus.md").read_text()
    section = page.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [logical_lines(block.text) for block in read_blocks(section) if block.language == "bash"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tutorials_lines_work_as_written(lab: Lab, tmp_path: Path) -> None:
    """Nothing is changed but the address and the folder, which stand for the reader's own, and how long it trains."""
    shorter = " task.train_limit=2000 schedule.epochs=2 schedule.decay_epochs=[]"
    summaries = []
    for index, lines in enumerate(two_machine_blocks()):
        folder = tmp_path / str(index)
        own = [line.replace("10.0.0.1", lab.address(0)).replace("/shared/runs", str(folder)) + shorter for line in lines]
        processes = on_both(lab, [["bash", "-c", line] for line in own], [{}, {}])
        said = texts(processes, 250)
        assert [process.returncode for process in processes] == [0, 0], said
        (run,) = (path.parent for path in folder.glob("*/summary.json"))
        summaries.append(read_summary(run))
    started_by_accelerate, started_by_torchrun = summaries
    for key in ("model_digest", "final_accuracy", "steps", "num_workers", "comm_bytes"):
        assert started_by_accelerate[key] == started_by_torchrun[key], key


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_machines_measure_the_link_between_them(lab: Lab, tmp_path: Path) -> None:
    """A limited link: what is planned from must be its time, not that of a machine's memory."""
    (lines,) = two_machine_blocks("What the link between them allows")
    own = [
        line.replace("10.0.0.1", lab.address(0)).replace("/shared/runs", str(tmp_path)).replace("two.yaml 40", "two.yaml 4")
        for line in lines
    ]
    lab.limit(Link(bandwidth_mbit=50))
    try:
        processes = on_both(lab, [["bash", "-c", line] for line in own[:2]], [{}, {}])
        said = texts(processes, 150)
    finally:
        lab.limit(Link())
    assert [process.returncode for process in processes] == [0, 0], said
    cluster = load_cluster(tmp_path / "two.yaml")
    payload = cluster.payload_bytes or 311_016  # of the quickstart's model
    sent = 8 * payload / 50e6  # in a ring of two everybody sends the payload once
    assert 0.9 * sent < cluster.allreduce_seconds(payload) < 4 * sent
    planned = command("cocod", *own[2].split()[1:], "--out", str(tmp_path / "plan"), seconds=100)
    assert planned.returncode == 0, planned.stderr
    assert "cluster.num_workers=16" in planned.stdout


@pytest.mark.timeout(240)
def test_sigterm_to_one_node_saves_on_both_and_the_same_lines_go_on(lab: Lab, tmp_path: Path) -> None:
    arguments = ["configs/quickstart.yaml", *TINY, "logging.trackers=[]", f"output={tmp_path}", "name=run"]
    processes = torchrun(lab, [*arguments, "schedule.epochs=400"])
    try:
        rows = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 90
        while not read_quietly(rows):
            assert time.monotonic() < deadline, "training did not begin"
            assert [process.poll() for process in processes] == [None, None]
            time.sleep(0.02)
        processes[1].send_signal(signal.SIGTERM)
    finally:
        said = texts(processes, 60)
    assert all(process.returncode != 0 for process in processes), said
    found = re.search(r"stopped at step (\d+); the same command resumes from", said[0])
    assert found, said
    epochs = int(found.group(1)) // 32 + 2  # it may change; the rest would take long
    again = torchrun(lab, [*arguments, f"schedule.epochs={epochs}"])
    said = texts(again, 100)
    assert [process.returncode for process in again] == [0, 0], said
    assert read_summary(tmp_path / "run")["steps"] == 32 * epochs
    assert not (tmp_path / "run-2").exists()
