"""No collective of any kind in a local phase: counted in a profiler trace, with all that DDP can add."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import attach
from tests import loops
from tests.workers import run_workers


def profiled() -> Any:
    """One profile for all steps: one that ends while a sum is under way corrupts memory (torch 2.15)."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def started_in(profile: Any, num_steps: int) -> list[int]:
    """How many collectives were started in each step, whoever started them."""
    starts = [event.time_range.start for event in profile.events() if event.name.startswith("c10d:")]
    steps = {event.name: event.time_range for event in profile.events() if event.name.startswith("step ")}
    ranges = [steps[f"step {step}"] for step in range(num_steps)]
    return [sum(span.start <= start <= span.end for start in starts) for span in ranges]


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def steps_with_a_trace(rank: int, name: str, options: dict[str, Any], attached: bool) -> Any:
    model = DistributedDataParallel(make_model(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if attached:
        sync = attach(model, optimizer, loops.make_algorithm(name, 4))
    with profiled() as profile:
        for step in range(8):
            x, y = loops.make_batch(rank, step, dtype=torch.float32)
            with torch.profiler.record_function(f"step {step}"):
                optimizer.zero_grad()
                loops.loss_of(model, x, y).backward()
                optimizer.step()
        if attached:
            sync.finish()
    return started_in(profile, 8)


OPTIONS: dict[str, dict[str, Any]] = {
    "buffers broadcast": {"forward_sync_buffers": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
}


@pytest.mark.parametrize("option", list(OPTIONS))
def test_a_local_phase_has_no_collective(option: str) -> None:
    for name in ("local", "cocod", "asynlocal"):
        for counts in run_workers(2, steps_with_a_trace, name, OPTIONS[option], True):
            assert [count > 0 for count in counts] == [False, False, False, True] * 2, f"{name}: {counts}"


def test_the_count_sees_what_plain_ddp_does() -> None:
    for counts in run_workers(2, steps_with_a_trace, "ssgd", OPTIONS["buffers broadcast"], False):
        assert all(counts), counts


def unequal_steps(rank: int) -> Any:
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attach(model, optimizer, loops.make_algorithm("asynlocal", [2, 5][rank]))
    for step in range(4 * [2, 5][rank]):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step, dtype=torch.float32)).backward()
        optimizer.step()
    sync.finish()
    return sync.stats().rounds, {name: value.clone() for name, value in model.module.state_dict().items()}


def test_workers_may_take_different_numbers_of_steps_a_round() -> None:
    (rounds, first), (rounds_too, second) = run_workers(2, unequal_steps)
    assert rounds == rounds_too == 4
    for name, value in first.items():
        assert torch.equal(value, second[name]) or not value.is_floating_point(), name
