"""Everything goes with everything: drawn combinations on real processes against the serial reference."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import ALGORITHMS, CoCoDSGD, LocalSGD, Outer, attach
from cocod_accel.averaging.rules import mix_, outer_step_
from tests import loops, reference_engine
from tests.reference_engine import Case
from tests.test_exactness import assert_traces_equal
from tests.workers import run_workers

WORKERS, ROUNDS = 4, 3
#: Which of the four parameters (30, 5, 15 and 3 elements) are in which part.
PARTS = {1: [[0, 1, 2, 3]], 2: [[0], [1, 2, 3]], 3: [[0], [1], [2, 3]], 4: [[0], [1], [2], [3]]}
OUTERS = [(1.0, 0.0, False), (0.7, 0.9, True), (1.0, 0.5, False), (0.5, 0.0, False), (0.3, 0.8, False)]


def drawn_case(draw: random.Random) -> Case:
    name = draw.choice(["cocod", "cocod", "local", "asynlocal"])
    node_size = draw.choice([1, 2])
    num_nodes = WORKERS // node_size
    fragments = draw.randint(1, 4)
    periods: list[Any] = [draw.randint(fragments, 5) for _ in range(num_nodes if name == "asynlocal" else 1)]
    if name != "asynlocal" and draw.random() < 0.3:
        periods = [((0, periods[0]), (draw.randint(1, 7), draw.randint(fragments, 5)))]
    longest = max(period if isinstance(period, int) else max(k for _, k in period) for period in periods)
    return Case(
        name=name,
        periods=tuple(periods),
        weights=tuple(1.0 if name == "asynlocal" else float(draw.randint(1, 9)) for _ in range(WORKERS)),
        fragments=fragments,
        payload=draw.choice(["fp32", "fp32", "bf16", "int8", "int4", "ternary", "topk:0.2"]),
        own_share=draw.choice([1.0, 0.25, 0.0, 0.6]) if name == "cocod" else 1.0,
        outer=draw.choice(OUTERS),
        node_size=node_size,
        optimizer=draw.choice(["sgd", "momentum"]),
        delay=draw.choice([None, draw.randint(1, longest)]) if name == "cocod" else None,
    )


def algorithm_of(case: Case, node: int) -> Any:
    kind: Any = ALGORITHMS[case.name]
    more = {"own_share": case.own_share, "delay": case.delay} if case.name == "cocod" else {}
    period = case.periods[node % len(case.periods)]
    return kind(period, payload=case.payload, fragments=case.fragments, outer=Outer(*case.outer), **more)


def train(rank: int, given: list[Case], evaluates: bool) -> Any:
    found = []
    for case in given:
        inner = dist.new_subgroups(case.node_size)[0] if case.node_size > 1 else None
        model = DistributedDataParallel(loops.make_model(), process_group=inner)
        optimizer = loops.OPTIMIZERS[case.optimizer](model)
        node = rank // case.node_size
        algorithm = algorithm_of(case, node)
        sync = attach(model, optimizer, algorithm, weight=case.weights[rank], inner=inner)
        trace = []
        for step in range(case.num_steps(node, ROUNDS)):
            optimizer.zero_grad()
            loops.loss_of(model, *loops.make_batch(rank, step)).backward()
            optimizer.step()
            trace.append(loops.snapshot(model))
            if evaluates and case.name != "asynlocal" and step % 4 == 1:
                with sync.averaged():  # changes nothing that is trained
                    pass
        sync.finish()
        found.append((trace, loops.snapshot(model)))
        sync.detach()
    return found


# A seed and not the cases themselves: hypothesis begins with the simplest, and here every example is a run of its own. For
# the same reason none is made smaller.
@settings(max_examples=4, phases=[Phase.generate])
@given(st.integers(1, 2**32), st.booleans())
def test_combinations_equal_the_serial_reference(seed: int, evaluates: bool) -> None:
    draw = random.Random(seed)
    given = [drawn_case(draw) for _ in range(14)]
    results = run_workers(WORKERS, train, given, evaluates)
    for index, case in enumerate(given):
        expected, finished = reference_engine.run(
            case, loops.make_model(), PARTS[case.fragments], loops.OPTIMIZERS[case.optimizer], loops.make_batch,
            loops.loss_of, ROUNDS,
        )  # fmt: skip
        # Rounding to codes is a step function: 1e-16 before it is 1e-16 after it, unless a value lies on the very step.
        assert_traces_equal([worker[index][0] for worker in results], expected, str(case))
        for worker in results:
            for ours, theirs in zip(worker[index][1], finished, strict=True):
                assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13), f"{case} after finish()"
            assert all(torch.equal(a, b) for a, b in zip(worker[index][1], results[0][index][1], strict=True))


# --------------------------------------------------------------------------------------- the rules as pure functions

NUMBERS = st.floats(-4, 4, width=32)


@given(st.lists(NUMBERS, min_size=1, max_size=8), st.sampled_from(OUTERS))
def test_the_outer_rule_is_torchs_sgd(means: list[float], options: tuple[float, float, bool]) -> None:
    rate, momentum, nesterov = options
    point = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([point], lr=rate, momentum=momentum, nesterov=nesterov)
    z, velocity = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for mean in means:
        point.grad = point.detach() - mean
        optimizer.step()
        target = torch.tensor([mean], dtype=torch.float64)
        outer_step_(z, velocity if momentum else None, target, Outer(*options))
        assert z.item() == pytest.approx(point.item(), rel=1e-12, abs=1e-12)


@given(NUMBERS, NUMBERS, st.floats(0, 1))
def test_mixing_is_as_written(now: float, z: float, mix: float) -> None:
    mixed = mix_(torch.tensor([now], dtype=torch.float64), torch.tensor([z], dtype=torch.float64), mix)
    assert mixed.item() == pytest.approx(mix * now + (1 - mix) * z, abs=1e-12)


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("value", [1.1, -0.1, math.nan, True, "0.5"])
def test_a_share_is_a_share(value: Any) -> None:
    with pytest.raises(ValueError, match=r"own_share=.* is not in \[0, 1\]"):
        CoCoDSGD(2, own_share=value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0}, "outer rate=0 is not a positive number"),
        ({"rate": math.inf}, "outer rate=inf is not a positive number"),
        ({"momentum": 1.0}, r"outer momentum=1.0 is not in \[0, 1\)"),
        ({"nesterov": True}, "outer nesterov=True requires a momentum above 0"),
        ({"nesterov": 1, "momentum": 0.5}, "outer nesterov=1 is not a bool"),
    ],
)
def test_an_outer_rule_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Outer(**options)
    with pytest.raises(TypeError, match=r"outer=0\.9 is not an Outer; pass e\.g\."):
        LocalSGD(2, outer=0.9)  # type: ignore[arg-type]


def test_options_are_told() -> None:
    algorithm = CoCoDSGD(2, own_share=0.5, outer=Outer(0.7, 0.9, nesterov=True))
    assert repr(algorithm) == "CoCoDSGD(period=2, own_share=0.5, outer=Outer(0.7, 0.9, nesterov=True))"
    assert repr(CoCoDSGD(5, fragments=2)) == "CoCoDSGD(period=5, fragments=2)"
