"""What happens where a package of an extra is not installed: one line, with the command."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from cocod_accel import cli, extras
from cocod_accel.config.loading import load_config
from cocod_accel.config.strict import ConfigError
from cocod_accel.tasks import build_task
from tests.run_folders import write_run


@pytest.fixture
def absent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, request.param, None)  # importing it raises
    return str(request.param)


@pytest.mark.parametrize("absent", ["matplotlib"], indirect=True)
def test_runs_are_compared_without_figures(absent: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs", "a", [0.5, 0.8])
    assert cli.main(["compare", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err == "no figures: matplotlib is not installed; pip install 'cocod-accel[report]'\n"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "report.html", "results.csv", "results.md", "runs.csv",
    ]  # fmt: skip


@pytest.mark.parametrize("absent", ["matplotlib"], indirect=True)
def test_the_paper_is_not_reproduced_for_hours_without_figures(absent: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "--scale", "smoke"]) == 2
    assert "matplotlib is not installed; pip install 'cocod-accel[report]'" in capsys.readouterr().err


@pytest.mark.parametrize("absent", ["torchvision"], indirect=True)
def test_data_cannot_be_downloaded_without_torchvision_which_keeps_the_torch_there_is(absent: str, tmp_path: Path) -> None:
    config = load_config(["task.name=cifar10", "task.download=true", f"task.data_dir={tmp_path}"])
    own = torch.__version__.partition("+")[0]
    with pytest.raises(ConfigError) as raised:
        build_task(config)
    assert str(raised.value) == (
        f"task.download=true: torchvision is not installed; pip install 'cocod-accel[vision]' torch=={own}"
    )


@pytest.mark.parametrize(
    ("absent", "door", "extra"),
    [("transformers", "hf", "transformers"), ("lightning", "lightning", "lightning")],
    indirect=["absent"],
)
def test_a_door_to_a_package_says_which(absent: str, door: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"cocod_accel.{door}", raising=False)
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module(f"cocod_accel.{door}")
    assert str(raised.value) == f"cocod_accel.{door}: {absent} is not installed; pip install 'cocod-accel[{extra}]'"


def test_what_is_there_is_not_missing() -> None:
    assert extras.missing("torch", "all") is None
