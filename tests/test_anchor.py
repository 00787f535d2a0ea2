"""Merges that pull back towards the mean, or follow it with momentum: pure functions, and runs against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import ALGORITHMS, AsynLocalSGD, CoCoDSGD, LocalSGD, Sync, attach
from cocod_accel.averaging.rules import Anchor, follow_, pulled_offset_
from tests import loops, reference
from tests.test_exactness import assert_traces_equal
from tests.workers import run_outcomes, run_workers

#: (algorithm, options, weights)
CASES: list[tuple[str, dict[str, float], list[float]]] = [
    ("cocod", {"pull_back": 0.25}, [2.0, 3.0]),
    ("cocod", {"outer_momentum": 0.5}, [2.0, 3.0]),
    ("cocod", {"pull_back": 0.5, "outer_momentum": 0.5}, [1.0, 1.0]),
    ("local", {"outer_momentum": 0.7}, [2.0, 3.0]),
    ("asynlocal", {"outer_momentum": 0.3}, [1.0, 1.0]),
]
NUM_STEPS, PERIOD = 12, 3
NUMBERS = st.floats(-4, 4, width=32)


@given(st.lists(NUMBERS, min_size=1, max_size=8), st.floats(0, 0.99))
def test_the_anchor_follows_as_written(means: list[float], momentum: float) -> None:
    z, v = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    expected_z = expected_v = 0.0
    for mean in means:
        follow_(z, v, torch.tensor([mean], dtype=torch.float64), momentum)
        expected_v = momentum * expected_v + (mean - expected_z)
        expected_z += expected_v
        assert z.item() == pytest.approx(expected_z, rel=1e-9, abs=1e-9)


@given(NUMBERS, NUMBERS, NUMBERS, st.floats(0, 0.99))
def test_a_pulled_merge_keeps_its_share_of_progress(z: float, start: float, now: float, alpha: float) -> None:
    anchor, snapshot = (torch.tensor([value], dtype=torch.float64) for value in (z, start))
    merged = (1 - alpha) * now - pulled_offset_(anchor, snapshot, alpha).item()
    assert merged == pytest.approx(z + (1 - alpha) * (now - start), abs=1e-9)
    assert snapshot.item() == start


def test_an_anchor_without_momentum_is_the_mean() -> None:
    anchor = Anchor(0.0)
    for value in (1.0, 5.0, -2.0):
        means = [torch.full((3,), value)]
        anchor.follow_(means)
        assert means[0].tolist() == [value] * 3


def make(name: str, options: dict[str, float]) -> Any:
    kind: Any = ALGORITHMS[name]
    return kind(PERIOD, **options)


def train(sync_of: Any, model: Any, optimizer: Any, rank: int, steps: range) -> list[Any]:
    trace = []
    for step in steps:
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
        trace.append(loops.snapshot(model))
    return trace


def all_cases(rank: int) -> Any:
    found = []
    for name, options, weights in CASES:
        model = DistributedDataParallel(loops.make_model())
        optimizer = loops.OPTIMIZERS["momentum"](model)
        sync = attach(model, optimizer, make(name, options), weight=weights[rank])
        trace = train(sync, model, optimizer, rank, range(NUM_STEPS))
        sync.finish()
        found.append((trace, loops.snapshot(model)))
    return found


@pytest.fixture(scope="module")
def results() -> Any:
    return run_workers(2, all_cases)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_step_equals_the_serial_reference(case: Any, results: Any) -> None:
    name, options, weights = case
    found = [worker[CASES.index(case)] for worker in results]
    batches = [[loops.make_batch(i, t) for t in range(NUM_STEPS)] for i in range(2)]
    args = (loops.make_model(), loops.OPTIMIZERS["momentum"], batches, loops.loss_of, weights, [PERIOD] * 2)
    expected = reference.run(name, *args, **options)
    assert_traces_equal([trace for trace, _ in found], expected, str(case))
    assert all(torch.equal(a, b) for a, b in zip(*(final for _, final in found), strict=True)), "finish() is an exact mean"
    plain = reference.run(name, *args)
    assert any(not torch.allclose(a, b) for a, b in zip(plain[0][-1], expected[0][-1], strict=True)), "options do something"


def goes_on_after_finish(rank: int) -> Any:
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    sync = attach(model, optimizer, CoCoDSGD(2, outer_momentum=0.5, pull_back=0.5))
    train(sync, model, optimizer, rank, range(5))
    sync.finish()
    mean = loops.snapshot(model)
    anchor = sync.state_dict()["anchor"]["anchor"]["points"]
    flat = torch.cat([value.flatten() for value in mean])
    with sync.averaged():
        held = loops.snapshot(model)
    return flat, anchor[0], all(torch.equal(a, b) for a, b in zip(mean, held, strict=True))


def test_finish_puts_the_anchor_at_the_exact_mean() -> None:
    for flat, anchor, is_same in run_workers(2, goes_on_after_finish):
        assert torch.equal(flat, anchor)
        assert is_same


def stops_and_goes_on(rank: int, options: dict[str, float]) -> tuple[bool, Any]:
    """Seven steps at once, and in two sittings with everything made anew in between."""

    def fresh() -> tuple[Any, Any, Sync]:
        model = DistributedDataParallel(loops.make_model())
        optimizer = loops.OPTIMIZERS["momentum"](model)
        return model, optimizer, attach(model, optimizer, CoCoDSGD(2, **options))  # type: ignore[arg-type]

    model, optimizer, sync = fresh()
    whole = train(sync, model, optimizer, rank, range(9))
    model, optimizer, sync = fresh()
    train(sync, model, optimizer, rank, range(5))
    saved = sync.state_dict(), model.module.state_dict(), optimizer.state_dict()
    saved_model = {key: value.clone() for key, value in saved[1].items()}
    model, optimizer, sync = fresh()
    model.module.load_state_dict(saved_model)
    optimizer.load_state_dict(saved[2])
    sync.load_state_dict(saved[0])
    rest = train(sync, model, optimizer, rank, range(5, 9))
    same = all(torch.equal(a, b) for x, y in zip(whole[5:], rest, strict=True) for a, b in zip(x, y, strict=True))
    sync.detach()
    other = DistributedDataParallel(loops.make_model())
    plain = attach(other, loops.OPTIMIZERS["momentum"](other), CoCoDSGD(2))
    try:
        plain.load_state_dict(saved[0])
    except ValueError as error:
        return same, str(error)
    return same, None


@pytest.mark.parametrize(
    "options", [{"pull_back": 0.5}, {"outer_momentum": 0.5}, {"pull_back": 0.25, "outer_momentum": 0.5}]
)
def test_a_state_goes_on_bit_for_bit_and_only_with_the_same_options(options: dict[str, float]) -> None:
    for same, refusal in run_workers(2, stops_and_goes_on, options):
        assert same
        assert "the state was saved with pull_back=" in refusal
        assert "attached are 0 and 0; attach with the same" in refusal


def starts_differ(rank: int) -> Any:
    model = DistributedDataParallel(loops.make_model())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    optimizer = loops.OPTIMIZERS["sgd"](model)
    attach(model, optimizer, LocalSGD(1, outer_momentum=0.9))
    train(None, model, optimizer, rank, range(1))
    after = loops.snapshot(model)
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, after)
    return gathered


def test_the_first_mean_of_different_starts_is_the_anchor_at_rest() -> None:
    """It is adopted as it is: the distance to a start that was never shared is no progress."""
    first, second = run_workers(2, starts_differ)[0]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    plain = run_workers(2, starts_differ_plain)[0]
    assert all(torch.equal(a, b) for a, b in zip(first, plain, strict=True))


def starts_differ_plain(rank: int) -> Any:
    model = DistributedDataParallel(loops.make_model())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    optimizer = loops.OPTIMIZERS["sgd"](model)
    attach(model, optimizer, LocalSGD(1))
    train(None, model, optimizer, rank, range(1))
    return loops.snapshot(model)


def test_one_worker_is_plain_training() -> None:
    traces = []
    for algorithm in (CoCoDSGD(2), CoCoDSGD(2, pull_back=0.5, outer_momentum=0.5)):
        model = loops.make_model()
        optimizer = loops.OPTIMIZERS["momentum"](model)
        attach(model, optimizer, algorithm)
        traces.append(train(None, model, optimizer, 0, range(6))[-1])
    assert all(torch.equal(a, b) for a, b in zip(*traces, strict=True))


def disagreeing(rank: int) -> None:
    model = DistributedDataParallel(loops.make_model())
    attach(model, loops.OPTIMIZERS["sgd"](model), CoCoDSGD(2, pull_back=[0.1, 0.2][rank]))


def test_workers_must_agree() -> None:
    for outcome in run_outcomes(2, disagreeing):
        assert outcome.error is not None
        assert "workers differ in pull_back: rank 0 has 0.1, rank 1 has 0.2" in outcome.error[1]


@pytest.mark.parametrize("value", [1.0, -0.1, float("nan"), True, "0.5"])
def test_shares_must_be_shares(value: Any) -> None:
    with pytest.raises(ValueError, match=r"is not in \[0, 1\)"):
        CoCoDSGD(2, pull_back=value)
    with pytest.raises(ValueError, match=r"is not in \[0, 1\)"):
        AsynLocalSGD(2, outer_momentum=value)


def test_what_does_not_go_together_is_refused() -> None:
    for more in ({"payload": "int8"}, {"fragments": 2}):
        for name in ("pull_back", "outer_momentum"):
            with pytest.raises(ValueError, match=rf"{name}=0.5 goes with {next(iter(more))}=.* only"):
                CoCoDSGD(2, **{name: 0.5}, **more)  # type: ignore[arg-type]
    assert repr(CoCoDSGD(2, pull_back=0.5)) == "CoCoDSGD(period=2, pull_back=0.5)"
