"""Runs, checkpoints, configurations and cluster files of an earlier release still load, and runs resume to the same model.

The files in ``tests/old_runs`` were written before the package was divided into rooms; nothing here may rewrite them.
"""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from cocod_accel import train
from cocod_accel.config.loading import merged_config, save_config
from cocod_accel.config.settings import OuterConfig
from cocod_accel.report.groups import grouped
from cocod_accel.runs.reading import read_run
from cocod_accel.simulator.cluster import load_cluster
from tests.workers import run_workers

OLD = Path(__file__).parent / "old_runs"
#: Runs that end with the same bits.
EXACT = ["asynlocal", "cocod", "cocod-fragments", "cocod-momentum", "local", "nodes", "pipe", "ssgd"]
#: Evaluations no longer reset what a codec counts from, so the bits may differ; what is sent does not.
CODED = ["cocod-int8", "local-bf16"]
FOREVER = ("steps", "epochs", "rounds", "comm_bytes", "num_workers", "batches")


def unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(OLD / "runs.tar.xz") as archive:
        members = [member for member in archive.getmembers() if member.name.split("/")[0] == name]
        assert members, name
        archive.extractall(folder, members, filter="data")
    return folder / name


def worker(rank: int, arguments: list[str]) -> int:
    os.environ.update(
        LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"], MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    return train.main(arguments)


def rows_without_times(run: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows if row["kind"] == kind]


@pytest.mark.parametrize("name", [*EXACT, *CODED])
def test_an_old_run_resumes_from_its_middle(name: str, tmp_path: Path) -> None:
    run = unpacked(name, tmp_path)
    expected = json.loads((run / "expected.json").read_text())
    evaluations = rows_without_times(run, "eval")
    num_workers = expected["num_workers"]
    command = [str(run / "config.yaml"), f"output={tmp_path}"]
    assert run_workers(num_workers, worker, command, seconds=100) == [0] * num_workers
    assert not (tmp_path / f"{name}-2").exists(), "it was not resumed"
    summary = json.loads((run / "summary.json").read_text())
    assert {key: summary[key] for key in FOREVER} == {key: expected[key] for key in FOREVER}
    if name in EXACT:
        assert summary["model_digest"] == expected["model_digest"]
        assert summary["best_accuracy"] == expected["best_accuracy"]
        assert rows_without_times(run, "eval") == evaluations


def test_the_archive_holds_these_runs_and_nothing_of_a_machine() -> None:
    with tarfile.open(OLD / "runs.tar.xz") as archive:
        names = {member.name.split("/")[0] for member in archive.getmembers()}
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is None or b"/tmp/" not in file.read(), member.name
    assert names == {*EXACT, *CODED}


def test_an_old_configuration_loads(tmp_path: Path) -> None:
    """Each has the removed keys pull_back and outer_momentum, which were 0 but for one run."""
    for name in [*EXACT, *CODED]:
        path = unpacked(name, tmp_path) / "config.yaml"
        text = path.read_text()
        assert "pull_back: 0.0" in text
        assert "outer_momentum: " in text
        options = merged_config([str(path)]).algorithm
        assert options.name == name.split("-")[0].replace("nodes", "cocod")
        assert options.own_share == 1.0
        assert options.outer == (OuterConfig(rate=1.0, momentum=0.5) if name == "cocod-momentum" else None)


def test_an_old_run_is_compared_with_a_new_one_of_the_same_configuration(tmp_path: Path) -> None:
    """Keys that were removed are no difference."""
    old = unpacked("cocod-momentum", tmp_path)
    config = merged_config([str(old / "config.yaml"), "name=new"])
    new = tmp_path / "new"
    new.mkdir()
    save_config(config, new / "config.yaml")
    for run in (old, new):
        (run / "summary.json").write_text((old / "expected.json").read_text())
    (new / "metrics.jsonl").write_text((old / "metrics.jsonl").read_text())
    (group,) = grouped([read_run(old), read_run(new)])
    assert len(group.runs) == 2


def test_an_old_cluster_file_loads() -> None:
    cluster = load_cluster(OLD / "cluster.yaml")
    assert cluster.num_workers == 16
    assert cluster.speeds() == [1.0] * 4 + [1.5] * 4 + [2.0] * 4 + [3.0] * 4
