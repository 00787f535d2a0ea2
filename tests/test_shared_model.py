"""A model that is also used inside another model's loss, as a GAN's discriminator is: only its own steps count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import ALGORITHMS, SSGD, Algorithm, PipeSGD, attach
from tests import loops, reference
from tests.test_exactness import assert_traces_equal
from tests.workers import run_outcomes, run_workers

WEIGHTS = [3.0, 1.0, 2.0]
STEPS = 10


def adversarial(rank: int, name: str, size: int, zeroed: str, generator_first: bool) -> tuple[list[list[Tensor]], int, int]:
    """The discriminator's parameters after each of its steps; its attempts and rounds."""
    model = DistributedDataParallel(loops.make_model()) if size > 1 else loops.make_model()
    optimizer = loops.OPTIMIZERS["momentum"](model)
    algorithm = loops.make_algorithm(name, 2)
    sync = attach(model, optimizer, algorithm, weight=1 if algorithm.needs_equal_weights else WEIGHTS[rank])
    generator = nn.Linear(4, 6, dtype=torch.float64)
    tuning = torch.optim.SGD(generator.parameters(), lr=0.1)

    def fool(step: int) -> None:
        noise = torch.randn(5, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        tuning.zero_grad()
        model(generator(noise)).sum().backward()
        tuning.step()

    trace = []
    for step in range(STEPS):
        if generator_first:
            fool(step)
        if zeroed == "before":
            optimizer.zero_grad(set_to_none=bool(step % 2))
        loss = loops.loss_of(model, *loops.make_batch(rank, step))
        if zeroed == "between":
            optimizer.zero_grad(set_to_none=bool(step % 2))
        loss.backward()
        optimizer.step()
        trace.append(loops.snapshot(model))
        if not generator_first:
            fool(step)
        if step == 4:
            with sync.averaged():
                pass
    return trace, sync.attempts, sync.stats().rounds


@pytest.mark.parametrize("generator_first", [True, False])
@pytest.mark.parametrize("zeroed", ["before", "between"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_discriminator_takes_its_own_steps_only(name: str, zeroed: str, generator_first: bool) -> None:
    size = 3 if zeroed == "before" else 2
    results = run_workers(size, adversarial, name, size, zeroed, generator_first)
    batches = [[loops.make_batch(rank, step) for step in range(STEPS)] for rank in range(size)]
    weights = [1.0] * size if name == "asynlocal" else WEIGHTS[:size]
    make = loops.OPTIMIZERS["momentum"]
    expected = reference.run(name, loops.make_model(), make, batches, loops.loss_of, weights, [2] * size)
    assert_traces_equal([trace[: len(want)] for (trace, _, _), want in zip(results, expected, strict=True)], expected, name)
    assert {(attempts, rounds) for _, attempts, rounds in results} == {(STEPS, STEPS if name in ("ssgd", "pipe") else 5)}


@pytest.mark.parametrize("name", ["pipe", "cocod"])
def test_alone_it_does_too(name: str) -> None:
    trace, attempts, _ = adversarial(0, name, 1, "before", True)
    batches = [[loops.make_batch(0, step) for step in range(STEPS)]]
    expected = reference.run(name, loops.make_model(), loops.OPTIMIZERS["momentum"], batches, loops.loss_of, [1.0], [2])
    assert_traces_equal([trace], expected, name)
    assert attempts == STEPS


def not_finite(rank: int) -> int:
    """Trained together with what feeds it; worker 1 drops a gradient that is not finite, as a GradScaler does."""
    model = DistributedDataParallel(loops.make_model())
    first = nn.Linear(6, 6, dtype=torch.float64)
    optimizer = loops.OPTIMIZERS["sgd"](model)
    sync = attach(model, optimizer, loops.make_algorithm("cocod", 2))
    for step in range(7):
        optimizer.zero_grad()
        inputs, targets = loops.make_batch(rank, step)
        is_bad = rank == 1 and step == 3
        loss = nn.functional.mse_loss(model(first(inputs)), targets) * (float("inf") if is_bad else 1.0)
        loss.backward()
        if not is_bad:
            optimizer.step()
    sync.finish()
    return sync.attempts


def test_a_gradient_that_is_not_finite_is_a_skipped_step_of_ones_own() -> None:
    assert run_workers(2, not_finite) == [7, 7]


def coded(rank: int, algorithm: Algorithm) -> None:
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    attach(model, optimizer, algorithm)
    feeding = nn.Linear(6, 6, dtype=torch.float64)
    for step in range(4):
        optimizer.zero_grad()
        model(feeding(loops.make_batch(rank, step)[0])).sum().backward()
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()


@pytest.mark.parametrize("algorithm", [SSGD(payload="int8"), PipeSGD(payload="ternary")], ids=["ssgd", "pipe"])
def test_codes_that_remember_gradients_of_another_loss_are_refused(algorithm: Any) -> None:
    for outcome in run_outcomes(2, coded, algorithm):
        assert outcome.error is not None
        assert outcome.error[0] == "RuntimeError"
        assert "call requires_grad_(False) on this model while that loss is computed" in outcome.error[1]
