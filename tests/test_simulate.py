"""Both depths of the simulator together, through the real command, beside the real run."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cocod_accel import cli
from cocod_accel.config import loading
from cocod_accel.config.loading import load_config, save_config
from tests.test_learning import DEFAULT
from tests.test_trainer import command

CLUSTER = "configs/cluster/office_1gbe.yaml"
#: What does not depend on a clock.
LEARNT = ("kind", "step", "epoch", "loss", "drift", "accuracy", "test_loss", "train_loss", "comm_bytes", "rounds")


def learnt(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in LEARNT if key in row} for row in rows if row["kind"] in ("train", "eval")]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["cocod", pytest.param("ssgd", marks=pytest.mark.slow)])
def test_with_learning_it_is_the_real_run_on_a_virtual_clock(name: str, tmp_path: Path) -> None:
    options = ["--workers", "2", "--algorithms", name, "--learn", "--out", str(tmp_path / "virtual")]
    virtual = command("cocod", "simulate", CLUSTER, *DEFAULT, *options, seconds=100)
    assert virtual.returncode == 0, virtual.stderr
    overrides = [f"algorithm.name={name}", f"output={tmp_path / 'real'}", "cluster.num_workers=2"]
    real = command("cocod", "train", *DEFAULT, *overrides, seconds=100)
    assert real.returncode == 0, real.stderr
    simulated, trained = (next((tmp_path / place).iterdir()) for place in ("virtual", "real"))
    assert learnt(simulated) == learnt(trained)
    assert len(learnt(simulated)) >= 6
    summary, other = (json.loads((folder / "summary.json").read_text()) for folder in (simulated, trained))
    for key in ("best_accuracy", "final_accuracy", "steps", "rounds", "comm_bytes"):
        assert summary[key] == other[key], key
    assert summary["clock"] == "simulated"
    assert summary["train_seconds"] != other["train_seconds"]


def test_a_number_of_steps_does_not_go_with_learning(tmp_path: Path) -> None:
    refused = command("cocod", "simulate", CLUSTER, *DEFAULT, "--learn", "--steps", "5", "--out", str(tmp_path), seconds=60)
    assert refused.returncode == 2
    assert "--steps=5: --learn trains whole epochs" in refused.stderr
    assert list(tmp_path.iterdir()) == []


BIG = """
name: big
step_seconds: 0.1
batch_size: 1
workers: [{{count: {0}, speed: 1.0, jitter: 0.1}}, {{count: {0}, speed: 1.5}}]
"""
TASK = ["task.name=synthetic", "task.args={num_train: 200000, size: 4}", "model.name=mlp", "batch_size=1"]


def test_many_workers_are_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In time that grows with their number, not with its square; the configuration is read back as it was."""
    (tmp_path / "big.yaml").write_text(BIG.format(10_000))
    line = [
        str(tmp_path / "big.yaml"),
        *TASK,
        "--steps",
        "3",
        "--algorithms",
        "cocod,asynlocal",
        "--out",
        str(tmp_path / "runs"),
    ]
    assert cli.main(["simulate", *line]) == 0
    assert "20000 workers, 3 steps" in capsys.readouterr().out
    (run, *_) = sorted((tmp_path / "runs").iterdir())
    config = load_config([str(run / "config.yaml")])
    assert config.speeds == [1.0] * 10_000 + [1.5] * 10_000
    text = (run / "config.yaml").read_text()
    save_config(config, tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_text() == text
    small = replace(config, cluster=replace(config.cluster, num_workers=3, speeds=[1.0, 2.5, 1e-5]))
    for path, most in ((tmp_path / "tree.yaml", 3), (tmp_path / "line.yaml", 2)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loading, "_MOST_IN_TREE", most)
            save_config(small, path)
        assert load_config([str(path)]) == small
    assert (tmp_path / "tree.yaml").read_text() != (tmp_path / "line.yaml").read_text()


@pytest.mark.parametrize("count", [50_001, 10**12, 10**30])
def test_more_workers_than_can_be_simulated_are_refused(
    count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "big.yaml").write_text(BIG.format(count))
    assert cli.main(["simulate", str(tmp_path / "big.yaml"), *TASK, "--out", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err
    if count < 10**20:
        assert said == f"error: {tmp_path / 'big.yaml'}: workers={2 * count}: at most 100,000 workers can be simulated\n"
    assert said.count("\n") == 1
    assert len(said) < 300
    assert cli.main(["simulate", CLUSTER, *TASK, "--workers", str(2 * count)]) == 2
    assert capsys.readouterr().err == f"error: --workers={2 * count}: at most 100,000 workers can be simulated\n"
    assert not (tmp_path / "runs").exists()


def test_a_mistake_on_many_workers_is_one_short_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "big.yaml").write_text(BIG.format(20_000).replace("speed: 1.5", "speed: 1e9"))
    assert cli.main(["simulate", str(tmp_path / "big.yaml"), *TASK]) == 2
    said = capsys.readouterr().err
    assert "the fastest, 1e+09, is over 1,000,000 times the slowest, 1;" in said
    assert len(said) < 300
    (tmp_path / "big.yaml").write_text(BIG.format(20_000))
    for given in (
        ["batch_size=100"],
        ["cluster.global_batch=7"],
        ["algorithm.name=asynlocal", "algorithm.period=100"],
        ["--seed"],
    ):
        with contextlib.suppress(SystemExit):
            assert cli.main(["simulate", str(tmp_path / "big.yaml"), *TASK, *given]) == 2
        assert max(map(len, capsys.readouterr().err.splitlines())) < 1000, given


@pytest.mark.parametrize(("cluster", "waits"), [("office_1gbe", True), ("paper", False)])
def test_whoever_waits_most_of_the_time_is_pointed_to_the_plan(
    cluster: str, waits: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"configs/cluster/{cluster}.yaml", "configs/homogeneous_16gpu.yaml", "algorithm.period=5"]
    name = "ssgd" if waits else "cocod"
    assert cli.main(["simulate", *given, "--algorithms", name, "--steps", "60", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    line = f"with {name} a worker waits for most of the time; what to train with: cocod plan {' '.join(given[1:])} "
    assert (f"{line}--cluster {given[0]}\n" in said) == waits
    assert waits or "waits for most" not in said


def test_goodput_is_told_of_both_ways_to_live_with_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "configs/cluster/office_1gbe.yaml", "task.name=synthetic", "model.name=mlp", "--steps", "20"]
    arguments += ["--out", str(tmp_path)]
    assert cli.main([*arguments, "--failures", "4", "--restart-seconds", "120"]) == 0
    said = capsys.readouterr().out
    assert "expected goodput with 4 failures an hour, each worker back after 120 s" in said
    rows = {
        line.split()[0]: line.split()[-2:] for line in said.split("expected goodput")[1].splitlines() if line[:1].isalpha()
    }
    assert rows["ssgd"][1] == rows["pipe"][1] == "-", "nobody goes on alone there"
    assert 0 < float(rows["cocod"][0]) < float(rows["cocod"][1]) < 1
    assert cli.main([*arguments, "--restart-seconds", "120"]) == 2
    assert "--restart-seconds=120: is about failures; add --failures=N" in capsys.readouterr().err
    assert cli.main([*arguments, "--failures", "-1"]) == 2
    assert "--failures=-1: must be from 0 to 1000000" in capsys.readouterr().err
