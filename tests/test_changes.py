"""What happens to a model after attach that no average carries: it is said on all workers, in one line."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cocod_accel import SSGD, Algorithm, CoCoDSGD, LocalSGD, attach
from tests import loops
from tests.test_meeting import impatient
from tests.workers import run_outcomes, run_workers

Change = Callable[[nn.Module, Optimizer], None]


def unfreeze(model: nn.Module, optimizer: Optimizer) -> None:
    model[0].requires_grad_(True)  # type: ignore[index]
    optimizer.add_param_group({"params": list(model[0].parameters())})  # type: ignore[index]


def replace(model: nn.Module, optimizer: Optimizer) -> None:
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())  # type: ignore[index]
    optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p.requires_grad]


def add(model: nn.Module, optimizer: Optimizer) -> None:
    model.add_module("head", nn.Linear(3, 3, dtype=torch.float64))
    optimizer.add_param_group({"params": list(model[3].parameters())})  # type: ignore[index]


def give(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def harmless(model: nn.Module, optimizer: Optimizer) -> None:
    """A module without parameters, a layer that is trained no more, a learning rate, a group that is cut in two."""
    model.add_module("nothing", nn.Identity())
    model[2].bias.requires_grad_(False)  # type: ignore[index]
    first, *rest = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = [first]
    optimizer.add_param_group({"params": rest, "lr": 0.01})


CHANGES: dict[str, tuple[Change, str]] = {
    "unfrozen": (unfreeze, "parameter 0.weight was frozen at attach and is trained now, so it is not averaged"),
    "replaced": (replace, "parameter 2.weight was added or replaced after attach, so it is not averaged"),
    "added": (add, "parameter head.weight was added or replaced after attach, so it is not averaged"),
    "given": (give, r"the optimizer was given 1 more parameter(s) after attach, not averaged"),
}
FIX = "on all workers, call sync.finish() and sync.detach() before such a change, and attach() after it"


def changing(rank: int, algorithm: Algorithm, change: Change, ranks: tuple[int, ...]) -> int:
    with impatient():
        module = loops.make_model()
        module[0].requires_grad_(False)  # type: ignore[index]
        model = DistributedDataParallel(module)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        sync = attach(model, optimizer, algorithm)
        for step in range(12):
            if step == 5 and rank in ranks:
                change(module, optimizer)
            optimizer.zero_grad()
            loops.loss_of(model, *loops.make_batch(rank, step)).backward()
            optimizer.step()
        sync.finish()
        return sync.stats().rounds


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("algorithm", [CoCoDSGD(3), LocalSGD(2), SSGD()], ids=["cocod", "local", "ssgd"])
def test_what_is_added_is_noticed_at_the_next_rounds_end(name: str, algorithm: Algorithm) -> None:
    change, line = CHANGES[name]
    for outcome in run_outcomes(2, changing, algorithm, change, (0, 1)):
        assert outcome.error is not None
        assert outcome.error[:2] == ("RuntimeError", f"{line}; {FIX}")


def test_all_workers_hear_of_a_change_on_one() -> None:
    first, second, third = run_outcomes(3, changing, CoCoDSGD(3), unfreeze, (1,))
    line = f"{CHANGES['unfrozen'][1]}; {FIX}"
    assert second.error is not None
    assert second.error[:2] == ("RuntimeError", line)
    for outcome in (first, third):
        assert outcome.error is not None
        assert outcome.error[:2] == ("TransferError", f"rank 1 has left: {line}")


def test_harmless_changes_are_none() -> None:
    assert run_workers(2, changing, CoCoDSGD(3), harmless, (0, 1)) == [4, 4]


def wrapped_twice(rank: int) -> None:
    model = DistributedDataParallel(DistributedDataParallel(loops.make_model()))
    attach(model, loops.OPTIMIZERS["sgd"](model), CoCoDSGD(3))


def test_a_model_that_is_wrapped_twice_is_refused() -> None:
    for outcome in run_outcomes(2, wrapped_twice):
        assert outcome.error is not None
        assert "wrapped in DistributedDataParallel twice" in outcome.error[1]


# ------------------------------------------------------------------------------------------- losing the mean


def said(rank: int, what: str) -> tuple[list[str], bool]:
    """What is said, and whether the mean model's state is the same on all workers."""
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    sync = attach(model, optimizer, CoCoDSGD(3))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(4):
            optimizer.zero_grad()
            loops.loss_of(model, *loops.make_batch(rank, step)).backward()
            optimizer.step()
        is_mean = True
        if what == "state":
            model.state_dict()
            model.state_dict()
        elif what == "averaged":
            with sync.averaged():
                model.state_dict()
        elif what == "mean":
            local = loops.snapshot(model)
            mean = sync.mean_state_dict()
            with sync.averaged():
                is_mean = all(torch.equal(mean[name], value) for name, value in model.module.state_dict().items())
            assert all(torch.equal(a, b) for a, b in zip(local, loops.snapshot(model), strict=True))
        elif what == "detach":
            sync.detach()
            sync.detach()
        elif what == "finish":
            sync.finish()
            model.state_dict()
        sync.finish() if what != "detach" else None
        sync.detach()
    return [str(each.message) for each in seen if each.category is UserWarning], is_mean


@pytest.mark.parametrize("what", ["state", "averaged", "mean", "detach", "finish"])
def test_what_would_lose_the_mean_is_said_once_by_one_worker(what: str) -> None:
    (first, is_mean), (second, _) = run_workers(2, said, what)
    assert second == []
    assert is_mean
    expected = {"state": "state_dict() in a local phase is this worker's own model", "detach": "detach() without finish()"}
    assert [line[: len(expected[what])] for line in first] == ([expected[what]] if what in expected else [])


def drifts(rank: int, algorithm: Algorithm) -> tuple[list[float], tuple[float, float, float]]:
    """The drift after every round's end, and what is known at the end, after ``finish()``."""
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    sync = attach(model, optimizer, algorithm)
    seen = []
    for step in range(8):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
        if step % 2:
            seen.append(sync.stats().drift)
    sync.finish()
    stats = sync.stats()
    return seen, (stats.drift, stats.largest_drift, stats.mean_drift)


@pytest.mark.parametrize("algorithm", [LocalSGD(2), CoCoDSGD(2), CoCoDSGD(2, fragments=2)], ids=["local", "cocod", "parts"])
def test_drift_is_that_of_merges_not_of_the_exact_mean(algorithm: Algorithm) -> None:
    for seen, (last, largest, mean) in run_workers(2, drifts, algorithm):
        merged = [drift for drift in seen if drift > 0]
        if algorithm.name == "local":
            assert (last, largest) == (merged[-1], max(merged))
            assert mean == pytest.approx(sum(merged) / len(merged))
        else:  # finish() merged what was in flight
            assert last > 1e-3
            assert largest >= last
            assert 0 < mean <= largest
            assert largest == max(last, *merged) or algorithm.fragments > 1  # there rounds end between two looks
