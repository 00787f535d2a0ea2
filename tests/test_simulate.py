"""Both depths of the simulator together, through the real command, beside the real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cocod_accel import cli
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
