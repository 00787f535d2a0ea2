"""What becomes of momentum and other optimizer state when models are merged: kept, reset or averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import ALGORITHMS, SSGD, CoCoDSGD, LocalSGD, PipeSGD, attach
from tests import loops, reference
from tests.test_exactness import assert_traces_equal
from tests.workers import run_outcomes, run_workers

CASES = [
    (name, policy, optimizer)
    for name in ("cocod", "local", "asynlocal")
    for policy in ALGORITHMS[name].optimizer_policies
    for optimizer in ("momentum", "adam", "adamw")
]


def weights_of(name: str) -> list[float]:
    return [1.0, 1.0] if name == "asynlocal" else [2.0, 3.0]


def all_cases(rank: int) -> Any:
    found = []
    for name, policy, optimizer_name in CASES:
        kind: Any = ALGORITHMS[name]
        model = DistributedDataParallel(loops.make_model())
        optimizer = loops.OPTIMIZERS[optimizer_name](model)
        sync = attach(model, optimizer, kind(3, optimizer_state=policy), weight=weights_of(name)[rank])
        trace = []
        for step in range(9):
            optimizer.zero_grad()
            loops.loss_of(model, *loops.make_batch(rank, step)).backward()
            optimizer.step()
            trace.append(loops.snapshot(model))
        sync.finish()
        state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
        found.append((trace, [value.clone() for value in state if value.dim() > 0]))
    return found


@pytest.fixture(scope="module")
def results() -> Any:
    return run_workers(2, all_cases)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_step_equals_the_serial_reference(case: tuple[str, str, str], results: Any) -> None:
    name, policy, optimizer = case
    found = [worker[CASES.index(case)] for worker in results]
    batches = [[loops.make_batch(i, t) for t in range(9)] for i in range(2)]
    make = loops.OPTIMIZERS[optimizer]
    expected = reference.run(name, loops.make_model(), make, batches, loops.loss_of, weights_of(name), [3, 3], policy=policy)
    assert_traces_equal([trace for trace, _ in found], expected, f"{name}, {policy}")
    states = [state for _, state in found]
    if policy == "reset":
        assert states == [[], []], "finish() is a merge, too"
    else:
        same = all(torch.equal(a, b) for a, b in zip(*states, strict=True))
        assert same == (policy == "average")


class Scaled(nn.Module):
    """A parameter without dimensions is one like any other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = loops.make_model(), nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.scale * self.inner(x)
        return out


def scalar_parameter(rank: int) -> Any:
    model = DistributedDataParallel(Scaled())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    attach(model, optimizer, LocalSGD(2, optimizer_state="average"))
    for step in range(2):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
    return optimizer.state[model.module.scale]["momentum_buffer"].clone()


def test_the_state_of_a_scalar_is_averaged_too() -> None:
    first, second = run_workers(2, scalar_parameter)
    assert torch.equal(first, second)


def one_without_gradient(rank: int) -> None:
    model = DistributedDataParallel(loops.make_model(), find_unused_parameters=True)
    optimizer = loops.OPTIMIZERS["momentum"](model)
    attach(model, optimizer, LocalSGD(1, optimizer_state="average"))
    x, _ = loops.make_batch(rank, 0)
    out = model(x)
    (out if rank == 0 else (out - model.module[2](torch.zeros(1, 5).double()))).sum().backward()
    if rank == 1:
        model.module[0].weight.grad = None
    optimizer.step()


def test_states_that_differ_are_refused_on_all_workers() -> None:
    for outcome in run_outcomes(2, one_without_gradient):
        assert outcome.error is not None
        assert outcome.error[0] == "RuntimeError"
        assert 'use optimizer_state="keep"' in outcome.error[1]


def disagreeing(rank: int) -> None:
    model = DistributedDataParallel(loops.make_model())
    attach(model, loops.OPTIMIZERS["sgd"](model), CoCoDSGD(2, optimizer_state=["keep", "reset"][rank]))


def test_workers_must_agree() -> None:
    for outcome in run_outcomes(2, disagreeing):
        assert outcome.error is not None
        assert "workers differ in optimizer_state: rank 0 has keep, rank 1 has reset" in outcome.error[1]


def test_what_an_algorithm_cannot_do_is_refused() -> None:
    refused = "optimizer_state='average' is not supported by CoCoDSGD; choose from keep, reset"
    with pytest.raises(ValueError, match=refused):
        CoCoDSGD(2, optimizer_state="average")
    for kind in (SSGD, PipeSGD):
        assert kind.optimizer_policies == ("keep",)
    assert repr(LocalSGD(2, optimizer_state="average")) == "LocalSGD(period=2, optimizer_state='average')"
