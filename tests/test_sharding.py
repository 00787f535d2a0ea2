"""Batches, shards and schedules: arithmetic that must hold for any number of workers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cocod_accel.schedule import learning_rate, period_in_steps
from cocod_accel.sharding import ShardSampler, local_periods, plan_workers, proportional_batches, steps_in_shards

SPEEDS = st.lists(st.floats(0.01, 100), min_size=1, max_size=1000)


@settings(max_examples=40)
@given(SPEEDS, st.integers(1, 64), st.booleans(), st.integers(0, 5000))
def test_every_sample_has_one_owner_and_steps_are_equal(
    speeds: list[float], base: int, proportional: bool, extra: int
) -> None:
    batches = proportional_batches(base, speeds) if proportional else [base] * len(speeds)
    num_samples = sum(batches) + extra
    plan = plan_workers(num_samples, base, speeds, proportional=proportional)
    assert list(plan.batches) == batches
    assert min(plan.batches) >= base
    assert sum(plan.shards) == num_samples
    assert set(plan.steps) == {num_samples // sum(batches)}
    for shard, batch, steps in zip(plan.shards, plan.batches, plan.steps, strict=True):
        assert shard >= steps * batch
    assert num_samples - sum(b * s for b, s in zip(plan.batches, plan.steps, strict=True)) < sum(batches)
    assert plan.learning_rate_factor == pytest.approx(sum(batches) / base)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(1, 9), st.integers(1, 9))
def test_workers_with_their_own_periods_end_an_epoch_after_the_same_round(
    speeds: list[float], period: int, other: int
) -> None:
    steps_a_round = local_periods(period, speeds)
    plan = plan_workers(8 * sum(steps_a_round) * 100, 8, speeds, period=period)
    assert len({s / k for s, k in zip(plan.steps, steps_a_round, strict=True)}) == 1
    changed = local_periods(other, speeds)
    steps = steps_in_shards(plan, changed)
    assert len({s / k for s, k in zip(steps, changed, strict=True)}) == 1
    assert all(s * 8 <= shard for s, shard in zip(steps, plan.shards, strict=True))


def test_the_papers_heterogeneous_cluster() -> None:
    plan = plan_workers(50_000, 32, [1] * 8 + [2] * 8, proportional=True)
    assert plan.batches == (32,) * 8 + (64,) * 8
    assert plan.steps == (65,) * 16
    assert plan.learning_rate_factor == 24
    assert plan_workers(50_000, 32, [1] * 8 + [2] * 8).learning_rate_factor == 16
    assert local_periods(5, [1, 2]) == [5, 10]


@given(st.integers(2, 60), st.integers(1, 4), st.integers(0, 3))
def test_samplers_share_an_epoch_and_leave_nobody_out_for_ever(num_samples: int, num_workers: int, seed: int) -> None:
    if num_samples < num_workers:
        return
    plan = plan_workers(num_samples, 1, [1.0] * num_workers)
    samplers = [ShardSampler(num_samples, plan.shards, rank, seed) for rank in range(num_workers)]
    assert sorted(index for sampler in samplers for index in sampler.shard.tolist()) == list(range(num_samples))
    for sampler, shard, steps in zip(samplers, plan.shards, plan.steps, strict=True):
        left_out = shard - steps
        epochs = 1 if left_out == 0 else math.ceil(shard / left_out) + 1
        seen: set[int] = set()
        for epoch in range(epochs):
            used = sampler.epoch(epoch, steps).tolist()
            assert len(set(used)) == steps
            assert set(used) <= set(sampler.shard.tolist())
            seen |= set(used)
        assert len(seen) == shard


def test_epochs_and_seeds_shuffle_differently() -> None:
    sampler = ShardSampler(100, [50, 50], 0, seed=0)
    assert not torch.equal(sampler.epoch(0, 50), sampler.epoch(1, 50))
    assert torch.equal(sampler.epoch(1, 50), ShardSampler(100, [50, 50], 0, seed=0).epoch(1, 50))
    assert not torch.equal(sampler.shard, ShardSampler(100, [50, 50], 0, seed=1).shard)
    with pytest.raises(ValueError, match="does not fit"):
        sampler.epoch(0, 51)


@pytest.mark.parametrize("speeds", [[0.0, 1], [-1, 1], [math.nan, 1], [math.inf, 1]])
def test_impossible_speeds_are_refused(speeds: list[float]) -> None:
    with pytest.raises(ValueError, match=r"speeds\[0\]"):
        plan_workers(100, 4, speeds, proportional=True)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="63 training samples are fewer than the 64 that 2 worker"):
        plan_workers(63, 32, [1, 1])


def test_the_learning_rate_warms_up_step_by_step_and_decays() -> None:
    def rate(epoch: float) -> float:
        return learning_rate(epoch, base=0.01, scaled=0.16, warmup_epochs=5, decay_epochs=[80], decay_factor=0.1)

    assert rate(0) == 0.01
    assert rate(2.5) == pytest.approx(0.085)
    assert rate(5) == rate(79.999) == 0.16
    assert rate(80) == rate(119.9) == pytest.approx(0.016)
    assert learning_rate(0, 0.01, 0.16, 0, [], 0.1) == 0.16


def test_epochs_become_steps() -> None:
    assert period_in_steps([(0, 1), (10, 5)], [97] * 120) == [(0, 1), (970, 5)]
    assert period_in_steps([(0, 1), (2, 5)], [4, 4, 20]) == [(0, 1), (8, 5)]
