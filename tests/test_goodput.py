"""What failures cost: the formulas beside failures that are drawn, and the command that prints them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cocod_accel import cli
from cocod_accel.theory.goodput import Failures, goodput_of_members, goodput_of_restarts


def drawn_restarts(rate: float, restart: float, save: float, seconds: float) -> float:
    """Work that is kept, failure after failure."""
    draw, now, kept = random.Random(0), 0.0, 0.0
    while now < seconds:
        running = draw.expovariate(rate)
        kept += running // save * save
        now += running + restart
    return kept / now


def drawn_members(rate: float, away: float, num_workers: int, blocked: float, seconds: float) -> float:
    draw, work, time_, absent = random.Random(0), 0.0, 0.0, 0.0
    while time_ < seconds:
        running = draw.expovariate(rate)
        work += num_workers * running
        absent += away
        time_ += running + blocked
    return (work - absent) / num_workers / time_


@pytest.mark.parametrize(("per_hour", "restart", "save"), [(6, 120, 600), (60, 30, 60), (0.5, 600, 1800)])
def test_formulas_are_what_drawn_failures_cost(per_hour: float, restart: float, save: float) -> None:
    failures, rate = Failures(per_hour, restart, save), per_hour / 3600
    seconds = 20_000 / rate
    assert goodput_of_restarts(failures) == pytest.approx(drawn_restarts(rate, restart, save, seconds), rel=0.02)
    expected = drawn_members(rate, restart + 2 * 1.5, 16, 0.5, seconds)
    assert goodput_of_members(failures, 16, 1.5) == pytest.approx(expected, rel=0.02)


def test_without_failures_nothing_is_lost() -> None:
    calm = Failures(0, 120)
    assert goodput_of_restarts(calm) == goodput_of_members(calm, 4, 1.0) == 1
    assert goodput_of_restarts(Failures(1e9, 1)) == goodput_of_members(Failures(1e9, 1), 4, 1.0) == 0


def test_simulate_says_what_failures_would_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ["simulate", "configs/cluster/office_1gbe.yaml", "configs/quickstart.yaml", "--steps", "20"]
    arguments = [*cluster, "--algorithms", "ssgd,cocod", "--spans", "0", "--out", str(tmp_path), "--failures"]
    assert cli.main([*arguments, "6"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "failures an hour" in line]
    assert lines[0] == "ssgd, 6 failures an hour: 49.3% of the steps are kept if all start again"
    assert lines[1].startswith("cocod, 6 failures an hour: 49.3% of the steps are kept if all start again, 9")
    assert lines[1].endswith("% if the others go on (estimated)")
    assert cli.main([*arguments, "-1"]) == 2
    assert "per_hour=-1: must be at least 0" in capsys.readouterr().err
