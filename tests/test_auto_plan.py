"""``CoCoDSGD(period="auto")`` in a loop of one's own: measured in its first steps, agreed by all, then kept."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import AsynLocalSGD, CoCoDSGD, LocalSGD, attach
from cocod_accel.comm.emulated import Link
from cocod_accel.sync.auto import _TIMED, _WARM_UP
from tests import loops, reference
from tests.test_exactness import assert_traces_equal
from tests.workers import run_outcomes, run_workers

#: The first step has no step before it to be timed from.
DECIDED = _WARM_UP + _TIMED + 1
STEPS = DECIDED + 40


def train(rank: int, algorithm: Any, steps: int = STEPS, latency_ms: float = 2.0, stop: int | None = None) -> Any:
    """Parameters after every step, and the plan before and after it was decided; with ``stop`` saved and resumed there."""
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["momentum"](model)
    sync = attach(model, optimizer, algorithm)
    sync.control.emulate_link(Link(latency_ms=latency_ms))
    plans, trace = [sync.plan()], []
    for step in range(steps):
        if step == stop:
            state = sync.state_dict()
            sync.detach()
            sync = attach(model, optimizer, algorithm)
            sync.load_state_dict(state)
        x, y = loops.make_batch(rank, step)
        optimizer.zero_grad()
        loops.loss_of(model, x, y).backward()
        optimizer.step()
        trace.append(loops.snapshot(model))
        plans.append(sync.plan())
    return trace, plans, sync.stats().rounds


@pytest.mark.parametrize("num_workers", [2, 3])
def test_all_workers_agree_and_train_as_with_the_schedule_that_was_chosen(num_workers: int) -> None:
    results = run_workers(num_workers, train, CoCoDSGD("auto"))
    plans = results[0][1]
    assert all(other[1][-1] == plans[-1] for other in results)
    before, plan = plans[DECIDED - 1], plans[-1]
    assert (before.period, before.compute_seconds) == (1, None)
    assert f"({_WARM_UP + _TIMED - 1} of {_WARM_UP + _TIMED})" in plans[DECIDED - 1].reason
    assert plans[DECIDED] == plan, "it is decided once"
    assert plan.period == max(1, math.ceil(1.1 * plan.comm_seconds / plan.compute_seconds))
    assert str(plan).startswith(f"period {plan.period}: a step takes ")
    schedule = [(0, 1), (DECIDED, plan.period)]
    batches = [[loops.make_batch(i, t) for t in range(STEPS)] for i in range(num_workers)]
    expected = reference.run(
        "cocod", loops.make_model(), loops.OPTIMIZERS["momentum"], batches, loops.loss_of,
        [1] * num_workers, [schedule] * num_workers,
    )  # fmt: skip
    assert_traces_equal([trace for trace, _, _ in results], expected, f"auto, {schedule}")


def test_a_longer_transfer_asks_for_longer_rounds() -> None:
    [(_, plans, rounds), _] = run_workers(2, train, CoCoDSGD("auto"), STEPS, 200.0)
    assert plans[-1].comm_seconds > 0.2
    assert plans[-1].period > 1
    assert rounds < STEPS


def test_fragments_and_delay_are_the_shortest_rounds() -> None:
    for _, plans, _ in run_workers(2, train, CoCoDSGD("auto", fragments=2, delay=3), STEPS + 3, 0.0):
        assert plans[0].period == 3
        assert plans[-1].period >= 3
    (_, plans, _), _ = run_workers(2, train, LocalSGD("auto", fragments=2), STEPS, 0.0)
    assert plans[0].period == 2


def test_a_resumed_loop_keeps_what_was_decided() -> None:
    for _, plans, _ in run_workers(2, train, CoCoDSGD("auto"), STEPS, 2.0, DECIDED + 5):
        assert plans[DECIDED + 5] == plans[-1]
        assert plans[-1].compute_seconds is not None


def test_one_that_had_not_decided_begins_to_measure_again() -> None:
    for _, plans, _ in run_workers(2, train, CoCoDSGD("auto"), DECIDED + 8, 2.0, 7):
        assert "(0 of" in plans[8].reason
        assert plans[DECIDED].compute_seconds is None
        assert plans[7 + DECIDED].compute_seconds is not None


def test_a_given_period_is_a_plan_too() -> None:
    model = loops.make_model()
    sync = attach(model, loops.OPTIMIZERS["sgd"](model), CoCoDSGD(5))
    assert str(sync.plan()) == "period 5: as given"
    sync.detach()
    sync = attach(model, loops.OPTIMIZERS["sgd"](model), CoCoDSGD([(0, 1), (200, 5)]))
    assert str(sync.plan()) == "period 1: as given, from [[0, 1], [200, 5]]"


def mixed(rank: int) -> None:
    train(rank, CoCoDSGD("auto" if rank == 0 else 5))


def test_mistakes_are_one_line() -> None:
    for outcome in run_outcomes(2, mixed):
        assert outcome.error is not None
        assert "workers differ in period: rank 0 has auto, rank 1 has 5" in outcome.error[1]
    with pytest.raises(ValueError, match="is not for AsynLocalSGD, which takes one per worker; use LocalSGD"):
        AsynLocalSGD("auto")
    with pytest.raises(TypeError, match="period='fast' is not an int"):
        CoCoDSGD("fast")  # type: ignore[arg-type]
