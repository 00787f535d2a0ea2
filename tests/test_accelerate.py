"""Objects prepared by accelerate, in loops written for accelerate."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from cocod_accel import ALGORITHMS, CoCoDSGD, attach
from tests import loops, reference
from tests.test_exactness import assert_traces_equal
from tests.workers import run_workers

WEIGHTS = [2.0, 3.0]
MICRO_BATCHES = 3


def prepared_loop(rank: int, name: str, accumulate: int) -> Any:
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # as a launcher does
    from accelerate.accelerator import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    assert accelerator.num_processes == 2
    model: Any = loops.make_model()
    model, optimizer = accelerator.prepare(model, loops.OPTIMIZERS["momentum"](model))
    sync = attach(model, optimizer, loops.make_algorithm(name, 2), weight=1 if name == "asynlocal" else WEIGHTS[rank])
    trace = []
    for micro_step in range(7 * accumulate):
        with accelerator.accumulate(model):
            accelerator.backward(loops.loss_of(model, *loops.make_batch(rank, micro_step)))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            trace.append(loops.snapshot(model))
    rounds = sync.stats().rounds
    sync.finish()
    return trace, rounds, loops.snapshot(model)


@pytest.mark.parametrize("accumulate", [1, MICRO_BATCHES])
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_an_accelerate_loop_equals_the_reference(name: str, accumulate: int) -> None:
    results = run_workers(2, prepared_loop, name, accumulate, seconds=110)
    batches = [[loops.joined_batch(i, t, accumulate) for t in range(7)] for i in range(2)]
    weights = [1.0, 1.0] if name == "asynlocal" else WEIGHTS
    if name == "asynlocal":
        batches = [worker[:6] for worker in batches]
    expected = reference.run(
        name,
        loops.make_model(),
        loops.OPTIMIZERS["momentum"],
        batches,
        loops.loss_of,
        weights,
        [2, 2],
    )
    assert_traces_equal([trace[: len(expected[0])] for trace, _, _ in results], expected, f"accelerate, {name}")
    assert [rounds for _, rounds, _ in results] == [7 if name in ("ssgd", "pipe") else 3] * 2
    assert all(torch.equal(a, b) for a, b in zip(results[0][2], results[1][2], strict=True))


def half_precision(rank: int) -> Any:
    """Parameters in bfloat16 are averaged in float32 and rounded once."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(300, 3).to(torch.bfloat16))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16))
    before = loops.snapshot(model)
    sync = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), CoCoDSGD(2), weight=WEIGHTS[rank])
    sync.finish()
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    return before, loops.snapshot(model), sync.stats().bytes


def test_16_bit_parameters_are_averaged_in_float32() -> None:
    (before0, after0, sent), (before1, after1, _) = run_workers(2, half_precision)
    for a, b, mean0, mean1 in zip(before0, before1, after0, after1, strict=True):
        first_merge = (2 * a.float() + 3 * b.float()) / 5
        assert torch.equal(mean0, mean1)
        # The pending first mean is merged into both, so both hold it (rounded) before the last mean is formed.
        assert torch.allclose(mean0.float(), first_merge, rtol=2**-7, atol=0)
    num_elements = sum(p.numel() for p in before0)
    assert sent == 2 * num_elements * 4  # two means, two workers, 4 bytes an element


def tied_and_frozen(rank: int) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[1].requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    sync = attach(wrapped, optimizer, CoCoDSGD(1))
    frozen = model[1].weight.clone()
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(10 * rank + step)
        wrapped(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
    assert model[2].weight is model[0].weight
    assert torch.equal(model[1].weight, frozen)
    return sync.stats().bytes


def test_tied_parameters_travel_once_and_frozen_ones_never() -> None:
    payload = 4 * (16 + 4 + 4)  # one weight, two biases
    assert run_workers(2, tied_and_frozen) == [2 * payload] * 2
