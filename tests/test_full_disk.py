"""A disk that is full when a run ends does not cost the trained model."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from cocod_accel.checkpoint.files import checkpoints_in
from cocod_accel.report import read_summary
from tests.test_trainer import command

EPOCHS = 3


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)], capture_output=True, check=False)
    if mount.returncode != 0:
        pytest.skip("a disk can only be mounted as root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def line(output: Path, mark: Path, *more: str) -> list[str]:
    model = ["model.name=tests.own_code:crowding", f"model.args={{disk: {output}, mark: {mark}, evaluations: {EPOCHS}}}"]
    return [
        "cocod", "train", "configs/quickstart.yaml", *model, "task.name=tests.own_code:make_tensors", "batch_size=2",
        f"schedule.epochs={EPOCHS}", "schedule.decay_epochs=[]", "algorithm.period=3", "logging.trackers=[]", "name=run",
        "cluster.device=cpu", f"output={output}", *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_a_model_that_finds_no_room_is_finished_later_by_the_same_line(disk: Path, tmp_path: Path) -> None:
    mark, run = tmp_path / "mark", disk / "run"
    given = line(disk, mark, "checkpoint.keep=1")
    full = command(*given)
    assert full.returncode == 1, full.stderr
    (kept,) = checkpoints_in(run / "checkpoints")
    errors = [said for said in full.stderr.splitlines() if said.startswith("error: ")]
    assert len(errors) == 1
    assert re.fullmatch(
        r"error: the trained model could not be written \(.*No space left on device.*\); "
        + re.escape(f"{kept} is kept; make room, and the same command finishes the run from there"),
        errors[0],
    )
    assert "Traceback" not in full.stderr
    assert not (run / "summary.json").exists()
    assert not (run / "model.safetensors").exists()
    assert not list(run.rglob("*.tmp"))
    (disk / "filler").unlink()
    later = command(*given)
    assert later.returncode == 0, later.stderr
    assert f"resumed from {kept}" in later.stdout
    undisturbed = command(*line(tmp_path, mark))
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert read_summary(run)["model_digest"] == read_summary(tmp_path / "run")["model_digest"]


def test_older_checkpoints_make_room(disk: Path, tmp_path: Path) -> None:
    run = disk / "run"
    done = command(*line(disk, tmp_path / "mark", "checkpoint.keep=2", "cluster.num_workers=1"))
    assert done.returncode == 0, done.stderr
    assert len(checkpoints_in(run / "checkpoints")) == 1, "the newest is kept"
    assert load_file(run / "model.safetensors")
    assert read_summary(run)["epochs"] == EPOCHS
