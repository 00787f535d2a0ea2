"""Whatever happens on one worker alone, all count the same rounds, and the numbers stay those of the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import CoCoDSGD, LocalSGD, attach
from tests import loops, reference
from tests.test_exactness import assert_traces_equal
from tests.workers import run_workers

WEIGHTS = [1.0, 3.0]
SKIPPED: list[set[int]] = [set(), {1, 5, 6}]
NUM_STEPS = 10


def skipping(rank: int, name: str, style: str) -> Any:
    """Worker 1 computes gradients at steps 1, 5 and 6 and drops them, in one of the ways loops do that."""
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["momentum"](model)
    sync = attach(model, optimizer, loops.make_algorithm(name, 3), weight=WEIGHTS[rank])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1000) if style == "scaler" else None
    trace = []
    for step in range(NUM_STEPS):
        skip = step in SKIPPED[rank]
        x, y = loops.make_batch(rank, step)
        if scaler is not None:
            loss = loops.loss_of(model, x, y)
            scaler.scale(loss * float("inf") if skip else loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        elif style == "before forward":
            optimizer.zero_grad(set_to_none=True)
            loops.loss_of(model, x, y).backward()
            if not skip:
                optimizer.step()
        elif style == "zeroed":
            loops.loss_of(model, x, y).backward()
            if not skip:
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        trace.append(loops.snapshot(model))
    sync.finish()
    return trace, sync.stats().rounds, loops.snapshot(model)


@pytest.mark.parametrize("name", ["local", "cocod"])
@pytest.mark.parametrize("style", ["scaler", "before forward", "zeroed"])
def test_steps_skipped_on_one_worker_keep_rounds_aligned(name: str, style: str) -> None:
    """Step 6 ends a round and worker 1 drops it: settled at its next forward, its merge is in the next row only."""
    results = run_workers(2, skipping, name, style)
    batches = [[loops.make_batch(i, t) for t in range(NUM_STEPS)] for i in range(2)]
    expected = reference.run(
        name,
        loops.make_model(),
        loops.OPTIMIZERS["momentum"],
        batches,
        loops.loss_of,
        WEIGHTS,
        [3, 3],
        skipped=SKIPPED,
    )
    assert [rounds for _, rounds, _ in results] == [3, 3]
    assert 5 in SKIPPED[1]
    expected[1][5] = results[1][0][5] = []
    assert_traces_equal([trace for trace, _, _ in results], expected, f"{name}, {style}")
    assert all(torch.equal(a, b) for a, b in zip(results[0][2], results[1][2], strict=True))


def dropped_between_forward_and_backward(rank: int) -> Any:
    """The common order forward, zero_grad, backward: a skip is seen only when the next backward begins."""
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    sync = attach(model, optimizer, CoCoDSGD(3))
    rounds = []
    for step in range(13):
        loss = loops.loss_of(model, *loops.make_batch(rank, step))
        optimizer.zero_grad()
        loss.backward()
        if not (rank == 1 and step in (1, 2, 5, 8, 9)):
            optimizer.step()
        rounds.append(sync._driver.clock.rounds)
    sync.finish()
    return rounds, loops.snapshot(model)


def test_gradients_dropped_after_the_forward_keep_rounds_aligned() -> None:
    (rounds, first), (rounds_too, second) = run_workers(2, dropped_between_forward_and_backward)
    assert rounds[-1] == rounds_too[-1] == 4
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def skipped_at_the_end(rank: int, call: str, name: str, zero_first: bool) -> Any:
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    sync = attach(model, optimizer, loops.make_algorithm(name, 2))
    for step in range(4):
        if zero_first:
            optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        if not (rank == 1 and step == 3):
            optimizer.step()
        if not zero_first:
            optimizer.zero_grad()
    if call == "reweight":
        sync.reweight(1)
    elif call == "averaged":
        with sync.averaged():
            pass
    elif call == "state_dict":
        sync.state_dict()
    else:
        sync.finish()
    rounds = sync.stats().rounds
    sync.finish()
    return rounds, loops.snapshot(model)


@pytest.mark.parametrize("zero_first", [False, True])
@pytest.mark.parametrize("name", ["local", "cocod"])
@pytest.mark.parametrize("call", ["averaged", "state_dict", "finish", "reweight"])
def test_a_skip_is_settled_by_whoever_asks(call: str, name: str, zero_first: bool) -> None:
    (rounds, first), (rounds_too, second) = run_workers(2, skipped_at_the_end, call, name, zero_first, seconds=30)
    assert rounds == rounds_too == 2
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def asked_while_accumulating(rank: int) -> Any:
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    sync = attach(model, optimizer, CoCoDSGD(2))
    for step in range(4):
        optimizer.zero_grad()
        with model.no_sync():
            loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        sync.state_dict()
        with sync.averaged():
            pass
        loops.loss_of(model, *loops.make_batch(rank, step + 9)).backward()
        optimizer.step()
    return sync._driver.clock.attempts, sync.stats().rounds


def test_asking_in_the_middle_of_an_accumulation_counts_nothing() -> None:
    assert run_workers(2, asked_while_accumulating) == [(4, 2)] * 2


def gradients_of_inputs(rank: int) -> Any:
    """Worker 0 looks at input gradients after every step, while the gradients of the step still stand."""
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    sync = attach(model, optimizer, LocalSGD(4))
    for step in range(8):
        x, y = loops.make_batch(rank, step)
        optimizer.zero_grad()
        loops.loss_of(model, x, y).backward()
        optimizer.step()
        if rank == 0:
            x = x.requires_grad_()
            torch.autograd.grad(model(x).sum(), x)
    return sync._driver.clock.attempts, sync.stats().rounds


def test_gradients_of_inputs_are_no_attempts() -> None:
    assert run_workers(2, gradients_of_inputs, seconds=30) == [(8, 2)] * 2


def part_of_the_model(rank: int) -> Any:
    """The optimizer holds the last layer only, so its zero_grad leaves other gradients standing."""
    model = DistributedDataParallel(loops.make_model())
    optimizer = torch.optim.SGD(model.module[2].parameters(), lr=0.1)
    sync = attach(model, optimizer, LocalSGD(2))
    for step in range(6):
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        if not (rank == 1 and step in (1, 2)):
            optimizer.step()
        optimizer.zero_grad()
    return sync._driver.clock.attempts, sync.stats().rounds


def test_skips_are_seen_if_the_optimizer_holds_a_part_of_the_model() -> None:
    assert run_workers(2, part_of_the_model, seconds=30)[0] == (6, 3)


def two_forwards(rank: int) -> Any:
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    sync = attach(model, optimizer, CoCoDSGD(2))
    for step in range(6):
        x, y = loops.make_batch(rank, step)
        first = model(x)
        optimizer.zero_grad()
        nn.functional.mse_loss(first + model(-x), y).backward()
        if not (rank == 1 and step in (1, 2, 3)):
            optimizer.step()
    sync.finish()
    return sync.stats().rounds, loops.snapshot(model)


def test_two_forwards_before_one_backward_survive_a_skip() -> None:
    (rounds, first), (rounds_too, second) = run_workers(2, two_forwards, seconds=30)
    assert rounds == rounds_too == 3
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ------------------------------------------------------------------ what a loop does, the same on all workers


@dataclass
class Loop:
    """One way to take a step; each must give the reference's numbers for the batches it is given."""

    run: Callable[[nn.Module, torch.optim.Optimizer, list[tuple[Tensor, Tensor]]], None]
    num_batches: int = 1


def accumulate(model: Any, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> None:
    optimizer.zero_grad()
    for index, (x, y) in enumerate(batches):
        if index + 1 < len(batches):
            with model.no_sync():
                (loops.loss_of(model, x, y) / len(batches)).backward()
        else:
            (loops.loss_of(model, x, y) / len(batches)).backward()
    optimizer.step()


def accumulate_into_zeros(model: Any, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> None:
    optimizer.zero_grad(set_to_none=False)
    for x, y in batches:
        (loops.loss_of(model, x, y) / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # touches the gradients without changing them
    optimizer.step()


def with_closure(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = loops.loss_of(model, *batches[0])
        loss.backward()
        return loss.item()

    optimizer.step(closure)


def with_scheduler(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # patches optimizer.step
    optimizer.zero_grad()
    loops.loss_of(model, *batches[0]).backward()
    optimizer.step()
    scheduler.step()


def with_evaluation(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss = loops.loss_of(model, *batches[0])
    probe = model(batches[0][0])
    torch.autograd.grad(probe.sum(), [next(iter(model.parameters()))])  # a gradient that is nobody's step
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model(batches[0][0])


LOOPS: dict[str, Loop] = {
    "accumulate with no_sync": Loop(accumulate, num_batches=3),
    "accumulate into zeros": Loop(accumulate_into_zeros, num_batches=2),
    "closure": Loop(with_closure),
    "scheduler": Loop(with_scheduler),
    "evaluation in between": Loop(with_evaluation),
}


def loop_trace(rank: int, name: str, style: str) -> Any:
    loop = LOOPS[style]
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["momentum"](model)
    sync = attach(model, optimizer, loops.make_algorithm(name, 2), weight=WEIGHTS[rank])
    trace = []
    for step in range(7):
        batches = [loops.make_batch(rank, loop.num_batches * step + i) for i in range(loop.num_batches)]
        loop.run(model, optimizer, batches)
        trace.append(loops.snapshot(model))
    return trace, sync.stats().rounds


@pytest.mark.parametrize("name", ["ssgd", "pipe", "local", "cocod"])
def test_every_kind_of_loop_equals_the_reference(name: str) -> None:
    for style, loop in LOOPS.items():
        if name in ("ssgd", "pipe") and style == "accumulate into zeros":
            continue  # every backward communicates there, as in plain DDP: another sum of the same gradients
        results = run_workers(2, loop_trace, name, style)
        batches = [[loops.joined_batch(i, t, loop.num_batches) for t in range(7)] for i in range(2)]
        expected = reference.run(
            name, loops.make_model(), loops.OPTIMIZERS["momentum"], batches, loops.loss_of, WEIGHTS, [2, 2]
        )
        assert_traces_equal([trace for trace, _ in results], expected, f"{name}, {style}")
        assert [rounds for _, rounds in results] == [7 if name in ("ssgd", "pipe") else 3] * 2


class HiddenOutput:
    """An output in which no tensor can be found from outside."""

    def __init__(self, tensor: Tensor) -> None:
        self.slot = [lambda: tensor]


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = loops.make_model()

    def forward(self, x: Tensor) -> HiddenOutput:
        return HiddenOutput(self.inner(x))


def hidden_outputs(rank: int) -> Any:
    model = DistributedDataParallel(Hiding())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    sync = attach(model, optimizer, LocalSGD(2))
    for step in range(6):
        x, y = loops.make_batch(rank, step)
        nn.functional.mse_loss(model(x).slot[0](), y).backward()
        if not (rank == 1 and step in (1, 2)):
            optimizer.step()
        optimizer.zero_grad()
    sync.finish()
    return sync.stats().rounds


def test_skips_are_seen_even_if_the_output_hides_its_tensors() -> None:
    assert run_workers(2, hidden_outputs) == [3, 3]


class Unused(nn.Module):
    """On worker 1 a whole parameter group has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = loops.make_model(), loops.make_model()

    def forward(self, x: Tensor, both: bool) -> Tensor:
        out: Tensor = self.used(x)
        return out + self.unused(x) if both else out


def a_group_without_gradient(rank: int) -> Any:
    model = DistributedDataParallel(Unused(), find_unused_parameters=True)
    groups = [{"params": model.module.used.parameters()}, {"params": model.module.unused.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    sync = attach(model, optimizer, CoCoDSGD(2))
    for step in range(5):
        x, y = loops.make_batch(rank, step)
        optimizer.zero_grad(set_to_none=True)
        nn.functional.mse_loss(model(x, rank == 0), y).backward()
        optimizer.step()
    sync.finish()
    return sync.stats().rounds, loops.snapshot(model)


def test_a_parameter_group_without_gradients_on_one_worker_is_averaged_all_the_same() -> None:
    (rounds, first), (rounds_too, second) = run_workers(2, a_group_without_gradient)
    assert rounds == rounds_too == 2
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    start = loops.snapshot(loops.make_model())
    assert not torch.equal(first[-1], start[-1])
