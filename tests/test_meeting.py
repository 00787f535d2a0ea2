"""Workers that would wait for each other for ever: all raise the same line within seconds, and nobody else does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import SSGD, Algorithm, AsynLocalSGD, CoCoDSGD, LocalSGD, PipeSGD, Sync, attach
from cocod_accel.comm import meeting
from tests import loops
from tests.workers import Outcome, run_outcomes, run_workers

SOON = timedelta(seconds=0.3)
ALGORITHMS: dict[str, Algorithm] = {
    "ssgd": SSGD(),
    "coded ssgd": SSGD(payload="int8"),
    "pipe": PipeSGD(),
    "local": LocalSGD(2),
    "cocod": CoCoDSGD(3),
    "coded cocod": CoCoDSGD(1, payload="ternary"),
    "parts": CoCoDSGD(4, fragments=2),
    "asynlocal": AsynLocalSGD(2),
}


@contextmanager
def impatient() -> Iterator[None]:
    before = meeting._PATIENCE, meeting._LOOK
    meeting._PATIENCE = meeting._LOOK = SOON
    try:
        yield
    finally:
        meeting._PATIENCE, meeting._LOOK = before


def train(rank: int, algorithm: Algorithm, steps: int, at: dict[int, Any], *, batch_norm: bool = False) -> None:
    """A loop that calls something on some ranks after some steps."""
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    sync = attach(model, optimizer, algorithm)
    for step in range(steps):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
        if step in at:
            at[step](rank, sync)
    sync.finish()


def evaluate(rank: int, sync: Sync) -> None:
    with sync.averaged():
        pass


def alone(call: Any) -> Any:
    return lambda rank, sync: call(rank, sync) if rank == 0 else None


def only_one_calls(rank: int, name: str, call: str) -> None:
    calls = {"averaged": evaluate, "finish": lambda _, sync: sync.finish(), "reweight": lambda _, sync: sync.reweight(3)}
    with impatient():
        train(rank, ALGORITHMS[name], 12, {5: alone(calls[call])})


def raised(outcomes: list[Outcome]) -> str:
    """What all workers raised; a worker may have found out before it could see where a third one is."""
    assert [outcome.error and outcome.error[0] for outcome in outcomes] == ["TransferError"] * len(outcomes), outcomes
    return max((outcome.error[1] for outcome in outcomes if outcome.error is not None), key=len)


@pytest.mark.parametrize(("name", "size"), [*((name, 3) for name in ALGORITHMS), ("cocod", 2), ("ssgd", 2)])
def test_an_evaluation_on_one_worker_only(name: str, size: int) -> None:
    line = raised(run_outcomes(size, only_one_calls, name, "averaged"))
    position = "after round 3" if name == "asynlocal" else "at step 6"
    assert f"rank 0 is in averaged() {position}: call averaged(), finish() and reweight() on all workers" in line
    assert line.startswith("rank 1 is " if size == 2 else ("rank 1 is ", "ranks 1, 2 are "))


@pytest.mark.parametrize("call", ["finish", "reweight"])
def test_other_calls_on_one_worker_only(call: str) -> None:
    assert f"rank 0 is in {call}() at step 6" in raised(run_outcomes(2, only_one_calls, "cocod", call))


def different_steps(rank: int, name: str) -> None:
    with impatient():
        train(rank, ALGORITHMS[name], 9, {4 + rank: evaluate})


@pytest.mark.parametrize("name", ["local", "cocod", "coded cocod"])
def test_evaluations_at_different_steps(name: str) -> None:
    line = raised(run_outcomes(2, different_steps, name))
    assert "rank 0 is in averaged() at step 5" in line


def a_step_ahead(rank: int) -> None:
    """Worker 1 skips a batch before everybody evaluates."""
    with impatient():
        model = DistributedDataParallel(loops.make_model())
        optimizer = loops.OPTIMIZERS["sgd"](model)
        sync = attach(model, optimizer, CoCoDSGD(4))
        for step in range(6):
            if (rank, step) == (1, 5):
                continue
            optimizer.zero_grad()
            loops.loss_of(model, *loops.make_batch(rank, step)).backward()
            optimizer.step()
        evaluate(rank, sync)


def test_an_evaluation_of_which_one_worker_is_a_step_behind() -> None:
    line = raised(run_outcomes(3, a_step_ahead))
    assert "ranks 0, 2 are in averaged() at step 6" in line
    assert "rank 1 is in averaged() at step 5" in line


def inner_forgotten(rank: int) -> None:
    with impatient():
        group, _ = dist.new_subgroups(2)
        model = DistributedDataParallel(loops.make_model(), process_group=group)
        attach(model, loops.OPTIMIZERS["sgd"](model), LocalSGD(2), inner=group if rank != 1 else None)


def test_inner_forgotten_on_one_worker() -> None:
    line = raised(run_outcomes(4, inner_forgotten))
    assert "rank 1 is attach() with 2 workers" in line.replace("in attach", "attach")
    assert line.endswith("attach the same model with the same inner on all workers")


def one_leaves(rank: int) -> None:
    with impatient():
        train(rank, CoCoDSGD(3), 8, {4: lambda rank, sync: sync.detach() if rank == 1 else None})


def test_a_worker_that_detaches_is_not_waited_for() -> None:
    outcomes = run_outcomes(2, one_leaves)
    assert outcomes[0].error is not None
    assert outcomes[0].error[0] == "TransferError"
    assert outcomes[0].error[1].startswith("rank 1 has left: detach() at step 5")


def nobody_looks_in_vain(rank: int) -> float:
    """One worker is slow where others wait, in a round, before an evaluation, and at the end."""
    with impatient():

        def late(slow_rank: int) -> None:
            if rank == slow_rank:
                time.sleep(1.2)

        def evaluates_late(rank: int, sync: Sync) -> None:
            late(0)
            evaluate(rank, sync)

        slow: dict[int, Any] = {step: lambda rank, sync: late(1) for step in (1, 5)}
        slow[8] = evaluates_late
        begin = time.monotonic()
        train(rank, CoCoDSGD(2, payload="int8"), 10, slow)
        return time.monotonic() - begin


def test_slow_workers_are_waited_for() -> None:
    assert min(run_workers(3, nobody_looks_in_vain)) > 3 * 1.2


def as_patient_as_usual(rank: int) -> float:
    begin = time.monotonic()
    with pytest.raises(meeting.TransferError, match="rank 0 is in averaged"):
        train(rank, CoCoDSGD(2), 30, {5: alone(evaluate)})
    return time.monotonic() - begin


def test_it_takes_less_than_ten_seconds() -> None:
    """The one bound on a time here; it is about seconds of waiting, not about speed."""
    assert max(run_workers(2, as_patient_as_usual)) < 10
