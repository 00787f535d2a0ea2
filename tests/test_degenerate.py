"""Cases in which an algorithm must coincide with something simpler, bit for bit where the arithmetic allows it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import ALGORITHMS, SSGD, CoCoDSGD, LocalSGD, PipeSGD, attach
from tests import loops, reference
from tests.test_exactness import assert_traces_equal
from tests.workers import run_outcomes, run_workers

NUM_STEPS = 11


def plain_training(optimizer_name: str, delay: int = 0) -> list[list[Tensor]]:
    """One worker without this package; ``delay`` steps later gradients if asked for."""
    model = loops.make_model(torch.float32)
    optimizer = loops.OPTIMIZERS[optimizer_name](model)
    queue = [[torch.zeros_like(p) for p in model.parameters()] for _ in range(delay)]
    trace = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_at(model, 0, step).backward()
        queue.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for p, g in zip(model.parameters(), queue.pop(0), strict=True):
            p.grad = g
        optimizer.step()
        trace.append(loops.snapshot(model))
    return trace


def loss_at(model: nn.Module, rank: int, step: int) -> Tensor:
    return loops.loss_of(model, *loops.make_batch(rank, step, dtype=torch.float32))


def attached_alone(rank: int, name: str, optimizer_name: str, wrap: bool) -> list[list[Tensor]]:
    model = loops.make_model(torch.float32)
    if wrap:
        model = DistributedDataParallel(model)
    optimizer = loops.OPTIMIZERS[optimizer_name](model)
    sync = attach(model, optimizer, loops.make_algorithm(name, 3), weight=17)
    trace = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_at(model, 0, step).backward()
        optimizer.step()
        trace.append(loops.snapshot(model))
        if step == 6:
            with sync.averaged():
                pass
    if name != "pipe":
        sync.finish()
        assert_bitwise([loops.snapshot(model)], [trace[-1]])
    sync.detach()
    return trace


def assert_bitwise(got: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    assert len(got) == len(expected)
    for step, (row, wanted) in enumerate(zip(got, expected, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(row, wanted, strict=True)), f"differs after step {step + 1}"


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_bare_module_alone_is_plain_training_bit_for_bit(name: str, optimizer: str) -> None:
    expected = plain_training(optimizer, delay=1 if name == "pipe" else 0)
    assert_bitwise(attached_alone(0, name, optimizer, wrap=False), expected)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_ddp_alone_is_plain_training_bit_for_bit(name: str) -> None:
    expected = plain_training("momentum", delay=1 if name == "pipe" else 0)
    assert_bitwise(run_workers(1, attached_alone, name, "momentum", True)[0], expected)


def test_local_sgd_of_period_one_without_momentum_is_ssgd() -> None:
    rows = [("sgd", [3.0, 1.0], [1, 1], [9, 9])]
    local, ssgd = ([worker[0] for worker in run_workers(2, train_rows, name, rows)] for name in ("local", "ssgd"))
    assert_traces_equal(local, ssgd, "LocalSGD(1) against SSGD")


def train_rows(rank: int, name: str, rows: list[Any]) -> list[Any]:
    return [loops.train(rank, name, *row) for row in rows]


@pytest.mark.parametrize("name", ["ssgd", "pipe", "local", "cocod"])
def test_equal_weights_are_no_weights_bit_for_bit(name: str) -> None:
    rows = [("momentum", [weight] * 3, [2] * 3, [7] * 3) for weight in (1.0, 37.0)]
    for unweighted, weighted in run_workers(3, train_rows, name, rows):
        assert_bitwise(weighted, unweighted)


def ssgd_and_ddp(rank: int) -> tuple[Any, Any]:
    traces = []
    for attached in (True, False):
        model = DistributedDataParallel(loops.make_model(torch.float32))
        optimizer = loops.OPTIMIZERS["momentum"](model)
        if attached:
            attach(model, optimizer, SSGD(), weight=5)
        trace = []
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            loss_at(model, rank, step).backward()
            optimizer.step()
            trace.append(loops.snapshot(model))
        traces.append(trace)
    return traces[0], traces[1]


def test_ssgd_with_equal_weights_is_plain_ddp_bit_for_bit() -> None:
    for ours, stock in run_workers(3, ssgd_and_ddp):
        assert_bitwise(ours, stock)


def ssgd_three_to_one(rank: int) -> Any:
    sizes = [6, 2]
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["momentum"](model)
    attach(model, optimizer, SSGD(), weight=sizes[rank])
    trace = []
    for step in range(8):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step, size=sizes[rank])).backward()
        optimizer.step()
        trace.append(loops.snapshot(model))
    return trace


def test_ssgd_with_weights_three_to_one_is_one_process_on_the_whole_batch() -> None:
    model = loops.make_model()
    optimizer = loops.OPTIMIZERS["momentum"](model)
    expected = []
    for step in range(8):
        parts = [loops.make_batch(0, step, size=6), loops.make_batch(1, step, size=2)]
        optimizer.zero_grad()
        loops.loss_of(model, *(torch.cat(column) for column in zip(*parts, strict=True))).backward()
        optimizer.step()
        expected.append(loops.snapshot(model))
    assert_traces_equal(run_workers(2, ssgd_three_to_one), [expected, expected], "3:1")


def pipe_with_small_buckets(rank: int) -> Any:
    torch.manual_seed(1)
    model = DistributedDataParallel(
        nn.Sequential(*[nn.Linear(6, 6) for _ in range(5)], nn.Linear(6, 3)).double(), bucket_cap_mb=0.0001
    )
    start = copy.deepcopy(model.module)
    layouts: list[tuple[int, ...]] = []
    sync = attach(model, optimizer := loops.OPTIMIZERS["momentum"](model), PipeSGD(), weight=[2.0, 3.0][rank])
    complete = sync._driver.method.complete

    def spy(buckets: Any) -> None:
        layouts.append(tuple(len(bucket.parameters) for bucket in buckets))
        complete(buckets)

    sync._driver.method.complete = spy  # type: ignore[method-assign]
    trace = []
    for step in range(6):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
        trace.append(loops.snapshot(model))
    return start, layouts, trace


def test_pipe_sgd_survives_ddp_rebuilding_its_buckets() -> None:
    results = run_workers(2, pipe_with_small_buckets)
    start, layouts, _ = results[0]
    assert len(set(layouts)) > 1, f"the buckets were not rebuilt: {layouts}"
    batches = [[loops.make_batch(i, t) for t in range(6)] for i in range(2)]
    expected = reference.run("pipe", start, loops.OPTIMIZERS["momentum"], batches, loops.loss_of, [2, 3], [1, 1])
    assert_traces_equal([trace for _, _, trace in results], expected, "pipe with small buckets")


def cocod_with_gradients(rank: int) -> Any:
    weights = [3.0, 1.0, 2.0]
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    attach(model, optimizer, CoCoDSGD(period=3), weight=weights[rank])
    rows = []
    for step in range(10):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        gradient = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        rows.append((gradient, loops.snapshot(model)))
    return rows


def test_the_weighted_mean_of_the_workers_follows_the_averaged_recursion() -> None:
    """mean_{t+1} = mean_t - lr * sum_i w_i G_t^i at every step, round ends included (the paper's equation)."""
    results = run_workers(3, cocod_with_gradients)
    w = reference.shares([3, 1, 2])
    mean = loops.snapshot(loops.make_model())
    for step in range(10):
        for index in range(len(mean)):
            direction = sum(w[i] * results[i][step][0][index] for i in range(3))
            mean[index] = mean[index] - 0.1 * direction
            actual = sum(w[i] * results[i][step][1][index] for i in range(3))
            assert torch.allclose(actual, mean[index], rtol=1e-12, atol=1e-14), f"step {step + 1}"


def different_starts(rank: int, name: str) -> Any:
    model = DistributedDataParallel(loops.make_model())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    algorithm: Any = {"cocod": CoCoDSGD(2), "local": LocalSGD(2), "ssgd": SSGD(), "pipe": PipeSGD()}[name]
    sync = attach(model, optimizer, algorithm, weight=1 + rank)
    first = next(iter(model.parameters()))
    values = [first[0, 0].item()]
    for step in range(2):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
        values.append(first[0, 0].item())
    return values, sync.stats()


@pytest.mark.parametrize(("name", "when"), [("cocod", 2), ("local", 2), ("ssgd", 0), ("pipe", 0)])
def test_workers_that_start_apart_are_brought_to_the_mean(name: str, when: int) -> None:
    results = run_workers(2, different_starts, name)
    x = next(iter(loops.make_model().parameters()))[0, 0].item()
    mean = x + 2 / 3
    for rank, (values, stats) in enumerate(results):
        assert values[when:] == pytest.approx([mean] * (3 - when), rel=1e-12)
        assert values[:when] == pytest.approx([x + rank] * when, rel=1e-12)
        assert stats.bytes > 0


def first_round_bytes(rank: int) -> Any:
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["sgd"](model)
    sync = attach(model, optimizer, CoCoDSGD(period=2))
    rows = []
    for step in range(7):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
        rows.append(sync.stats())
    return rows


def test_equal_starts_need_no_communication_in_the_first_round() -> None:
    payload = sum(p.numel() * 8 for p in loops.make_model().parameters())
    for rows in run_workers(2, first_round_bytes):
        # Sent at steps 2, 4, 6; counted when merged, one round later. Two workers send one payload each.
        assert [row.bytes for row in rows] == [0, 0, 0, payload, payload, 2 * payload, 2 * payload]
        assert [row.rounds for row in rows] == [0, 1, 1, 2, 2, 3, 3]
        assert rows[2].drift == 0
        assert rows[4].drift > 0


def pipe_gradients(rank: int, wrap: bool) -> Any:
    """What stands in .grad after every backward when the gradients are 1, 2, 3, ..."""
    model: Any = nn.Linear(1, 1, bias=False)
    if wrap:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attach(model, optimizer, PipeSGD())
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        model(torch.tensor([[step + 1.0]])).sum().backward()
        seen.append(next(iter(model.parameters())).grad.item())
        optimizer.step()
    return seen


def test_pipe_has_the_delayed_gradient_in_place_when_backward_returns() -> None:
    assert pipe_gradients(0, wrap=False) == [0, 1, 2, 3]
    assert run_workers(2, pipe_gradients, True) == [[0, 1, 2, 3]] * 2


def test_pipe_on_a_bare_module_accumulates() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attach(model, optimizer, PipeSGD())
    seen = []
    for _ in range(4):
        optimizer.zero_grad()
        for micro_gradient in (1.0, 10.0):
            model(torch.tensor([[micro_gradient]])).sum().backward()
        assert model.weight.grad is not None
        seen.append(model.weight.grad.item())
        optimizer.step()
    assert seen == [0, 11, 11, 11]


def pipe_accumulating(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attach(model, optimizer, PipeSGD())
    for _ in range(3):
        optimizer.zero_grad()
        for micro_gradient in (1.0, 10.0):
            model(torch.tensor([[micro_gradient]])).sum().backward()
        optimizer.step()


def test_pipe_refuses_to_add_to_a_delayed_gradient() -> None:
    for outcome in run_outcomes(2, pipe_accumulating, seconds=30):
        assert outcome.error is not None
        assert "run all but the last backward under model.no_sync()" in outcome.error[1]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        out: Tensor = self.heads[which](x)
        return out


def pipe_with_unused(rank: int, set_to_none: bool) -> Any:
    model = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attach(model, optimizer, PipeSGD())
    seen = []
    for step in range(5):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(torch.tensor([[step + 1.0]]), step % 2).sum().backward()
        seen.append([0.0 if p.grad is None else p.grad.item() for p in model.parameters()])
        optimizer.step()
    return seen


@pytest.mark.parametrize("set_to_none", [True, False])
def test_pipe_does_not_lose_the_gradient_of_a_parameter_that_the_next_step_does_not_use(set_to_none: bool) -> None:
    expected = [[0, 0], [1, 0], [0, 2], [3, 0], [0, 4]]
    assert run_workers(2, pipe_with_unused, set_to_none) == [expected] * 2
