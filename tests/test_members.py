"""Workers that come and go: real processes, a real lighthouse, and a serial reference for whoever was there."""

from __future__ import annotations

import pickle
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import (
    ALGORITHMS,
    CoCoDSGD,
    Outer,
    attach,
)
from cocod_accel.members.part import MembersPart
from cocod_accel.members.session import Gathering
from tests import loops, reference_members
from tests.company import TOKEN, Company, Process, hear, members, needs_torchft, say
from tests.reference_members import Life
from tests.workers import run_workers

# Who is there is a question of heartbeats: a machine that is busy with other tests makes workers miss theirs.
pytestmark = pytest.mark.alone

PERIOD = 4
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 5.0, "d": 3.0, "e": 4.0}

Trace = dict[int, list[Tensor]]


def settings(name: str, options: dict[str, Any]) -> Any:
    kinds: dict[str, Any] = dict(options)
    if "outer" in kinds:
        rate, momentum = kinds["outer"]
        kinds["outer"] = Outer(rate, momentum, nesterov=True)
    kind: Any = ALGORITHMS[name]
    return kind(period=PERIOD, **kinds)


def train(
    pipe: Connection,
    address: str,
    name: str,
    algorithm: str,
    options: dict[str, Any],
    last: int,
    begin_with: int,
    dtype: torch.dtype = torch.float64,
    fails_at: int = 0,
) -> Any:
    """Train until ``last`` steps, or as told: to say where it is, to leave, or to end after another step.

    ``fails_at``: the sum of the round that began after so many steps fails here, when it has succeeded elsewhere.
    """
    whole = MembersPart._send

    def send(part: MembersPart, flight: Any, gathering: Gathering) -> None:
        whole(part, flight, gathering)
        if gathering.at == fails_at:
            raise RuntimeError("this worker does not hear of it")

    MembersPart._send = send  # type: ignore[method-assign, assignment]
    model = loops.make_model(dtype)
    optimizer = loops.OPTIMIZERS["momentum"](model)
    others = members(address, name, begin_with=begin_with)
    sync = attach(model, optimizer, settings(algorithm, options), weight=WEIGHTS[name], members=others)
    say(pipe, "attached")
    first, trace, merged = sync.attempts, {}, {}

    def note() -> None:
        now = sync.members.presence()
        if now.names:
            merged[now.step] = (now.names, now.weights)

    note()
    while sync.attempts < last and not sync.members.has_left:
        if pipe.poll():
            told = hear(pipe)
            if told == "where":
                say(pipe, sync.attempts)
            elif told == "leave":
                sync.members.leave()
            else:
                last = told
        x, y = loops.make_batch("abcd".index(name), sync.attempts, dtype=dtype)
        optimizer.zero_grad()
        loops.loss_of(model, x, y).backward()
        optimizer.step()
        note()
        trace[sync.attempts] = loops.snapshot(model)
        if last > 100:
            time.sleep(0.005)  # it ends as told, so there must be time to tell it
    end = sync.attempts
    part = sync._driver.replica.parts[0]
    part.land()
    assert isinstance(part, MembersPart)
    common = part.common()
    sync.finish()
    presence = sync.members.presence()
    sync.detach()
    return {
        "full_name": next(full for full in presence.names if full.startswith(f"{name}:")),
        "first": first, "last": end, "trace": trace, "merged": merged, "final": loops.snapshot(model),
        "common": common, "lost": presence.lost_rounds, "rounds": presence.rounds,
    }  # fmt: skip


def compare(results: dict[str, Any], algorithm: str, options: dict[str, Any]) -> None:
    """Every worker, after each of its steps, with the reference that is told who was there."""
    lives = {
        result["full_name"]: Life("abcd".index(name), result["first"], result["last"], result["merged"])
        for name, result in results.items()
    }
    for result in results.values():  # whoever was killed has told nothing
        for names, _ in result["merged"].values():
            for name in set(names) - set(lives):
                held = {step: made for step, made in result["merged"].items() if name in made[0]}
                lives[name] = Life("abcd".index(name[0]), 0, max(held) + PERIOD - 1, held)
    expected = reference_members.run(
        lives,
        loops.make_model,
        loops.OPTIMIZERS["momentum"],
        lambda number, step: loops.make_batch(number, step),
        loops.loss_of,
        PERIOD,
        overlapped=algorithm == "cocod",
        delay=options.get("delay"),
        outer=options.get("outer"),
    )
    for name, result in results.items():
        assert result["trace"], name
        for step, values in result["trace"].items():
            for ours, theirs in zip(values, expected[result["full_name"]][step], strict=True):
                assert torch.allclose(ours, theirs, rtol=0, atol=1e-12), f"{name} at step {step}: {lives}"


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cocod": ("cocod", {}),
    "local": ("local", {}),
    "delay": ("cocod", {"delay": 2}),
    "outer": ("cocod", {"outer": (0.7, 0.3)}),
    "diloco": ("local", {"outer": (0.7, 0.9)}),
}


#: Algorithms that refuse members.
REFUSED = ("ssgd", "pipe", "asynlocal", "streaming_diloco")


@needs_torchft
@pytest.mark.parametrize(
    "case", ["cocod", *(pytest.param(c, marks=pytest.mark.slow) for c in CASES if c != "cocod"), *REFUSED]
)
def test_whoever_is_there_equals_the_reference(case: str) -> None:
    """Three begin; one is killed, one comes later, one leaves; in which rounds is told to the reference."""
    if case in REFUSED:
        model = loops.make_model()
        with pytest.raises(ValueError, match="does not work with members; use LocalSGD or CoCoDSGD"):
            attach(model, loops.OPTIMIZERS["sgd"](model), loops.make_algorithm(case, 4), members=members("127.0.0.1:1", "a"))
        return
    algorithm, options = CASES[case]
    with Company() as company:
        a, b, c = (company.start(train, name, algorithm, options, 10**9, 3) for name in "abc")
        for process in (a, b, c):
            assert process.hear() == "attached"
        c.tell("where")
        assert c.hear() >= 0
        c.kill()
        d = company.start(train, "d", algorithm, options, 10**9, 1)
        assert d.hear() == "attached"
        b.tell("leave")
        results = {"b": b.result()}
        a.tell("where")
        end = a.hear() + 160
        for process in (a, d):
            process.tell(end)
        results |= {"a": a.result(), "d": d.result()}
    assert results["d"]["first"] > 0
    assert results["a"]["lost"] <= 1
    assert all(torch.equal(x, y) for x, y in zip(results["a"]["final"], results["d"]["final"], strict=True))
    compare(results, algorithm, options)


@needs_torchft
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("cocod", {"outer": (0.7, 0.3)}),
        pytest.param("local", {"outer": (0.7, 0.3)}, marks=pytest.mark.slow),
        pytest.param("cocod", {}, marks=pytest.mark.slow),
        ("cocod", {"payload": "int8"}),
    ],
)
def test_a_round_that_failed_for_one_is_harmless(algorithm: str, options: dict[str, Any]) -> None:
    """It merges nothing, keeps its steps, and gets what all have in common in full."""
    with Company() as company:
        started = [
            company.start(train, name, algorithm, options, 30, 3, torch.float64, 12 if name == "b" else 0) for name in "abc"
        ]
        results = {name: process.result() for name, process in zip("abc", started, strict=True)}
    assert [results[name]["lost"] for name in "abc"] == [0, 1, 0]
    assert [12 in results[name]["merged"] for name in "abc"] == [True, False, True]
    if "payload" not in options:
        compare(results, algorithm, options)
    if options:
        points = [torch.cat([*result["common"]["z"], *result["common"]["velocity"]]) for result in results.values()]
        assert all(torch.equal(points[0], point) for point in points)
    for result in results.values():
        assert all(torch.equal(x, y) for x, y in zip(result["final"], results["a"]["final"], strict=True))


# ------------------------------------------------------------------------------------------------- nobody leaves


def ordinary(rank: int, algorithm: str, options: dict[str, Any]) -> Any:
    """The same training on workers that stay."""
    model = DistributedDataParallel(loops.make_model(torch.float32))
    optimizer = loops.OPTIMIZERS["momentum"](model)
    sync = attach(model, optimizer, settings(algorithm, options), weight=WEIGHTS["abc"[rank]])
    trace = {}
    for step in range(22):
        x, y = loops.make_batch(rank, step, dtype=torch.float32)
        optimizer.zero_grad()
        loops.loss_of(model, x, y).backward()
        optimizer.step()
        trace[step + 1] = loops.snapshot(model)
    sync.finish()
    return trace, loops.snapshot(model), sync.stats().bytes


ALL_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **CASES,
    "bf16": ("cocod", {"payload": "bf16"}),
    "int8": ("cocod", {"payload": "int8"}),
    "int4, delay": ("cocod", {"payload": "int4", "delay": 3}),
    "int8, outer": ("local", {"payload": "int8", "outer": (0.7, 0.9)}),
    "own share": ("cocod", {"own_share": 0.5}),
    "topk": ("cocod", {"payload": "topk:0.25"}),
}


@needs_torchft
@pytest.mark.parametrize(
    "case", ["cocod", "int8", *(pytest.param(c, marks=pytest.mark.slow) for c in ALL_OPTIONS if c not in ("cocod", "int8"))]
)
def test_with_nobody_leaving_it_is_the_ordinary_run(case: str) -> None:
    """To the bit, in float32."""
    algorithm, options = ALL_OPTIONS[case]
    with Company() as company:
        started = [company.start(train, name, algorithm, options, 22, 3, torch.float32) for name in "abc"]
        results = [process.result() for process in started]
    expected = run_workers(3, ordinary, algorithm, options)
    for result, (trace, final, _) in zip(results, expected, strict=True):
        assert result["lost"] == 0
        for step, values in trace.items():
            assert all(torch.equal(a, b) for a, b in zip(result["trace"][step], values, strict=True)), step
        assert all(torch.equal(a, b) for a, b in zip(result["final"], final, strict=True))


# -------------------------------------------------------------------------------------------------- coming, going


def roam(pipe: Connection, address: str, name: str, begin_with: int, options: dict[str, Any]) -> Any:
    """Train until told to stop; answer every question with what has happened so far."""
    model = loops.make_model(options.get("dtype", torch.float64))
    period, token = options.get("period", PERIOD), options.get("token", TOKEN)
    optimizer = loops.OPTIMIZERS["momentum"](model)
    algorithm = CoCoDSGD(period, payload=options.get("payload", "fp32"))
    others = members(address, name, begin_with=begin_with, token=token, timeout=options.get("timeout", 10.0))
    sync = attach(model, optimizer, algorithm, weight=WEIGHTS[name], members=others)
    say(pipe, "attached")
    while True:
        if pipe.poll():
            if hear(pipe) == "stop":
                break
            now = sync.members.presence()
            say(pipe, (now, sync.attempts, [p.detach().clone() for p in model.parameters()]))
        x, y = loops.make_batch("abcd".index(name), sync.attempts % 64, dtype=options.get("dtype", torch.float64))
        optimizer.zero_grad()
        loops.loss_of(model, x, y).backward()
        optimizer.step()
        time.sleep(0.005)  # a step of some length, so that the machine is not all theirs
    sync.detach()
    return sync.attempts


def report(process: Process) -> Any:
    process.tell("report")
    return process.hear()


def wait_for(process: Process, condition: Any, what: str, seconds: float = 30) -> Any:
    """Ask until it is so."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        presence, attempts, _ = report(process)
        if condition(presence):
            return presence, attempts
    raise AssertionError(f"{what}: {presence}")


def roaming(company: Company, names: str) -> list[Process]:
    started = [company.start(roam, name, len(names), {}) for name in names]
    for process in started:
        assert process.hear() == "attached"
    for process in started:
        wait_for(process, lambda now: now.rounds >= 2, "rounds are merged")
    return started


def all_there(names: str) -> Any:
    return lambda now: [name[0] for name in now.names] == list(names) and all(now.weights)


@needs_torchft
def test_a_killed_worker_costs_a_round_and_comes_back() -> None:
    with Company() as company:
        a, b, c = roaming(company, "abc")
        c.kill()
        for process in (a, b):
            presence, _ = wait_for(process, all_there("ab"), "the others go on")
            assert presence.lost_rounds <= 1
        c = company.start(roam, "c", 1, {})
        assert c.hear() == "attached"
        for process in (a, b, c):
            wait_for(process, all_there("abc"), "it is back")
        before = report(c)[0].rounds
        for process in (a, b, c):
            presence, _ = wait_for(process, lambda now: now.rounds > before + 2, "rounds are merged")
            assert presence.lost_rounds <= 1
        for process in (a, b, c):
            process.tell("stop")
        for process in (a, b, c):
            process.result()


@needs_torchft
def test_strangers_are_refused_and_the_others_untouched() -> None:
    with Company() as company:
        (a,) = roaming(company, "a")
        for options, line in (
            ({"token": "another token"}, "the token is not that of the workers of this run"),
            ({"period": 7}, "the workers of this run have period 4, this one 7"),
            ({"dtype": torch.float32}, "another model"),
        ):
            stranger = company.start(roam, "b", 1, options)
            error = stranger.error()
            assert error.startswith("MembersError: ")
            assert line in error
            assert "\n" not in error
        before = report(a)[0]
        presence, _ = wait_for(a, lambda now: now.rounds > before.rounds + 2, "it goes on")
        assert presence.lost_rounds == 0
        a.tell("stop")
        a.result()


@needs_torchft
def test_without_its_lighthouse_training_goes_on() -> None:
    with Company() as company:
        a, b = roaming(company, "ab")
        company.lighthouse.kill()
        before = report(a)[0].rounds
        for process in (a, b):
            wait_for(process, lambda now: now.rounds > before + 20 and all_there("ab")(now), "both go on together")
        company.light()
        c = company.start(roam, "c", 1, {})
        assert c.hear() == "attached"
        for process in (a, b, c):
            presence, _ = wait_for(process, all_there("abc"), "one more is there")
            assert presence.lost_rounds <= 1
        for process in (a, b, c):
            process.tell("stop")


@needs_torchft
@pytest.mark.slow
def test_a_frozen_worker_joins_again() -> None:
    with Company() as company:
        a, b, c = roaming(company, "abc")
        c.signal(signal.SIGSTOP)
        for process in (a, b):
            wait_for(process, all_there("ab"), "the others go on")
        before = report(a)[0].rounds
        wait_for(a, lambda now: now.rounds > before + 5, "rounds are merged")
        c.signal(signal.SIGCONT)
        presence, _ = wait_for(c, lambda now: now.joined == 1, "it gets the model of the others")
        assert presence.rounds > before
        for process in (a, b, c):
            wait_for(process, all_there("abc"), "it is back")


@needs_torchft
@pytest.mark.slow
def test_two_are_killed_at_once() -> None:
    with Company() as company:
        a, b, c = roaming(company, "abc")
        b.kill()
        c.kill()
        presence, _ = wait_for(a, all_there("a"), "it goes on alone")
        assert presence.lost_rounds <= 1


@needs_torchft
def test_with_too_few_left_a_worker_stops() -> None:
    with Company() as company:
        error = company.start(roam, "a", 2, {"timeout": 2.0}).error()
    assert error == ("MembersError: only 1 of 2 workers have come within 2 s; start the others, or lower begin_with")


# ---------------------------------------------------------------------------------------------------- checkpoints


def stop_and_go(pipe: Connection, address: str, name: str, begin_with: int, saved: Any, last: int) -> Any:
    """Train from a saved state, or from the beginning; what this worker would save at the end, and the mean then."""
    model = loops.make_model()
    optimizer = loops.OPTIMIZERS["momentum"](model)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    algorithm = CoCoDSGD(PERIOD, payload="int8")
    others = members(address, name, begin_with=begin_with)
    sync = attach(model, optimizer, algorithm, weight=WEIGHTS[name], members=others)
    if saved is not None:
        sync.load_state_dict(saved["sync"])
    first = sync.attempts
    while sync.attempts < last:
        x, y = loops.make_batch("abcde".index(name), sync.attempts)
        optimizer.zero_grad()
        loops.loss_of(model, x, y).backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "sync": sync.state_dict()}
    state = pickle.loads(pickle.dumps(state))
    with sync.averaged():
        evaluated = loops.snapshot(model)
    sync.finish()
    sync.detach()
    return first, state, evaluated, loops.snapshot(model), sync.members.presence().lost_rounds


@needs_torchft
@pytest.mark.parametrize(
    "num_workers", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
def test_what_one_of_four_saved_is_resumed_by_any_number(num_workers: int) -> None:
    with Company() as company:
        started = [company.start(stop_and_go, name, 4, None, 18) for name in "abcd"]
        results = [process.result() for process in started]
        saved = results[1][1]
        started = [company.start(stop_and_go, name, num_workers, saved, 30) for name in "abcde"[:num_workers]]
        resumed = [process.result() for process in started]
    for first, _, evaluated, final, lost in resumed:
        assert first == 18
        assert lost == 0
        for ours, theirs in zip([*evaluated, *final], [*resumed[0][2], *resumed[0][3]], strict=True):
            assert torch.equal(ours, theirs)
