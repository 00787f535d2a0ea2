"""A-SGD in the trainer, the simulator and the commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cocod_accel import cli
from cocod_accel.algorithms.rounds import Period
from cocod_accel.checkpoint.files import checkpoints_in
from cocod_accel.config.loading import load_config
from cocod_accel.config.strict import ConfigError
from cocod_accel.report import read_summary
from cocod_accel.reproduce.grid import cells, scale_of
from cocod_accel.reproduce.tables import Grid, environment_table
from cocod_accel.simulator.cluster import Cluster, Network, WorkerGroup
from cocod_accel.simulator.fleet import Parcel
from cocod_accel.simulator.learning import Learning
from cocod_accel.simulator.payloads import Parcels, ServerLink
from cocod_accel.simulator.served import ServedTimeline
from cocod_accel.simulator.simulate import configured, simulate
from cocod_accel.simulator.timeline import Course
from cocod_accel.trainer.recorder import Recorder
from tests.test_trainer import ROOT, TINY, as_launched
from tests.workers import run_workers

QUICK = str(ROOT / "configs/quickstart.yaml")
OWN = [*TINY, "algorithm.name=asgd", "logging.trackers=[]"]

# ------------------------------------------------------------------------------------------------ real runs


def run_real(tmp_path: Path, num_workers: int, *more: str) -> list[int]:
    arguments = [QUICK, *OWN, f"cluster.num_workers={num_workers}", f"output={tmp_path}", *more]
    codes: list[int] = run_workers(num_workers + 1, as_launched, arguments, fresh=True)
    return codes


def stopped(rank: int, arguments: list[str]) -> int:
    """Worker 0 is told to stop at step 9."""
    if rank == 0:
        noted = Recorder.computed

        def computed(self: Recorder, start: Any) -> None:
            noted(self, start)
            if self.worker.step == 9:
                os.kill(os.getpid(), signal.SIGTERM)

        Recorder.computed = computed  # type: ignore[method-assign]
    return as_launched(rank, arguments)


def cluster_of(speeds: tuple[float, ...]) -> Cluster:
    groups = [WorkerGroup(count=1, speed=speed) for speed in speeds]
    return Cluster(name="own", step_seconds=0.01, batch_size=8, workers=groups, network=Network(latency_us=100))


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_one_worker_learns_what_the_simulator_says_and_goes_on_from_a_checkpoint(max_staleness: int, tmp_path: Path) -> None:
    options = [f"algorithm.max_staleness={max_staleness}", "name=run"]
    assert run_real(tmp_path / "whole", 1, *options) == [0, 0]
    whole = read_summary(tmp_path / "whole" / "run")
    config = configured(cluster_of((1.0,)), [QUICK, *OWN, *options])
    learning = Learning(config, turns=simulate(cluster_of((1.0,)), config).turns)
    list(learning.rows())
    assert learning.outcome().model_digest == whole["model_digest"]
    assert learning.outcome().comm_bytes == whole["comm_bytes"]
    assert whole["largest_staleness"] == max_staleness

    arguments = [QUICK, *OWN, "cluster.num_workers=1", f"output={tmp_path / 'parts'}", *options]
    assert run_workers(2, stopped, arguments, fresh=True) == [143, 0]
    newest = checkpoints_in(tmp_path / "parts" / "run" / "checkpoints")[0]
    assert 9 <= int(newest.name.removeprefix("step_")) <= 9 + 2 + max_staleness
    assert run_workers(2, as_launched, arguments, fresh=True) == [0, 0]
    again = read_summary(tmp_path / "parts" / "run")
    for key in ("model_digest", "final_accuracy", "comm_bytes", "staleness", "steps"):
        assert again[key] == whole[key], key


def test_two_workers_stop_at_the_same_step_and_three_go_on_from_the_servers_state(tmp_path: Path) -> None:
    arguments = [QUICK, *OWN, f"output={tmp_path}", "name=run", "algorithm.payload=int8"]
    assert run_workers(3, stopped, [*arguments, "cluster.num_workers=2"], fresh=True) == [143, 143, 0]
    newest = checkpoints_in(tmp_path / "run" / "checkpoints")[0]
    assert len(list(newest.glob("worker_*.safetensors"))) == 2
    assert run_real(tmp_path, 3, "name=more", "algorithm.payload=int8", f"checkpoint.resume={tmp_path / 'run'}") == [0] * 4
    summary = read_summary(tmp_path / "more")
    assert summary["num_workers"] == 3
    assert summary["largest_staleness"] >= summary["staleness"] > 0
    assert summary["server_bytes"] > 0


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("algorithm.max_staleness=-1", "algorithm.max_staleness=-1: must be at least 0"),
        ("algorithm.period=auto", "algorithm.period=auto: requires local or cocod, not asgd"),
        ("algorithm.payload=auto", "algorithm.payload=auto: requires local or cocod, not asgd"),
        ("algorithm.delay=2", "algorithm.delay=2: is not an option of asgd"),
        ("algorithm.fragments=2", "algorithm.fragments=2: is not an option of asgd"),
        ("algorithm.optimizer_state=average", "algorithm.optimizer_state=average: is not supported by asgd"),
        ("cluster.workers_per_replica=2", "cluster.workers_per_replica=2: is not supported by asgd"),
        ("cluster.offload=cpu", "cluster.offload=cpu: is not supported by asgd"),
        ("emulate.link.latency_ms=3", "emulate.link=3 ms: is not supported by asgd"),
    ],
)
def test_bad_settings_are_one_line(given: str, line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config([QUICK, "algorithm.name=asgd", "algorithm.period=1", given])
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


def test_only_asgd_has_a_staleness() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.max_staleness=2: is not an option of cocod; set it to 1, or use asgd"):
        load_config([QUICK, "algorithm.max_staleness=2"])


def test_a_run_without_a_process_for_the_server_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cocod_accel.train", QUICK, *OWN, "cluster.num_workers=1", f"output={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    said = done.stderr.strip()
    assert "cluster.num_workers=1: asgd needs 2, one more for its server, and only 1 process was started; run: " in said
    assert "--num_processes 2" in said
    assert "\n" not in said


def test_the_launcher_starts_one_process_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", QUICK, *OWN, "--dry-run", "--workers", "3"]) == 0
    assert "--num_processes 4" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------- virtual time


def reference_clock(
    work: list[float], steps: int, gradient: float, model: float, latency: float, bound: int
) -> tuple[list[float], list[int], list[int]]:
    """Ends of all workers' steps, whose gradient arrives when, and how late each is; event by event, for few steps."""
    n = len(work)
    answers: list[list[tuple[float, int]]] = [[] for _ in work]  # of each worker: when an answer comes, and its version
    held, taken, free_in, free_out = [0] * n, [0] * n, 0.0, 0.0
    ends = list(work)
    done = [0] * n
    order, late = [], []
    finals = [0.0] * n
    while min(done) < steps:
        rank = min((r for r in range(n) if done[r] < steps), key=lambda r: (ends[r], r))
        now = ends[rank]
        order.append(rank)
        late.append(len(order) - 1 - held[rank])
        free_in = max(now, free_in) + gradient
        free_out = max(free_in + latency, free_out) + model
        answers[rank].append((free_out + latency, len(order)))
        done[rank] += 1
        usable = answers[rank] if bound == 0 else answers[rank][:-1]
        for index in range(taken[rank], len(usable)):
            if index < done[rank] - bound:
                now = max(now, usable[index][0])
            if usable[index][0] <= now:
                held[rank], taken[rank] = usable[index][1], index + 1
            else:
                break
        finals[rank] = max(now, answers[rank][-1][0])
        ends[rank] = now + work[rank]
    return finals, order, late


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("sizes", [(0.0, 0.0), (0.02, 0.03), (0.4, 0.7)], ids=["free", "fast", "jammed"])
def test_virtual_time_is_that_of_an_event_by_event_count(sizes: tuple[float, float], bound: int) -> None:
    work, latency = [1.0, 1.3, 0.7], 0.05
    link = ServerLink(Parcel(sizes[0], 100), Parcel(sizes[1], 400), latency)
    course = Course("asgd", [Period.parse(1)] * 3, Parcels(Parcel(0, 0), (), Parcel(0.5, 0)), repeat(np.array(work)))
    timeline = ServedTimeline(course, 12, link, bound=bound).run()
    finals, order, late = reference_clock(work, 12, *sizes, latency, bound)
    assert [turn.rank for turn in timeline.turns] == order
    assert timeline.staleness == pytest.approx(sum(late) / len(late))
    assert timeline.largest_staleness == max(late)
    assert timeline.train_seconds_after(12) == pytest.approx(max(finals))
    assert timeline.train_seconds == pytest.approx(max(finals) + 0.5)
    assert timeline.server_bytes == 36 * 500
    again = ServedTimeline(course, 12, link, bound=bound).run()
    assert again.turns == timeline.turns


def test_one_link_bounds_all_workers() -> None:
    """However many there are, no more models leave the server than its link can carry."""
    course = Course("asgd", [Period.parse(1)] * 8, Parcels(Parcel(0, 0), (), Parcel(0, 0)), repeat(np.ones(8)))
    link = ServerLink(Parcel(0.25, 1), Parcel(0.25, 1), 0.0)
    timeline = ServedTimeline(course, 200, link, bound=1).run()
    assert timeline.train_seconds == pytest.approx(8 * 200 * 0.25, rel=0.01)
    assert timeline.link_share > 0.98


def test_what_is_learnt_follows_from_the_order_and_is_the_same_every_time(tmp_path: Path) -> None:
    cluster = cluster_of((1.0, 2.0, 1.0))
    found = []
    for _ in range(2):
        config = configured(cluster, [QUICK, *OWN])
        learning = Learning(config, turns=simulate(cluster, config).turns)
        rows = list(learning.rows())
        found.append((learning.outcome(), [row.values for row in rows if row.kind == "eval"]))
    assert found[0] == found[1]
    assert found[0][0].best_accuracy == 1.0
    with pytest.raises(ConfigError, match="what is learnt follows from a timeline"):
        Learning(configured(cluster, [QUICK, *OWN]))


def test_simulate_and_compare_show_the_staleness(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paper = str(ROOT / "configs/cluster/paper.yaml")
    given = [QUICK, *TINY, "logging.trackers=[]", "--workers", "4", "--out", str(tmp_path)]
    assert cli.main(["simulate", paper, *given, "--algorithms", "ssgd,asgd", "--learn"]) == 0
    said = capsys.readouterr().out
    assert "asgd: staleness 6." in said
    assert "the server's link is busy for" in said
    assert cli.main(["compare", str(tmp_path)]) == 0
    header, *rows = [line for line in capsys.readouterr().out.splitlines() if "staleness" in line or "[simulated]" in line][
        :3
    ]
    assert "staleness" in header
    by_name = {row.split()[0]: row for row in rows}
    assert " - " in by_name["ssgd"]
    assert " 6." in by_name["asgd"]
    summary = json.loads(next(tmp_path.glob("asgd*/summary.json")).read_text())
    assert summary["largest_staleness"] == 7


def test_plan_lists_it_and_does_not_recommend_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "--cluster", str(ROOT / "configs/cluster/paper.yaml"), QUICK]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("asgd"))
    assert row.endswith("steps not measured")


def test_reproduce_has_rows_beside_the_papers_tables() -> None:
    scale = scale_of("smoke")
    grid = cells(scale, ["asgd"])
    assert {cell.part for cell in grid} == {"asgd"}
    row = {"best_accuracy": 0.5, "train_seconds": 2.0, "samples_per_second": 100.0}
    done = Grid(grid, {cell.name: row for cell in grid})
    for part, names in (("homogeneous", ["A-SGD"]), ("heterogeneous", ["A-SGD", "A-SGD+PS"])):
        text = environment_table(done, part)
        for name in names:
            assert any(line.startswith(f"{name} ") and "50.00" in line for line in text.splitlines())
        assert f"{' and '.join(names)}: not in the paper's tables" in text
    assert not [cell for cell in cells(scale) if cell.part == "asgd"]
    assert cells(scale_of("full"), ["asgd"]) == []
