"""Section 4 of the paper: values worked by hand, limits, and statements that must follow from each other."""

from __future__ import annotations

import ast
import doctest
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cocod_accel import ALGORITHMS, theory
from cocod_accel.sharding.plan import plan_workers
from cocod_accel.theory import (
    PAPER_CONSTANT,
    PAPER_ITERATIONS,
    Failures,
    Problem,
    StepTimes,
    cocod_bounded_step_seconds,
    cocod_speedup,
    cocod_step_seconds,
    communication_complexity,
    communication_rounds,
    corollary1_condition,
    corollary1_learning_rate,
    corollary1_rate,
    hiding_period,
    iteration_speedup,
    iterations_to_reach,
    local_speedup,
    paper_period_bound,
    period_bound,
    pipe_bounded_step_seconds,
    pipe_speedup,
    pipe_step_seconds,
    scaled_learning_rate,
    speedups,
    ssgd_speedup,
    step_seconds,
    theorem1_bound,
    theorem1_factors,
    theorem1_gradient_bound,
)

PROBLEM = Problem(lipschitz=1.0, sigma=2.0, zeta=0.5, initial_gap=3.0)
BATCHES = [32] * 16  # sum M = 512
PERIODS = st.integers(1, 30)
SIZES = st.lists(st.integers(1, 128), min_size=1, max_size=8)
PROBLEMS = st.builds(
    Problem,
    lipschitz=st.floats(0.01, 10),
    sigma=st.floats(0.1, 10),
    zeta=st.just(0.0) | st.floats(0.01, 2),
    initial_gap=st.just(0.0) | st.floats(0.01, 100),
)
TIMES = st.builds(
    StepTimes,
    compute_seconds=st.floats(1e-3, 10),
    comm_seconds=st.just(0.0) | st.floats(1e-3, 100),
    interference=st.floats(0, 1),
)


def test_theorem1_by_hand() -> None:
    # 16 gamma^2 k^2 L^2 = 16 * 1e-4 * 25 = 0.04; D_2 = 8 * 1e-4 * 5 / 0.96 = 1 / 240; D_1 = 1 - 10 / 240 = 23 / 24.
    assert theorem1_factors(1.0, 0.01, 5) == pytest.approx((23 / 24, 1 / 240))
    # 2 * 3 / (1000 * 0.01) = 0.6; N sigma^2 / sum M + 2 k zeta^2 = 64 / 512 + 2.5 = 2.625; 0.01 * 4 / 512 = 0.000078125.
    bound = theorem1_bound(PROBLEM, learning_rate=0.01, period=5, num_iterations=1000, batches=BATCHES)
    assert bound == pytest.approx(0.6 + 2.625 / 240 + 0.000078125)
    whole = theorem1_gradient_bound(PROBLEM, learning_rate=0.01, period=5, num_iterations=1000, batches=BATCHES)
    assert whole == pytest.approx(bound * 24 / 23)
    # L counts: with twice the L and half the rate the factors are the same.
    assert theorem1_factors(2.0, 0.005, 5) == pytest.approx((23 / 24, 1 / 240))
    # Batches of different size count by their sum: 96 samples on two workers, N sigma^2 / sum M = 8 / 96.
    mixed = theorem1_bound(PROBLEM, learning_rate=0.01, period=5, num_iterations=1000, batches=[32, 64])
    assert mixed == pytest.approx(0.6 + (8 / 96 + 2.5) / 240 + 0.04 / 96)


@pytest.mark.parametrize(
    ("rate", "period", "named"),
    [
        (0.6, 1, "learning_rate=0.6 is above 1 / L = 0.5, Theorem 1's condition"),
        (0.125, 1, "16 gamma^2 k^2 L^2 = 1 must be below 1"),  # 16 / 64 * 4
        (0.1, 1, "D_1 = -0.777778 must be positive"),  # 0.64 / 0.36 = 16 / 9
        (0.025, 5, "16 gamma^2 k^2 L^2 = 1 must be below 1"),
    ],
)
def test_where_theorem1_says_nothing(rate: float, period: int, named: str) -> None:
    nearest = 1 / (math.sqrt(32) * period * 2)
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        theorem1_factors(2.0, rate, period)
    assert str(error.value).endswith(f"use a learning rate below 1 / (sqrt(32) k L) = {nearest:.6g}")
    assert "\n" not in str(error.value)
    d1, d2 = theorem1_factors(2.0, nearest * 0.999, period)
    assert 0 < d1 < 0.01
    assert d2 > 0


@given(st.floats(0.01, 10), st.floats(1e-4, 1), PERIODS)
def test_d1_is_positive_just_below_one_over_root_32(lipschitz: float, rate: float, period: int) -> None:
    product = 32 * (rate * period * lipschitz) ** 2
    assume(abs(product - 1) > 1e-9)
    if product < 1:
        d1, d2 = theorem1_factors(lipschitz, rate, period)
        assert 0 < d1 < 1
        assert d2 > 0
    else:
        with pytest.raises(ValueError, match="use a learning rate below"):
            theorem1_factors(lipschitz, rate, period)


def test_corollary1_by_hand() -> None:
    # T = 512 * 10,100^2, so sqrt(T / sum M) = 10,100 and sqrt(T sum M) = 512 * 10,100.
    num_iterations = 512 * 10_100**2
    assert corollary1_learning_rate(2.0, num_iterations, BATCHES) == pytest.approx(1 / 20_200)
    condition = corollary1_condition(PROBLEM, period=5, batches=BATCHES)
    assert condition.for_learning_rate == pytest.approx(128)  # 512 / 4
    assert condition.for_d1 == pytest.approx(153_600)  # 48 * 512 * 25 / 4
    # 144 * 512^3 / 64 * 25 * 2.625^2 = 7,549,747,200 * 6.890625
    assert condition.for_d2 == pytest.approx(52_022_476_800)
    assert condition.least == 52_022_476_800
    assert replace(condition, for_d1=6e10).least == 60_000_000_000
    assert replace(condition, for_learning_rate=7e10 + 0.5).least == 70_000_000_001
    # 4 * 2 * (3 + 1) / (512 * 10,100)
    assert corollary1_rate(PROBLEM, period=5, num_iterations=num_iterations, batches=BATCHES) == pytest.approx(1 / 161_600)
    with pytest.raises(ValueError, match=r"num_iterations=52022476799 is fewer .* use at least 52022476800, or a shorter"):
        corollary1_rate(PROBLEM, period=5, num_iterations=condition.least - 1, batches=BATCHES)
    assert corollary1_rate(PROBLEM, period=4, num_iterations=condition.least - 1, batches=BATCHES) > 0


@given(PROBLEMS, PERIODS, SIZES, st.sampled_from([1, 2, 100]))
def test_corollary1_follows_from_theorem1(problem: Problem, period: int, batches: list[int], times: int) -> None:
    condition = corollary1_condition(problem, period=period, batches=batches)
    num_iterations = condition.least * times
    assume(num_iterations <= 10**15)
    rate = corollary1_learning_rate(problem.sigma, num_iterations, batches)
    assert rate <= 1 / problem.lipschitz * (1 + 1e-9)
    d1, d2 = theorem1_factors(problem.lipschitz, rate, period)
    assert d1 >= 0.5 - 1e-9
    spread = len(batches) * problem.sigma**2 / sum(batches) + 2 * period * problem.zeta**2
    assert d2 * spread <= problem.sigma * problem.lipschitz / math.sqrt(num_iterations * sum(batches)) * (1 + 1e-9)
    bound = theorem1_gradient_bound(
        problem, learning_rate=rate, period=period, num_iterations=num_iterations, batches=batches
    )
    assert bound <= corollary1_rate(problem, period=period, num_iterations=num_iterations, batches=batches) * (1 + 1e-9)


@given(PROBLEMS, PERIODS, SIZES)
def test_each_term_of_the_condition_is_just_enough(problem: Problem, period: int, batches: list[int]) -> None:
    """Solved for the inequality that it ensures in the paper's proof, each term is where that becomes an equality."""
    total, smooth = sum(batches), problem.lipschitz
    condition = corollary1_condition(problem, period=period, batches=batches)

    def rate_at(num_iterations: float) -> float:
        return math.sqrt(total / num_iterations) / problem.sigma

    assert rate_at(condition.for_learning_rate) == pytest.approx(1 / smooth)
    assert 16 * (rate_at(condition.for_d1) * smooth * period) ** 2 == pytest.approx(1 / 3)
    spread = len(batches) * problem.sigma**2 / total + 2 * period * problem.zeta**2
    at_most = problem.sigma * smooth / math.sqrt(condition.for_d2 * total)
    assert 12 * (rate_at(condition.for_d2) * smooth) ** 2 * period * spread == pytest.approx(at_most)
    assert condition.for_d1 == pytest.approx(48 * period**2 * condition.for_learning_rate)
    assert condition.for_d2 >= 3 * len(batches) ** 2 * condition.for_d1 * (1 - 1e-9)


def test_more_samples_a_step_need_fewer_steps_in_proportion() -> None:
    # (4 * 2 * (3 + 1) / epsilon)^2 / 32 = 32 / epsilon^2 for one worker
    assert iterations_to_reach(PROBLEM, 2e-6, period=1, batches=[32]) == 8_000_000_000_000
    for num_workers in (2, 16):
        found = iterations_to_reach(PROBLEM, 2e-6, period=1, batches=[32] * num_workers)
        assert found == pytest.approx(8e12 / num_workers)
        assert iteration_speedup([1.0] * num_workers) == num_workers  # Remark 1
    mixed = iterations_to_reach(PROBLEM, 2e-6, period=1, batches=[32] * 8 + [64] * 8)
    assert mixed == pytest.approx(8e12 / iteration_speedup([1] * 8 + [2] * 8))  # Remark 2
    # Until the condition asks for more: an accuracy that is easily reached takes as many steps as the condition has.
    assert iterations_to_reach(PROBLEM, 1.0, period=5, batches=BATCHES) == 52_022_476_800


@given(PROBLEMS, st.floats(1e-4, 1), PERIODS, SIZES)
def test_the_steps_to_reach_an_accuracy_are_the_fewest(
    problem: Problem, epsilon: float, period: int, batches: list[int]
) -> None:
    found = iterations_to_reach(problem, epsilon, period=period, batches=batches)
    assume(found <= 10**15)
    assert corollary1_rate(problem, period=period, num_iterations=found, batches=batches) <= epsilon * (1 + 1e-9)
    if found > corollary1_condition(problem, period=period, batches=batches).least:
        fewer = found - max(1, found // 10**6)
        assert 4 * problem.sigma * (problem.initial_gap + problem.lipschitz) / math.sqrt(fewer * sum(batches)) > epsilon


@given(st.floats(0.1, 10), st.integers(1, 64), st.lists(st.integers(1, 5), min_size=1, max_size=9), st.integers(1, 50))
def test_remark4_is_corollary1_with_the_samples_fixed(sigma: float, base: int, speeds: list[int], steps: int) -> None:
    slowest = min(speeds)
    batches = [base * speed for speed in speeds]
    num_iterations = steps * slowest
    alone = steps * sum(speeds)  # as many samples: base * slowest * alone == sum(batches) * num_iterations
    expected = scaled_learning_rate(corollary1_learning_rate(sigma, alone, [base * slowest]), speeds)
    assert corollary1_learning_rate(sigma, num_iterations, batches) == pytest.approx(expected)


def test_learning_rates_of_the_paper() -> None:
    assert scaled_learning_rate(0.01, [1.0] * 16) == pytest.approx(0.16)
    assert scaled_learning_rate(0.01, [1] * 8 + [2] * 8) == pytest.approx(0.24)
    for speeds in ([1.0] * 16, [2.0] * 8 + [1.0] * 8, [3.0, 1.0]):
        assert plan_workers(speeds, 50_000, base_batch=32).learning_rate_factor == pytest.approx(iteration_speedup(speeds))


def test_period_bound_by_hand() -> None:
    assert period_bound(10_000, 16, 1.0) == pytest.approx(10 / 8)
    assert period_bound(10_000, 16, 4.0) == pytest.approx(5)
    assert period_bound(10_000, 1, 1.0) == pytest.approx(10)
    # 50,000 images over 16 workers with 32 each: 97 whole steps an epoch, 120 epochs.
    assert PAPER_ITERATIONS == 97 * 120 == 120 * plan_workers([1.0] * 16, 50_000, base_batch=32).steps[0]
    assert pytest.approx(5 * 8 / 11_640**0.25) == PAPER_CONSTANT
    assert paper_period_bound(11_640, 16) == pytest.approx(5)
    assert paper_period_bound(11_640 * 81, 16) == pytest.approx(15)
    assert paper_period_bound(11_640, 256) == pytest.approx(5 / 8)
    assert paper_period_bound(11_640 // 4, 64) == pytest.approx(5 / 4)  # as many epochs on four times the workers


@given(st.floats(0.01, 2), st.integers(1, 5), st.integers(1, 16), st.sampled_from([2, 3]))
def test_the_period_bound_follows_from_the_condition(zeta: float, period: int, num_workers: int, factor: int) -> None:
    """What the condition asks for grows with N^3 and at most with k^4: with k as long as the bound, no faster than T."""
    problem = Problem(lipschitz=1.0, sigma=1.0, zeta=zeta, initial_gap=1.0)

    def needed(k: int, n: int, of: Problem = problem) -> float:
        return corollary1_condition(of, period=k, batches=[8] * n).for_d2

    bound = period_bound(1000, num_workers, 1.0)
    assert period_bound(1000 * factor**4, num_workers, 1.0) == pytest.approx(factor * bound)
    assert needed(factor * period, num_workers) <= factor**4 * needed(period, num_workers) * (1 + 1e-9)
    assert period_bound(1000 * factor**3, factor * num_workers, 1.0) == pytest.approx(bound)
    assert needed(period, factor * num_workers) == pytest.approx(factor**3 * needed(period, num_workers))
    # Exactly k^4 where data differ so much that nothing else counts; k^2 where they do not differ.
    for other, power in ((1e5, 4), (0.0, 2)):
        of = replace(problem, zeta=other)
        growth = needed(factor * period, num_workers, of) / needed(period, num_workers, of)
        assert growth == pytest.approx(factor**power, rel=1e-6)


def test_communication_by_hand() -> None:
    assert communication_rounds(11_640, 5) == {
        "ssgd": 11_640, "pipe": 11_640, "local": 2_328, "cocod": 2_328, "asynlocal": 2_328,
    }  # fmt: skip
    assert communication_rounds(7, 3)["cocod"] == 3  # the last round is short
    assert communication_rounds(7, 9)["local"] == 1
    assert set(communication_rounds(7, 1).values()) == {7}
    assert communication_complexity(10_000, 16, 1.0) == pytest.approx(1000 * 8)  # T^(3/4) N^(3/4)
    assert communication_complexity(10_000, 16, 4.0) == pytest.approx(2000)


def test_time_speedups_by_hand() -> None:
    times = StepTimes(compute_seconds=0.1, comm_seconds=0.15, interference=0.2)
    assert ssgd_speedup(times, 16) == pytest.approx(16 * 0.1 / 0.25)
    assert pipe_speedup(times, 16) == pytest.approx(16 * 0.1 / 0.13)
    assert local_speedup(times, 16, 5) == pytest.approx(16 * 0.1 / 0.13)
    assert cocod_speedup(times, 16, 5) == pytest.approx(16 * 0.1 / 0.106)
    # 0.15 s do not fit behind one step of 0.1 s that is slowed to 0.13 s, but behind five.
    assert pipe_bounded_step_seconds(times) == pytest.approx(0.15)
    assert cocod_bounded_step_seconds(times, 5) == pytest.approx(0.106)
    assert hiding_period(times) == 2  # 0.8 * 1.5 = 1.2
    assert hiding_period(replace(times, interference=1.0)) == 1
    assert hiding_period(StepTimes(0.7, 2.1, 0.0)) == 3  # 2.1 / 0.7 > 3 in floating point


@given(st.floats(1e-3, 10), st.floats(0, 1), PERIODS, st.integers(1, 1024))
def test_limits(compute: float, share: float, period: int, num_workers: int) -> None:
    free = StepTimes(compute, 0.0, share)
    alike, five = [1.0] * num_workers, [num_workers] * 5
    for bounded in (True, False):
        assert list(speedups(free, alike, period, bounded=bounded).values()) == pytest.approx(five)
        costly = StepTimes(compute, 3.0, share)
        far = speedups(costly, alike, 10**12, bounded=bounded)  # k -> infinity
        assert [far["local"], far["cocod"]] == pytest.approx([num_workers] * 2)
        nearly_free = speedups(StepTimes(compute, 1e-9 * compute, share), alike, period, bounded=bounded)
        assert list(nearly_free.values()) == pytest.approx(five)
        blocking = step_seconds(StepTimes(compute, 3.0, 1.0), 1, bounded=bounded)  # k = 1, a = 1
        assert list(blocking.values()) == pytest.approx([compute + 3.0] * 5)
    unhindered = StepTimes(compute, 3.0, 0.0)  # a = 0
    assert (
        cocod_speedup(unhindered, num_workers, period) == pipe_speedup(unhindered, num_workers) == pytest.approx(num_workers)
    )
    assert cocod_bounded_step_seconds(unhindered, period) == pytest.approx(max(3.0 / period, compute))


@given(TIMES, PERIODS)
def test_a_round_told_step_by_step(times: StepTimes, period: int) -> None:
    left = period * times.compute_seconds
    done_under_way = (1 - times.interference) * times.comm_seconds
    expected = times.comm_seconds if done_under_way >= left else times.comm_seconds + (left - done_under_way)
    assert cocod_bounded_step_seconds(times, period) * period == pytest.approx(expected)
    if times.comm_seconds <= period * times.compute_seconds + times.interference * times.comm_seconds:
        assert cocod_bounded_step_seconds(times, period) == pytest.approx(cocod_step_seconds(times, period))
    else:
        assert cocod_bounded_step_seconds(times, period) > cocod_step_seconds(times, period)
    assert pipe_bounded_step_seconds(times) == cocod_bounded_step_seconds(times, 1)
    assert pipe_step_seconds(times) == cocod_step_seconds(times, 1)


@given(TIMES)
def test_the_hiding_period_is_the_smallest(times: StepTimes) -> None:
    smallest = hiding_period(times)
    assert cocod_bounded_step_seconds(times, smallest) == pytest.approx(cocod_step_seconds(times, smallest))
    if smallest > 1:
        assert cocod_bounded_step_seconds(times, smallest - 1) > cocod_step_seconds(times, smallest - 1)


@given(TIMES, PERIODS, st.integers(1, 64), st.booleans())
def test_more_of_what_costs_never_helps_and_cocod_is_best(
    times: StepTimes, period: int, num_workers: int, bounded: bool
) -> None:
    def found(of: StepTimes, k: int = period) -> dict[str, float]:
        return speedups(of, [1.0] * num_workers, k, bounded=bounded)

    now = found(times)
    slack = 1 + 1e-12
    slower_link = found(replace(times, comm_seconds=times.comm_seconds * 1.5 + 0.01))
    more_hindered = found(replace(times, interference=min(1.0, times.interference + 0.1)))
    longer = found(times, period + 1)
    for name, value in now.items():
        assert slower_link[name] <= value * slack
        assert more_hindered[name] <= value * slack
        assert longer[name] >= value / slack
        assert value <= now["cocod"] * slack
        assert now["ssgd"] <= value * slack
        assert value <= num_workers * slack


def test_speedups_have_every_algorithm_and_mixed_workers() -> None:
    times = StepTimes(compute_seconds=0.1, comm_seconds=0.3, interference=0.2)
    for by_name in (step_seconds(times, 2), speedups(times, [1.0], 2), communication_rounds(9, 2)):
        assert set(by_name) <= set(ALGORITHMS)
        assert list(by_name) == ["ssgd", "pipe", "local", "cocod", "asynlocal"], "the paper's five"
    paper = speedups(times, [1.0] * 16, 2, bounded=False)
    assert paper == {
        "ssgd": ssgd_speedup(times, 16),
        "pipe": pipe_speedup(times, 16),
        "local": local_speedup(times, 16, 2),
        "cocod": cocod_speedup(times, 16, 2),
        "asynlocal": local_speedup(times, 16, 2),
    }
    mixed = [2.0] * 8 + [1.0] * 8
    proportional, equal = speedups(times, mixed, 2), speedups(times, mixed, 2, proportional=False)
    for name, seconds in step_seconds(times, 2).items():
        assert proportional[name] == pytest.approx(24 * 0.1 / seconds)
        assert equal[name] == pytest.approx((24 if name == "asynlocal" else 16) * 0.1 / seconds)


TIMES_OK = StepTimes(0.1, 0.3, 0.2)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: Problem(0.0, 1.0, 1.0, 1.0), "lipschitz=0.0 must be from 1e-12 to 1e+12"),
        (lambda: Problem(1.0, 0.0, 1.0, 1.0), "sigma=0.0 must be from"),
        (lambda: Problem(1.0, 1.0, -1.0, 1.0), "zeta=-1.0 must be from 0"),
        (lambda: Problem(1.0, 1.0, 1.0, math.inf), "initial_gap=inf must be from 0"),
        (lambda: Problem("1", 1.0, 1.0, 1.0), "lipschitz='1' is not a number"),  # type: ignore[arg-type]
        (lambda: StepTimes(0.0, 1.0, 0.0), "compute_seconds=0.0 must be from"),
        (lambda: StepTimes(math.nan, 1.0, 0.0), "compute_seconds=nan must be from"),
        (lambda: StepTimes(1.0, -1.0, 0.0), "comm_seconds=-1.0 must be from 0"),
        (lambda: StepTimes(1.0, 1.0, -0.1), "interference=-0.1 must be from 0"),
        (lambda: StepTimes(1.0, 1.0, 20), "interference=20 must be a share from 0 to 1; use 0.2 for 20%"),
        (lambda: StepTimes(1.0, True, 0.2), "comm_seconds=True is not a number"),
        (lambda: theorem1_factors(0.0, 0.1, 1), "lipschitz=0.0"),
        (lambda: theorem1_factors(1.0, -0.1, 1), "learning_rate=-0.1"),
        (lambda: theorem1_factors(1.0, 0.1, 0), "period=0 must be from 1 to 1e+15; use 1"),
        (lambda: corollary1_learning_rate(0.0, 10, [1]), "sigma=0.0"),
        (lambda: corollary1_learning_rate(1.0, 10**16, [1]), "num_iterations=10000000000000000 must be"),
        (lambda: corollary1_learning_rate(1.0, 10, []), "batches=[] is empty"),
        (lambda: corollary1_learning_rate(1.0, 10, [8, 0]), "batches[1]=0 must be from 1"),
        (lambda: corollary1_condition(PROBLEM, period=0, batches=[8]), "period=0 must be"),
        (lambda: corollary1_rate(PROBLEM, period=1, num_iterations=0, batches=[8]), "num_iterations=0 must be"),
        (
            lambda: theorem1_bound(PROBLEM, learning_rate=0.01, period=1, num_iterations=0, batches=[8]),
            "num_iterations=0 must be",
        ),
        (lambda: iterations_to_reach(PROBLEM, 0.0, period=1, batches=[8]), "epsilon=0.0 must be"),
        (lambda: iteration_speedup([]), "speeds=[] is empty"),
        (lambda: iteration_speedup([1.0, 0.0]), "speeds[1]=0.0 must be"),
        (lambda: scaled_learning_rate(0.0, [1.0]), "base=0.0 must be"),
        (lambda: period_bound(0, 1, 1.0), "num_iterations=0 must be"),
        (lambda: period_bound(1, 0, 1.0), "num_workers=0 must be"),
        (lambda: period_bound(1, 1, 0.0), "constant=0.0 must be"),
        (lambda: period_bound(1, 2.0, 1.0), "num_workers=2.0 is not an int"),  # type: ignore[arg-type]
        (lambda: communication_rounds(0, 1), "num_iterations=0 must be"),
        (lambda: communication_rounds(1, True), "period=True is not an int"),
        (lambda: communication_complexity(0, 1, 1.0), "num_iterations=0 must be"),
        (lambda: ssgd_speedup(TIMES_OK, 0), "num_workers=0 must be"),
        (lambda: local_speedup(TIMES_OK, 1, 0), "period=0 must be"),
        (lambda: cocod_speedup(TIMES_OK, 1, 0), "period=0 must be"),
        (lambda: cocod_bounded_step_seconds(TIMES_OK, 0), "period=0 must be"),
        (lambda: speedups(TIMES_OK, [1.0, -1.0], 1), "speeds[1]=-1.0 must be"),
    ],
)
def test_bad_input_is_one_line(call: Callable[[], object], named: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(named)) as error:
        call()
    assert "\n" not in str(error.value)


def test_extremes_that_are_allowed_neither_overflow_nor_vanish() -> None:
    many = 10**15
    for small, large in ((1e-12, 1e12), (1e12, 1e-12)):
        problem = Problem(lipschitz=large, sigma=small, zeta=large, initial_gap=large)
        condition = corollary1_condition(problem, period=many, batches=[many] * 100)
        assert 0 < condition.for_learning_rate < math.inf
        assert condition.least > 0
        assert iterations_to_reach(problem, small, period=many, batches=[1]) > 0
        assert corollary1_learning_rate(small, many, [1]) > 0
    assert hiding_period(StepTimes(1e-12, 1e12, 0.0)) == pytest.approx(1e24)


def test_it_is_arithmetic_only() -> None:
    for path in Path(theory.__file__).parent.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        own = {name for name in names if name.startswith("cocod_accel.theory.")}
        assert names - own <= {"__future__", "collections.abc", "cocod_accel.theory", "dataclasses", "math"}, path.name


def test_the_numbers_of_the_documentation() -> None:
    text = (Path(__file__).parent.parent / "docs" / "theory.md").read_text()
    examples = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    test = doctest.DocTestParser().get_doctest(examples, {}, "theory.md", "docs/theory.md", 0)
    assert len(test.examples) > 15
    report: list[str] = []
    failed, _ = doctest.DocTestRunner().run(test, out=report.append)
    assert not failed, "".join(report)
    # Every function and class is explained there, by name.
    missing = [name for name in theory.__all__ if f"`{name}" not in text and not name.startswith("PAPER_")]
    assert set(missing) <= {"IterationCondition"}, missing


# ------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(("per_hour", "restart", "checkpoint"), [(2, 60, 600), (12, 120, 300), (60, 10, 30)])
def test_goodput_of_restarting_is_that_of_drawn_failures(per_hour: float, restart: float, checkpoint: float) -> None:
    chance, rate = random.Random(0), per_hour / 3600
    elapsed, pieces = 0.0, 4000
    for _ in range(pieces):
        needed = checkpoint
        while (failure := chance.expovariate(rate)) < needed:  # a restart may fail, too
            elapsed += failure
            needed = restart + checkpoint
        elapsed += needed
    expected = Failures(per_hour, restart).goodput_of_restarting(checkpoint)
    assert pieces * checkpoint / elapsed == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("per_hour", "restart", "workers", "round_"), [(4, 60, 4, 5), (60, 120, 8, 20), (200, 30, 4, 10)])
def test_goodput_of_going_on_is_that_of_drawn_failures(per_hour: float, restart: float, workers: int, round_: float) -> None:
    chance, failures = random.Random(0), Failures(per_hour, restart)
    rate, span = per_hour / 3600 / workers, 4e6
    back_at, done, held = [0.0] * workers, 0.0, 0.0
    now = 0.0
    while now < span:
        passed = chance.expovariate(rate * workers)
        until = now + passed
        for rank in range(workers):
            done += max(0.0, until - max(now, back_at[rank]))
        now, failed = until, chance.randrange(workers)
        if back_at[failed] > now:  # it is away, and cannot fail
            continue
        done -= chance.uniform(0, round_)
        back_at[failed] = now + restart + round_ + chance.uniform(0, round_)
        held += failures.heartbeat_seconds * sum(at <= now for at in back_at)
    found = (done - held) / (workers * now)
    assert found == pytest.approx(failures.goodput_of_going_on(workers, round_), rel=0.01)


def test_goodput_has_its_limits() -> None:
    assert Failures(0, 60).goodput_of_restarting(600) == Failures(0, 60).goodput_of_going_on(4, 10) == 1
    assert Failures(1e6, 60).goodput_of_restarting(1e6) == 0
    assert Failures(1e6, 60).goodput_of_going_on(4, 10) == pytest.approx(0, abs=0.01)
    assert Failures(1e-3, 60).goodput_of_restarting(600) == pytest.approx(1, abs=1e-3)
