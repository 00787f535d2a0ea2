"""``cocod selftest`` on CPU processes: it passes where all is well, and fails where something is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cocod_accel.cli.main import main
from cocod_accel.selftest import overlap, workers
from tests.test_trainer import ROOT


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.timeout(180)
def test_all_is_well_on_two_cpu_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found"
    assert main(["selftest", "--device", "cpu", "--workers", "2", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    print(said)
    assert "2 CPU processes; this says nothing about GPUs" in said
    assert "all is well" in said
    assert all(len(line) <= 118 for line in said.splitlines() if str(out) not in line)
    found = json.loads((out / "selftest.json").read_text())
    states = {row["check"]: row["state"] for row in found["checks"]}
    passed = ("exact", "ddp", "codecs", "resume", "overlap", "killed")
    assert states == {**dict.fromkeys(passed, "passed"), "nodes": "skipped"}
    assert (found["device"], found["num_workers"], found["passed"]) == ("cpu", 2, True)
    assert {"cocod_accel", "python", "torch", "accelerate", "backend", "device"} <= found["machine"].keys()
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    named = {event["name"] for event in events if event.get("cat") == "cocod_accel"}
    assert "communicate" in named
    assert sorted(path.name for path in out.iterdir()) == ["selftest.json", "trace.json"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        pytest.param(
            "off",
            [
                "ssgd, pipe, local, cocod, asynlocal: at most ",
                "e-09 apart in float64 (cocod); 1e-12 is allowed",
                "failed: exact;",
            ],
            marks=pytest.mark.slow,
        ),
        ("raises", ["no such device", "failed: ended;"]),
    ],
)
def test_it_fails_where_something_is_wrong(
    what: str, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean that is off by 1e-9 of itself; a worker that raises."""
    monkeypatch.setattr(workers, "MODULE", "tests.broken_selftest")
    monkeypatch.setenv("COCOD_BROKEN", what)
    out = tmp_path / "found"
    assert main(["selftest", "--device", "cpu", "--out", str(out)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert all(text in said for text in expected), said
    assert "2 CPU processes" in said
    found = json.loads((out / "selftest.json").read_text())
    assert not found["passed"]
    if what == "off":
        assert {row["check"]: row["state"] for row in found["checks"]} == {
            **{"exact": "failed", "ddp": "passed", "killed": "passed"}
        }


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--workers", "1"], "--workers=1: must be at least 2"),
        (["--workers", "65"], "--workers=65: must be at most 64, on one machine"),
        (["--out", "."], "--out=.: exists; name a new folder"),
        (["--out", "/proc/x"], "--out=/proc/x: cannot be made (No such file or directory)"),
    ],
)
def test_bad_flags_are_one_line(flags: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--device", "cpu", *flags]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"


def test_without_gpus_they_cannot_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import torch

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert main(["selftest", "--device", "gpu"]) == 2
    assert capsys.readouterr().err == "error: --device=gpu: 1 found here, two are needed; use --device cpu\n"
    assert workers.devices_here("auto") == ("cpu", 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert workers.devices_here("auto") == ("cuda", 4)
    assert main(["selftest", "--workers", "8", "--out", str(tmp_path / "x")]) == 2
    assert "there are 4 devices here; use --workers 4, or --device cpu" in capsys.readouterr().err


def test_what_lies_beside_computing() -> None:
    assert overlap._covered([(0, 10)], [(2, 4), (3, 6), (9, 20)]) == pytest.approx(0.5)
    assert overlap._covered([], [(0, 1)]) == 0
