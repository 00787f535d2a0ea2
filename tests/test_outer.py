"""Outer rules and shares of a worker's own steps between the rounds: finishing, resuming, different starts, one worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import CoCoDSGD, LocalSGD, Outer, Sync, attach
from tests import loops
from tests.workers import run_outcomes, run_workers

DILOCO = Outer(0.7, 0.9, nesterov=True)


def train(model: Any, optimizer: Any, rank: int, steps: range) -> list[Any]:
    trace = []
    for step in steps:
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
        trace.append(loops.snapshot(model))
    return trace


def begin(algorithm: Any, optimizer: str = "momentum") -> tuple[Any, Any, Sync]:
    model = DistributedDataParallel(loops.make_model())
    made = loops.OPTIMIZERS[optimizer](model)
    return model, made, attach(model, made, algorithm)


def goes_on_after_finish(rank: int) -> Any:
    model, optimizer, sync = begin(CoCoDSGD(2, outer=Outer(1, 0.5), own_share=0.5), "sgd")
    train(model, optimizer, rank, range(5))
    before = sync.state_dict()["averages"]["parts"][0]["point"]["velocity"][0]
    sync.finish()
    mean = loops.snapshot(model)
    point = sync.state_dict()["averages"]["parts"][0]["point"]
    with sync.averaged():
        held = loops.snapshot(model)
    flat = torch.cat([value.flatten() for value in mean])
    return (
        flat,
        point["z"][0],
        before,
        point["velocity"][0],
        all(torch.equal(*pair) for pair in zip(mean, held, strict=True)),
    )


def test_finish_puts_the_common_point_at_the_exact_mean_and_keeps_its_velocity() -> None:
    for flat, z, before, velocity, is_same in run_workers(2, goes_on_after_finish):
        assert torch.equal(flat, z)
        assert torch.equal(before, velocity)
        assert velocity.any()
        assert is_same


OPTIONS: list[dict[str, Any]] = [
    {"own_share": 0.5},
    {"outer": Outer(1, 0.5)},
    {"own_share": 0.25, "outer": DILOCO, "payload": "int8", "fragments": 2},
]


def stops_and_goes_on(rank: int) -> Any:
    """Nine steps at once, and in two sittings with everything made anew in between."""
    found = []
    for options in OPTIONS:
        model, optimizer, sync = begin(CoCoDSGD(2, **options))
        whole = train(model, optimizer, rank, range(9))
        sync.detach()
        model, optimizer, sync = begin(CoCoDSGD(2, **options))
        train(model, optimizer, rank, range(5))
        saved = sync.state_dict(), model.module.state_dict(), optimizer.state_dict()
        saved_model = {key: value.clone() for key, value in saved[1].items()}
        sync.detach()
        model, optimizer, sync = begin(CoCoDSGD(2, **options))
        model.module.load_state_dict(saved_model)
        optimizer.load_state_dict(saved[2])
        sync.load_state_dict(saved[0])
        rest = train(model, optimizer, rank, range(5, 9))
        sync.detach()
        same = all(torch.equal(a, b) for x, y in zip(whole[5:], rest, strict=True) for a, b in zip(x, y, strict=True))
        _, _, plain = begin(CoCoDSGD(2))
        with pytest.raises(ValueError, match="the state was saved with") as error:
            plain.load_state_dict(saved[0])
        plain.detach()
        found.append((same, str(error.value)))
    return found


def test_a_state_resumes_bit_exactly_and_only_with_the_same_options() -> None:
    for (first, share), (second, outer), (third, payload) in run_workers(2, stops_and_goes_on):
        assert first
        assert second
        assert third
        assert share == "the state was saved with own_share=0.5, but attached with 1.0; use the same"
        assert outer == "the state was saved with outer=Outer(1, 0.5), but attached with Outer(1, 0); use the same"
        assert payload == "the state was saved with payload=int8, but attached with fp32; use the same"


def starts_differ(rank: int) -> Any:
    found = []
    for outer in (Outer(1, 0.9), None):
        model = DistributedDataParallel(loops.make_model())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(rank)
        optimizer = loops.OPTIMIZERS["sgd"](model)
        sync = attach(model, optimizer, LocalSGD(1, outer=outer))
        found.append(train(model, optimizer, rank, range(1))[-1])
        sync.detach()
    return found


def test_the_first_mean_of_different_starts_is_the_common_point_at_rest() -> None:
    """It is adopted as it is: the distance to a start that was never shared is no progress."""
    workers = run_workers(2, starts_differ)
    for with_momentum, plain in workers:
        assert all(torch.equal(a, b) for a, b in zip(with_momentum, plain, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(plain, workers[0][1], strict=True))


def test_one_worker_is_plain_training() -> None:
    traces = []
    for algorithm in (CoCoDSGD(2), CoCoDSGD(2, own_share=0.5, outer=DILOCO)):
        model = loops.make_model()
        optimizer = loops.OPTIMIZERS["momentum"](model)
        attach(model, optimizer, algorithm)
        traces.append(train(model, optimizer, 0, range(6))[-1])
    assert all(torch.equal(a, b) for a, b in zip(*traces, strict=True))


def keeps_all_progress(rank: int) -> Any:
    """Every worker moves by 1 a step: after finish() the mean has moved by the number of steps, whatever the share."""
    found = []
    for share in (1.0, 0.5, 0.0):
        model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False).double())
        with torch.no_grad():
            model.module.weight.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = attach(model, optimizer, CoCoDSGD(3, own_share=share))
        for _ in range(11):
            optimizer.zero_grad()
            model(-torch.ones(1, 1, dtype=torch.float64)).sum().backward()
            optimizer.step()
        sync.finish()
        found.append(model.module.weight.item())
        sync.detach()
    return found


def test_no_step_is_lost_whatever_the_share() -> None:
    for found in run_workers(2, keeps_all_progress):
        assert found == [11.0, 11.0, 11.0]


def disagreeing(rank: int) -> None:
    begin(CoCoDSGD(2, own_share=[0.1, 0.2][rank]))


def test_workers_must_agree() -> None:
    for outcome in run_outcomes(2, disagreeing):
        assert outcome.error is not None
        assert "workers differ in own_share: rank 0 has 0.1, rank 1 has 0.2" in outcome.error[1]


# ------------------------------------------------------------------------------------------- states of version 3


def in_version_3(state: dict[str, Any]) -> dict[str, Any]:
    """As the release before wrote it."""
    (part,) = state["averages"]["parts"]
    point, payload = part["point"], state["options"]["payload"]
    momentum = state["options"]["outer"][1]
    anchor = {"momentum": momentum, "points": point["z"], "velocities": point["velocity"]} if momentum else None
    coded = {"centres": point["z"]} if payload != "fp32" else {}
    coded |= {key: part[key] for key in ("residuals", "owned_residuals")} if coded else {}
    return {
        "version": 3,
        **{key: state[key] for key in ("algorithm", "attempts", "rounds", "round_start", "traffic", "nodes")},
        "in_flight": part["in_flight"],
        "payload": {"name": payload, **coded, **({"is_in_flight": part["is_coded"]} if coded else {})},
        "anchor": {"pull_back": 0.0, "anchor": anchor},
        "drift": part["drift"],
    }


def reads_version_3(rank: int) -> Any:
    found = []
    for options in ({}, {"payload": "int8"}, {"outer": Outer(1, 0.5)}):
        model, optimizer, sync = begin(CoCoDSGD(2, **options))
        train(model, optimizer, rank, range(5))
        state = sync.state_dict()
        old = in_version_3(state)
        sync.detach()
        _, _, other = begin(CoCoDSGD(2, **options))
        other.load_state_dict(old)
        again = other.state_dict()
        again["averages"]["parts"][0]["number"] = state["averages"]["parts"][0]["number"]
        again["averages"]["drifts"] = state["averages"]["drifts"]  # there was no history
        found.append(_equal(again, state))
        with pytest.raises(ValueError, match=r"pull_back=0.5, which discarded progress and was removed; .*own_share"):
            other.load_state_dict({**old, "anchor": {"pull_back": 0.5, "anchor": None}})
        other.detach()
    dist.barrier()  # the other one may still be connecting
    return found


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def test_states_of_the_release_before_are_read() -> None:
    for found in run_workers(2, reads_version_3):
        assert found == [True, True, True]
