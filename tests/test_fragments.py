"""A model that travels in parts, one after the other in a round, against a serial reference."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import Checkpoints, CoCoDSGD, attach
from cocod_accel.algorithms.rounds import Period, RoundClock, fragment_offsets
from cocod_accel.averaging.flat import balanced_cuts
from cocod_accel.comm.emulated import Link
from tests import loops, reference
from tests.test_exactness import assert_traces_equal
from tests.workers import run_outcomes, run_workers

STEPS = 13
#: Which of the four parameters (30, 5, 15 and 3 elements) are in which part: borders as near to even as whole ones allow.
PARTS = {2: [[0], [1, 2, 3]], 3: [[0], [1], [2, 3]], 4: [[0], [1], [2], [3]]}
#: (fragments, period, weights, optimizer, workers start apart)
ROWS: list[tuple[int, Any, list[float], str, bool]] = [
    (2, 5, [1, 1, 1], "momentum", False),
    (3, 3, [32, 96, 16], "adam", False),
    (3, 5, [32, 96, 16], "momentum", True),
    (4, 4, [1, 2, 3], "sgd", False),
    (2, [(0, 2), (4, 5)], [1, 2, 3], "momentum", False),
]


def start_of(rank: int, is_apart: bool) -> nn.Module:
    model = loops.make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank if is_apart else 0)
    return model


def serial(num_workers: int, row: tuple[int, Any, list[float], str, bool]) -> reference.Trace:
    """Part p of x is merged, and snapshotted again, floor(p k / P) steps into every round of k."""
    fragments, period, weights, optimizer, is_apart = row
    w = reference.shares(weights[:num_workers])
    models = [copy.deepcopy(start_of(i, is_apart)) for i in range(num_workers)]
    optimizers = [loops.OPTIMIZERS[optimizer](m) for m in models]
    waiting: dict[int, list[Tensor]] = {}  # parameter -> each worker's mean_t - x_t
    trace: reference.Trace = [[] for _ in models]

    def turn(part: int) -> None:
        for index in PARTS[fragments][part]:
            xs = [list(m.parameters())[index] for m in models]
            with torch.no_grad():
                for x, change in zip(xs, waiting.get(index, []), strict=False):
                    x.add_(change)
                mean = sum(wi * x for wi, x in zip(w, xs, strict=True))
                waiting[index] = [(mean - x).clone() for x in xs]

    if is_apart:
        turn(0)
    start = 0
    for t in range(STEPS):
        for i, (m, o) in enumerate(zip(models, optimizers, strict=True)):
            o.zero_grad()
            loops.loss_of(m, *loops.make_batch(i, t)).backward()
            o.step()
        if t + 1 == start + reference.period_at(period, start):
            start = t + 1
        k = reference.period_at(period, start)
        for part in range(fragments):
            if t + 1 - start == int(part * k / fragments):
                turn(part)
        for i, m in enumerate(models):
            trace[i].append(reference.values(m))
    return trace


def step(model: nn.Module, optimizer: Any, rank: int, number: int) -> None:
    optimizer.zero_grad()
    loops.loss_of(model, *loops.make_batch(rank, number)).backward()
    optimizer.step()


def begin(rank: int, row: tuple[int, Any, list[float], str, bool]) -> Any:
    fragments, period, weights, optimizer, is_apart = row
    model = DistributedDataParallel(start_of(rank, is_apart), init_sync=False)
    made = loops.OPTIMIZERS[optimizer](model)
    return model, made, attach(model, made, CoCoDSGD(period, fragments=fragments), weight=weights[rank])


def all_rows(rank: int) -> Any:
    found = []
    for row in ROWS:
        model, optimizer, sync = begin(rank, row)
        trace = []
        for number in range(STEPS):
            step(model, optimizer, rank, number)
            trace.append(loops.snapshot(model))
            if number == 6:
                with sync.averaged():
                    pass
        drift = sync.stats().drift
        sync.finish()
        found.append((trace, loops.snapshot(model), drift))
        for number in range(3):
            step(model, optimizer, rank, number)
        sync.reweight(rank + 1)
        sync.detach()
    return found


@pytest.mark.parametrize("num_workers", [2, 3])
def test_every_step_equals_the_serial_reference(num_workers: int) -> None:
    results = run_workers(num_workers, all_rows)
    for index, row in enumerate(ROWS):
        got = [worker[index] for worker in results]
        assert_traces_equal([trace for trace, _, _ in got], serial(num_workers, row), f"{row}")
        for _, finished, drift in got:
            assert all(torch.equal(a, b) for a, b in zip(finished, got[0][1], strict=True))
            assert 0 < drift < 10


def test_one_worker_is_plain_training() -> None:
    plain, parted = loops.make_model(), loops.make_model()
    optimizers = [loops.OPTIMIZERS["momentum"](m) for m in (plain, parted)]
    sync = attach(parted, optimizers[1], CoCoDSGD(4, fragments=3))
    for number in range(STEPS):
        for model, optimizer in zip((plain, parted), optimizers, strict=True):
            step(model, optimizer, 0, number)
    sync.finish()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), parted.parameters(), strict=True))


def test_parts_follow_the_weights() -> None:
    model = loops.make_model()
    sync = attach(model, loops.OPTIMIZERS["sgd"](model), CoCoDSGD(4, fragments=3))
    sync.reweight(5)
    assert [part.route.weights.values for part in sync._driver.replica.parts] == [(5.0,)] * 3


def stopped(rank: int, folder: str) -> Any:
    row = (3, 5, [1.0, 2.0, 3.0], "adam", False)
    found = []
    for at in (None, 7, 9):
        model, optimizer, sync = begin(rank, row)
        trace = []
        for number in range(STEPS):
            step(model, optimizer, rank, number)
            trace.append(loops.snapshot(model))
            if number + 1 == at:  # parts are in flight
                Checkpoints(f"{folder}/{at}", sync).save()
                sync.detach()
                model, optimizer, sync = begin(rank, row)
                resumed = Checkpoints(f"{folder}/{at}", sync).resume()
                assert resumed is not None
                assert resumed.is_exact
        found.append((trace, sync.stats().drift, sync.stats().bytes, sync.stats().rounds))
        sync.detach()
    return found


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for whole, *others in run_workers(2, stopped, str(tmp_path)):
        for other in others:
            assert whole[1:] == other[1:]
            for row, again in zip(whole[0], other[0], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(row, again, strict=True))


def on_slow_link(rank: int) -> Any:
    found = []
    for fragments in (1, 4):
        model, optimizer, sync = begin(rank, (fragments, 4, [1, 1], "sgd", False))
        sync.control.emulate_link(Link(latency_ms=3))
        sync.control.listen()
        sync.control.record_spans()
        if rank == 1:
            sync.control.request(save=True)
        saves = []
        for number in range(STEPS):
            step(model, optimizer, rank, number)
            saves.append(sync.control.agreed().save)
        sync.finish()
        lengths = [end - start for name, start, end in sync.control.take_spans() if name == "communicate"]
        found.append((saves, len(lengths), min(lengths), sync.stats().bytes))
        sync.detach()
    return found


def test_parts_travel_one_by_one_over_a_slow_link_and_wishes_with_the_first() -> None:
    workers = run_workers(2, on_slow_link)
    for (saves, transfers, shortest, _), (others, parts, shortest_part, num_bytes) in workers:
        assert saves == others == workers[0][0][0], "a wish is known to all after the same step"
        assert sum(saves) == 1
        # Of 13 steps: after 4, 8 and 12, and finish(); parts 1 to 3 also in the first round, after 1, 2 and 3, 5, ...
        assert (transfers, parts) == (4, 13 + 1)
        assert min(shortest, shortest_part) >= 0.006 - 1e-6, "two messages; the clock is a float"
        assert num_bytes > 0


# ------------------------------------------------------------------------------------------------ pure functions


@given(st.integers(1, 30), st.data())
def test_every_part_has_a_step_of_its_own(period: int, data: st.DataObject) -> None:
    fragments = data.draw(st.integers(1, period))
    offsets = fragment_offsets(period, fragments)
    assert offsets[0] == 0
    assert offsets == sorted(set(offsets))
    assert offsets[-1] < period
    clock, turns = RoundClock(Period.parse(period)), []
    for _ in range(2 * period):
        clock.tick()
        turns += clock.parts_due(fragments)
    assert turns == [*range(1, fragments), *range(fragments), 0]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=12), st.data())
def test_parts_are_consecutive_and_never_empty(sizes: list[int], data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, len(sizes)))
    parts = [list(range(len(sizes)))[cut] for cut in balanced_cuts(sizes, num_parts)]
    assert [index for part in parts for index in part] == list(range(len(sizes)))
    assert len(parts) == num_parts
    assert all(parts)


# ---------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("period", "options", "message"),
    [
        (5, {"fragments": 6}, "fragments=6 must be from 1 to 5, the shortest period; use 5 at most"),
        (5, {"fragments": 0}, "fragments=0 must be from 1 to 5"),
        ([(0, 2), (9, 5)], {"fragments": 3}, "fragments=3 must be from 1 to 2, the shortest period"),
        (5, {"fragments": 2.0}, "fragments=2.0 is not an int"),
    ],
)
def test_what_cannot_be_is_refused(period: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        CoCoDSGD(period, **options)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_more_parts_than_parameters_are_refused() -> None:
    model = loops.make_model()
    with pytest.raises(ValueError, match="fragments=5 is more than the model's 4 trainable parameters"):
        attach(model, loops.OPTIMIZERS["sgd"](model), CoCoDSGD(5, fragments=5))
    assert repr(CoCoDSGD(5, fragments=2)) == "CoCoDSGD(period=5, fragments=2)"


def disagreeing(rank: int) -> None:
    begin(rank, (rank + 1, 5, [1, 1], "sgd", False))


def test_workers_and_states_must_agree() -> None:
    for outcome in run_outcomes(2, disagreeing):
        assert outcome.error is not None
        assert "workers differ in fragments: rank 0 has 1, rank 1 has 2; pass the same" in outcome.error[1]
    syncs = []
    for fragments in (2, 3):
        model = loops.make_model()
        syncs.append(attach(model, loops.OPTIMIZERS["sgd"](model), CoCoDSGD(5, fragments=fragments)))
    with pytest.raises(ValueError, match="the state was saved with fragments=2, but attached with 3; use the same"):
        syncs[1].load_state_dict(syncs[0].state_dict())
