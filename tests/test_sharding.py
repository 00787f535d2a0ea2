"""Batches, shards and schedules: arithmetic that must hold for any number of workers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cocod_accel.sharding.plan import (
    balanced_batches,
    fixed_shares,
    local_periods,
    plan_workers,
    proportional_batches,
    split_batch,
    steps_in_shards,
)
from cocod_accel.sharding.sampler import skewed_order
from cocod_accel.trainer.schedule import learning_rate, period_in_steps

SPEEDS = st.lists(st.floats(0.01, 100), min_size=1, max_size=1000)


@settings(max_examples=40)
@given(SPEEDS, st.integers(1, 64), st.booleans(), st.integers(0, 5000))
def test_every_sample_has_one_owner_and_steps_are_equal(
    speeds: list[float], base: int, proportional: bool, extra: int
) -> None:
    batches = proportional_batches(base, speeds) if proportional else [base] * len(speeds)
    num_samples = sum(batches) + extra
    plan = plan_workers(speeds, num_samples, base_batch=base, proportional=proportional)
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
    plan = plan_workers(speeds, 8 * sum(steps_a_round) * 100, base_batch=8, period=period)
    assert plan.batches == (8,) * len(speeds)
    assert plan.weights == (1,) * len(speeds)
    assert plan.learning_rate_factor == len(speeds)
    assert len({s / k for s, k in zip(plan.steps, steps_a_round, strict=True)}) == 1
    changed = local_periods(other, speeds)
    steps = steps_in_shards(plan, changed)
    assert len({s / k for s, k in zip(steps, changed, strict=True)}) == 1
    assert all(s * 8 <= shard for s, shard in zip(steps, plan.shards, strict=True))


def test_the_papers_heterogeneous_cluster() -> None:
    plan = plan_workers([1] * 8 + [2] * 8, 50_000, base_batch=32)
    assert plan.batches == plan.weights == (32,) * 8 + (64,) * 8
    assert plan.steps == (65,) * 16
    assert plan.learning_rate_factor == 24
    assert plan_workers([1] * 8 + [2] * 8, 50_000, base_batch=32, proportional=False).learning_rate_factor == 16
    assert local_periods(5, [1, 2]) == [5, 10]


@settings(max_examples=60)
@given(SPEEDS, st.integers(1, 64), st.integers(0, 5000))
def test_a_global_batch_is_kept_to_the_sample_and_nobody_gets_nothing(speeds: list[float], base: int, extra: int) -> None:
    total = len(speeds) + extra
    plan = plan_workers(speeds, total + 7, base_batch=base, global_batch=total)
    assert sum(plan.batches) == total
    assert min(plan.batches) >= 1
    assert plan.learning_rate_factor == total / base
    # Nobody could hand a sample to somebody else and both be done sooner: the slowest end is as early as can be.
    ends = [batch / speed for batch, speed in zip(plan.batches, speeds, strict=True)]
    movable = [end for end, batch in zip(ends, plan.batches, strict=True) if batch > 1]
    if movable and max(movable) == max(ends):
        earliest = min((batch + 1) / speed for batch, speed in zip(plan.batches, speeds, strict=True))
        assert earliest >= max(ends) * (1 - 1e-9)


@settings(max_examples=60)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=4), st.integers(0, 10))
def test_no_other_split_of_a_global_batch_is_done_sooner(speeds: list[float], extra: int) -> None:
    total = len(speeds) + extra

    def splits(rest: int, workers: int) -> Iterator[list[int]]:
        if workers == 1:
            yield [rest]
            return
        for first in range(1, rest - workers + 2):
            yield from ([first, *others] for others in splits(rest - first, workers - 1))

    def end(batches: Sequence[int]) -> float:
        return max(batch / speed for batch, speed in zip(batches, speeds, strict=True))

    assert end(split_batch(total, speeds)) <= min(end(batches) for batches in splits(total, len(speeds))) * (1 + 1e-9)


@settings(max_examples=60)
@given(st.lists(st.floats(0.2, 5), min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 40), st.booleans())
def test_an_epoch_uses_every_sample_once_but_for_a_remainder_that_moves_on(
    speeds: list[float], base: int, extra: int, across: bool
) -> None:
    num_samples = sum(proportional_batches(base, speeds)) + extra
    plan = plan_workers(speeds, num_samples, base_batch=base)
    samplers = [plan.sampler(rank, seed=3, across=across) for rank in range(len(speeds))]
    seen: set[int] = set()
    for epoch in range(num_samples + 1):
        used = [index for sampler in samplers for index in sampler.epoch(epoch).tolist()]
        assert len(used) == len(set(used))
        assert 0 <= num_samples - len(used) < sum(plan.batches)
        seen |= set(used)
    assert seen == set(range(num_samples))


def test_within_shards_samples_stay_and_across_them_they_move() -> None:
    plan = plan_workers([1, 3], 100, base_batch=5)
    within, across = plan.sampler(0), plan.sampler(0, across=True)
    assert set(within.epoch(0).tolist()) == set(within.epoch(1).tolist()) == set(within.shard.tolist())
    assert set(across.epoch(0).tolist()) != set(across.epoch(1).tolist())


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def test_a_sampler_gives_batches_and_counts_epochs() -> None:
    plan = plan_workers([1, 2], 50, base_batch=4)
    sampler = plan.sampler(1, seed=5)
    first, second = list(sampler), list(sampler)
    assert [len(batch) for batch in first] == [8] * len(sampler) == [8] * 4
    assert flat(first) == plan.sampler(1, seed=5).epoch(0).tolist()
    assert flat(second) == plan.sampler(1, seed=5).epoch(1).tolist() != flat(first)
    sampler.set_epoch(0)
    assert next(iter(sampler)) == first[0]
    assert list(sampler) == first, "a look at the first batch is no epoch"
    with pytest.raises(ValueError, match="rank=2 is not one of the 2 workers"):
        plan.sampler(2)


def test_epochs_and_seeds_shuffle_differently() -> None:
    plan = plan_workers([1, 1], 100, base_batch=50)
    sampler = plan.sampler(0)
    assert not torch.equal(sampler.epoch(0), sampler.epoch(1))
    assert torch.equal(sampler.epoch(1), plan.sampler(0).epoch(1))
    assert not torch.equal(sampler.shard, plan.sampler(0, seed=1).shard)
    with pytest.raises(ValueError, match="does not fit"):
        sampler.epoch(0, [2, 1])


@pytest.mark.parametrize("speeds", [[0.0, 1], [-1, 1], [math.nan, 1], [math.inf, 1]])
def test_impossible_speeds_are_refused(speeds: list[float]) -> None:
    for options in ({}, {"proportional": False}, {"global_batch": 8}, {"period": 5}):
        with pytest.raises(ValueError, match=r"speeds\[0\]"):
            plan_workers(speeds, 100, base_batch=4, **options)


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(ValueError, match=r"speeds=\[\] is empty"):
        plan_workers([], 100, base_batch=4)
    with pytest.raises(ValueError, match="base_batch=0 leaves a worker without samples"):
        plan_workers([1, 2], 100, base_batch=0)
    with pytest.raises(ValueError, match="global_batch=2 is less than one sample for each of 3 workers; use 3"):
        plan_workers([1, 1, 1], 100, base_batch=4, global_batch=2)
    with pytest.raises(ValueError, match="global_batch=9 does not split evenly over 2 workers; use a multiple of 2"):
        plan_workers([1, 2], 100, base_batch=4, global_batch=9, period=5)
    with pytest.raises(ValueError, match="over 1,000,000 times the slowest"):
        plan_workers([1, 1e7], 100, base_batch=4)
    with pytest.raises(TypeError, match=r"base_batch=2\.5 is not an int"):
        plan_workers([1, 1], 100, base_batch=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="period=0 must be at least 1"):
        plan_workers([1, 1], 100, base_batch=2, period=0)
    with pytest.raises(ValueError, match="-5 training samples are fewer than"):
        plan_workers([1, 1], -5, base_batch=2)
    with pytest.raises(ValueError, match=r"a round of .* steps does not fit in an epoch"):
        steps_in_shards(plan_workers([1, 2], 100, base_batch=4, period=1), [50, 100])
    with pytest.raises(ValueError, match="63 training samples are fewer than the 64 that 2 worker"):
        plan_workers([1, 1], 63, base_batch=32)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(2, 200), st.floats(1e-3, 10), st.floats(0, 0.9)), min_size=1, max_size=20),
    st.integers(1, 2),
)
def test_balanced_batches_keep_the_sum_and_the_smallest(rows: list[tuple[int, float, float]], smallest: int) -> None:
    batches, seconds, fixed = ([row[i] for row in rows] for i in range(3))
    moved, end = balanced_batches(batches, seconds, fixed, smallest)  # type: ignore[arg-type]
    assert sum(moved) == sum(batches)
    assert min(moved) >= smallest
    ends = [s * (f + (1 - f) * new / m) for s, f, new, m in zip(seconds, fixed, moved, batches, strict=True)]
    assert end == pytest.approx(max(ends))


@pytest.mark.parametrize(("fixed", "a_sample"), [(0.0, 1.0), (10.0, 1.0), (100.0, 0.01)])
def test_moving_batches_settles_whatever_a_step_costs_besides_its_samples(fixed: float, a_sample: float) -> None:
    """A worker 3 times slower, whose step takes 3 * (fixed + a_sample * batch)."""

    def seconds_of(batches: list[int]) -> list[float]:
        return [slow * (fixed + a_sample * m) for slow, m in zip((3, 1), batches, strict=True)]

    batches, shares = [64, 64], [0.0, 0.0]
    before = list(zip(batches, seconds_of(batches), strict=True))
    for _ in range(8):
        seconds = seconds_of(batches)
        shares = fixed_shares(batches, seconds, before, shares)
        before = list(zip(batches, seconds, strict=True))
        moved, expected = balanced_batches(batches, seconds, shares, smallest=4)
        if expected <= 0.95 * max(seconds):
            batches = moved
    best = min(range(4, 125), key=lambda m: max(seconds_of([m, 128 - m])))
    assert max(seconds_of(batches)) <= 1.06 * max(seconds_of([best, 128 - best]))


def test_what_is_fixed_in_a_step_is_learnt_from_two_batches() -> None:
    assert fixed_shares([4], [14.0], [(8, 18.0)], [0.0]) == pytest.approx([10 / 14])
    assert fixed_shares([8], [18.0], [(8, 18.0)], [0.3]) == [0.3], "nothing new"
    assert fixed_shares([4], [40.0], [(8, 18.0)], [0.3]) == [0.0], "less work in more time: another worker now"
    assert fixed_shares([4], [9.0], [(8, 18.0)], [0.3]) == pytest.approx([0.0])


def test_the_learning_rate_warms_up_step_by_step_and_decays() -> None:
    def rate(epoch: float) -> float:
        return learning_rate(epoch, base=0.01, scaled=0.16, warmup_epochs=5, decay_epochs=[80], decay_factor=0.1)

    assert rate(0) == 0.01
    assert rate(2.5) == pytest.approx(0.085)
    assert rate(5) == rate(79.999) == 0.16
    assert rate(80) == rate(119.9) == pytest.approx(0.016)
    assert learning_rate(0, 0.01, 0.16, 0, [], 0.1) == 0.16


def test_the_learning_rate_follows_half_a_cosine() -> None:
    def rate(epoch: float) -> float:
        return learning_rate(epoch, 0.01, 0.16, warmup_epochs=2, decay_epochs=[], decay_factor=0.1, cosine_until=12)

    assert [rate(0), rate(1), rate(2)] == pytest.approx([0.01, 0.085, 0.16])
    assert [rate(7), rate(12)] == pytest.approx([0.08, 0.0])
    assert rate(4.5) == pytest.approx(0.16 * (1 + math.sqrt(0.5)) / 2)


def test_epochs_become_steps() -> None:
    assert period_in_steps([(0, 1), (10, 5)], [97] * 120) == [(0, 1), (970, 5)]
    assert period_in_steps([(0, 1), (2, 5)], [4, 4, 20]) == [(0, 1), (8, 5)]


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.integers(1, 5),
    st.floats(0.01, 100),
    st.integers(0, 3),
)
def test_skewed_shards_use_every_sample_once(shards: list[int], num_classes: int, alpha: float, seed: int) -> None:
    labels = torch.arange(sum(shards)) % num_classes
    order = skewed_order(labels, tuple(shards), alpha, seed)
    assert sorted(order.tolist()) == list(range(sum(shards)))
    assert torch.equal(order, skewed_order(labels.clone(), tuple(shards), alpha, seed)), "the same on every worker"


def share_of_largest_class(alpha: float) -> float:
    labels = torch.arange(10_000) % 10
    shards = skewed_order(labels, (1000,) * 10, alpha, 0).split(1000)
    return sum(torch.bincount(labels[shard], minlength=10).max().item() / 1000 for shard in shards) / len(shards)


def test_a_smaller_alpha_gives_fewer_classes() -> None:
    """With alpha 100 all ten classes are about a tenth; with 0.1 a worker's largest is more than a third."""
    shares = [share_of_largest_class(alpha) for alpha in (100.0, 1.0, 0.1)]
    assert shares[0] < 0.15 < shares[1] < shares[2]
    assert shares[2] > 0.35
