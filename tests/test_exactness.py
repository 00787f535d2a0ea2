"""Every algorithm on real processes against the serial float64 reference, parameter by parameter, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from cocod_accel import ALGORITHMS
from tests import loops, reference
from tests.workers import run_workers

WEIGHTS: dict[str, list[float]] = {"equal": [1, 1, 1, 1, 1], "unequal": [32, 96, 16, 7, 50]}


def assert_traces_equal(got: Any, expected: reference.Trace, context: str) -> None:
    assert len(got) == len(expected)
    for worker, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert len(ours) == len(theirs), f"worker {worker} took {len(ours)} steps, the reference {len(theirs)}"
        for step, (row, wanted) in enumerate(zip(ours, theirs, strict=True)):
            for a, b in zip(row, wanted, strict=True):
                error = ((a - b).norm() / b.norm()).item()
                assert error <= 1e-12, f"{context}: worker {worker} differs by {error:.1e} after step {step + 1}"


def variants(name: str, num_workers: int) -> list[tuple[str, list[float], list[Any], list[int]]]:
    """(optimizer, weights, period of each worker, steps of each worker), every combination that makes sense."""
    weightings = ["equal"] if name == "asynlocal" else ["equal", "unequal"]
    periods: list[Any] = [1, 4, loops.SCHEDULE] if name in loops.PERIODIC else [1]
    rows = []
    for optimizer in loops.OPTIMIZERS:
        for weighting in weightings:
            for period in periods:
                rows.append((optimizer, WEIGHTS[weighting][:num_workers], [period] * num_workers, [14] * num_workers))
        if name == "asynlocal":  # each worker its own period, three rounds
            own = [2, 5, 1, 3, 4][:num_workers]
            rows.append((optimizer, WEIGHTS["equal"][:num_workers], own, [3 * k for k in own]))
    return rows


def train_all(rank: int, name: str, rows: list[Any]) -> list[Any]:
    return [loops.train(rank, name, *row) for row in rows]


def check_all(name: str, num_workers: int) -> None:
    rows = variants(name, num_workers)
    got = run_workers(num_workers, train_all, name, rows)
    for index, (optimizer, weights, periods, num_steps) in enumerate(rows):
        batches = [[loops.make_batch(i, t) for t in range(num_steps[i])] for i in range(num_workers)]
        if name == "asynlocal":  # the reference trains whole rounds
            batches = [worker[: whole_rounds(periods[i], num_steps[i])] for i, worker in enumerate(batches)]
        expected = reference.run(
            name, loops.make_model(), loops.OPTIMIZERS[optimizer], batches, loops.loss_of, weights, periods
        )
        ours = [got[i][index][: len(expected[i])] for i in range(num_workers)]
        assert all(len(expected[i]) >= 8 or len(expected[i]) == num_steps[i] for i in range(num_workers))
        assert_traces_equal(ours, expected, context=f"{name} N={num_workers} {optimizer} {weights} k={periods}")


def whole_rounds(period: Any, num_steps: int) -> int:
    step = 0
    while step + reference.period_at(period, step) <= num_steps:
        step += reference.period_at(period, step)
    return step


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_step_equals_the_serial_reference(name: str, num_workers: int) -> None:
    check_all(name, num_workers)


@pytest.mark.slow
def test_five_workers_equal_the_serial_reference() -> None:
    for name in ALGORITHMS:
        check_all(name, 5)
