"""``cocod plan`` and ``algorithm.period: auto``: one rule, measured for real, and the same on every worker."""

from __future__ import annotations

import math
import os
import shlex
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import CoCoDSGD, LocalSGD, attach, cli, train
from cocod_accel.algorithms.rounds import Period, RoundClock
from cocod_accel.comm.emulated import Link
from cocod_accel.config.loading import load_config
from cocod_accel.plan.candidates import Candidate, best_algorithm
from cocod_accel.plan.findings import Findings, as_cluster, fit_ring
from cocod_accel.plan.learned import learned, span_of
from cocod_accel.plan.measure import fixed_seconds
from cocod_accel.plan.reasons import is_uneven
from cocod_accel.plan.recommend import Advice, Expected, _Planner, advise, worker_counts
from cocod_accel.plan.tables import scaling_of
from cocod_accel.report.figures import draw_expected
from cocod_accel.sharding.speeds import Measured
from cocod_accel.simulator.cluster import Cluster, Network, WorkerGroup, load_cluster, save_cluster
from cocod_accel.simulator.simulate import configured, expected_times, simulate
from cocod_accel.tasks import build_model, task_facts
from cocod_accel.theory import StepTimes
from cocod_accel.theory.hiding import CODES, Choice, choose, choose_period, hiding_delay
from cocod_accel.trainer import adapt as adapt_module
from cocod_accel.trainer.auto_period import AutoPeriod
from cocod_accel.trainer.pace import Pace
from cocod_accel.trainer.trainer import Trainer
from tests import loops
from tests.test_trainer import TINY, command, rows_of
from tests.workers import run_workers

ROOT = Path(__file__).parents[1]
CLUSTERS = ROOT / "configs" / "cluster"
#: A mean model of 256 kB or so; a cluster file says what steps take.
TASK = ["task.name=synthetic", "model.name=mlp", "batch_size=32", "task.args={num_train: 8192}", "cluster.device=cpu"]


# ---------------------------------------------------------------------------------------------- the rule


@pytest.mark.parametrize(
    ("compute", "comm", "interference", "period"),
    [
        (0.1, 0.3, 0.0, 4),  # three steps would hide it, with nothing to spare
        (0.1, 0.27, 0.0, 3),
        (0.1, 0.3, 0.2, 3),  # 0.06 of it are spent computing more slowly, so it lasts as long as three steps
        (0.1, 0.0, 0.0, 1),
        (0.1, 0.05, 0.0, 1),
        (0.1, 1.0, 0.0, 11),
    ],
)
def test_the_smallest_period_that_hides_an_average(compute: float, comm: float, interference: float, period: int) -> None:
    assert choose_period(StepTimes(compute, comm, interference)) == period


def test_the_margin_and_the_least_period_are_the_callers() -> None:
    times = StepTimes(0.1, 0.3, 0.0)
    assert choose_period(times, margin=0.0) == 3
    assert choose_period(times, margin=0.5) == 5
    assert choose_period(times, least=6) == 6
    with pytest.raises(ValueError, match="margin=-1"):
        choose_period(times, margin=-1)


@pytest.mark.parametrize(("coding", "period"), [(0.0, 3), (0.029, 3), (0.04, 4), (0.2, 20)])
def test_rounds_are_so_long_that_coding_takes_a_tenth_of_them_at_most(coding: float, period: int) -> None:
    times = StepTimes(0.1, 0.27, 0.0, coding)
    assert choose_period(times) == period
    assert hiding_delay(times) == 3, "a mean may be merged earlier"
    assert choose(lambda code: times, payload="int8") == Choice("int8", period, None if period == 3 else 3)


def test_a_code_that_slows_steps_down_too_much_is_not_taken() -> None:
    """In one step all of them hide."""
    comm = {"fp32": 0.1, "bf16": 0.05, "int8": 0.018, "int4": 0.0125, "ternary": 0.0066}

    def times_of(coding: float) -> Callable[[str], StepTimes]:
        return lambda code: StepTimes(0.1, comm[code], 0.5, 0.0 if code == "fp32" else coding)

    assert choose(times_of(0.0)) == Choice("int8", 1, None)  # steps are 9 % longer; 25 % with bf16, 50 % with fp32
    assert choose(times_of(0.003)) == Choice("int4", 1, None)
    # Coding alone takes a fifth of a step: rounds of one step are best sent in full, however they slow steps down.
    assert choose(times_of(0.02)) == Choice("fp32", 1, None)


def test_a_code_that_costs_more_than_it_saves_is_not_taken() -> None:
    """Coding takes 1.6 steps, an average in float32 2.5: rounds of 3 steps hide it, codes would need rounds of 16."""
    comm = {"fp32": 2.5, "bf16": 1.25, "int8": 0.63, "int4": 0.32, "ternary": 0.17}
    found = choose(lambda code: StepTimes(1.0, comm[code], 0.0, 0.0 if code == "fp32" else 1.6))
    assert found == Choice("fp32", 3, None)
    assert choose(lambda code: StepTimes(1.0, 5 + comm[code], 0.0)) == Choice("ternary", 6, None)  # all need 6 or more


seconds = st.floats(1e-4, 1e2)


@given(seconds, seconds, st.floats(0, 0.9), st.floats(0, 1))
def test_it_hides_and_none_shorter_does(compute: float, comm: float, interference: float, margin: float) -> None:
    period = choose_period(StepTimes(compute, comm, interference), margin=margin)
    needed = (1 + margin) * (1 - interference) * comm
    assert period >= 1
    assert needed <= period * compute * (1 + 1e-9)
    assert period == 1 or needed > (period - 1) * compute * (1 - 1e-9)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.7, 3.3, 5.9])
def test_a_simulated_round_of_it_waits_for_nothing_and_a_shorter_one_does(ratio: float) -> None:
    cluster = even_cluster(ratio)
    period = choose_period(expected_times(cluster, simulated(cluster, 1)))
    transfer = ratio * cluster.step_seconds
    hidden = simulate(cluster, simulated(cluster, period), steps=60).timeline.fleet
    assert hidden.exposed_seconds.max() <= 2 * transfer * 1.001  # what is in flight in the end, and the last mean
    if period - 1 in range(1, math.ceil(ratio)):  # else it is the margin that makes it longer
        shorter = simulate(cluster, simulated(cluster, period - 1), steps=60).timeline.fleet
        assert shorter.exposed_seconds.max() > 2 * transfer * 1.001


def even_cluster(ratio: float, **more: Any) -> Cluster:
    """Two workers; an average takes ``ratio`` steps."""
    step = 0.1
    rows = [[1.0, ratio * step], [1e9, ratio * step]]
    return Cluster(step_seconds=step, network=Network(allreduce=rows), **more)


def simulated(cluster: Cluster, period: int | str) -> Any:
    return configured(cluster, [*TASK, f"algorithm.period={period}"], "cocod", steps=60 if period != "auto" else None)


def test_simulate_decides_auto_by_the_same_rule() -> None:
    cluster = even_cluster(3.3)
    assert simulated(cluster, "auto").algorithm.period == 4
    assert simulated(replace(cluster, interference=0.5), "auto").algorithm.period == 2


# ---------------------------------------------------------------------------------------- what is measured


@given(st.floats(1, 1e5), st.floats(0.01, 100), st.integers(2, 64))
def test_a_ring_is_found_again(latency_us: float, bandwidth_gbit: float, num_workers: int) -> None:
    ring = Cluster(
        workers=[WorkerGroup(count=num_workers)], network=Network(latency_us=latency_us, bandwidth_gbit=bandwidth_gbit)
    )
    transfers = [(size, ring.allreduce_seconds(size)) for size in (1e5, 4e5, 8e5, 1.6e6, 3.2e6)]
    latency, bandwidth = fit_ring(transfers, num_workers)
    again = replace(ring, network=Network(latency_us=latency, bandwidth_gbit=bandwidth))
    for size, seconds in transfers:
        assert again.allreduce_seconds(size) == pytest.approx(seconds, rel=1e-6)


@given(st.lists(st.floats(1e-6, 1e2), min_size=2, max_size=6), st.integers(2, 8))
def test_whatever_was_measured_makes_a_cluster_file(transfers: list[float], num_workers: int) -> None:
    found = findings(num_workers, transfers=[(1e5 * 2**i, s) for i, s in enumerate(transfers)])
    cluster = as_cluster(found, "any")
    assert cluster.network.allreduce is not None
    assert [row[1] for row in cluster.network.allreduce] == sorted(row[1] for row in cluster.network.allreduce)
    assert cluster.resized(64).allreduce_seconds(1e5) > 0


def findings(num_workers: int, **more: Any) -> Findings:
    given: dict[str, Any] = {
        "devices": ["cpu"] * num_workers,
        "batch": 32,
        "step_seconds": [0.1] * num_workers,
        "fixed_seconds": [0.01] * num_workers,
        "jitters": [0.02] * num_workers,
        "transfers": [(1e5, 0.01), (2e5, 0.02)],
        "interference": 0.1,
        "what": "mlp, batch 32",
    }
    return Findings(**{**given, **more})


def test_what_is_measured_stands_in_the_file() -> None:
    found = findings(3, step_seconds=[0.1, 0.2, 0.2], devices=["a", "b", "b"], fixed_seconds=[0.09, 0.03, 0.05])
    found = replace(found, jitters=[0.01, 0.02, 0.04], interference=0.25)
    cluster = as_cluster(found, "mine")
    assert cluster.fixed_seconds == pytest.approx(0.04)  # of the slowest group, whose step it is a part of
    assert [group.jitter for group in cluster.workers] == [0.01, 0.03]
    assert cluster.interference == 0.25
    assert "was not measured" not in cluster.description
    assert "the network was not measured" in as_cluster(findings(1, transfers=[]), "one").description


def test_a_fit_is_of_relative_errors_and_of_latency_where_sizes_make_no_difference() -> None:
    exact = [(1e5 * 2**i, 1e-4 + 1e-9 * 1e5 * 2**i) for i in range(6)]
    noisy = [*exact[:-1], (exact[-1][0], 1.3 * exact[-1][1])]
    latency, bandwidth = fit_ring(noisy, 2)
    again = Cluster(network=Network(latency_us=latency, bandwidth_gbit=bandwidth))
    assert again.allreduce_seconds(exact[0][0]) == pytest.approx(exact[0][1], rel=0.05)
    latency, bandwidth = fit_ring([(1e5, 0.01), (2e5, 0.01)], 2)
    assert 2 * latency * 1e-6 == pytest.approx(0.9 * 0.01)


def test_workers_that_are_alike_are_one_group_of_the_cluster(tmp_path: Path) -> None:
    found = findings(5, step_seconds=[0.1, 0.103, 0.05, 0.2, 0.2], devices=["a", "a", "a", "b", "b"])
    cluster = as_cluster(found, "mixed")
    shown = [(group.name, group.count, group.speed) for group in cluster.workers]
    assert shown == [("a", 2, pytest.approx(1.970, abs=1e-3)), ("a", 1, 4.0), ("b", 2, 1.0)]
    assert cluster.step_seconds == pytest.approx(0.2)
    save_cluster(cluster, tmp_path / "mixed.yaml")
    assert load_cluster(tmp_path / "mixed.yaml") == cluster


@given(st.floats(0, 0.5), st.floats(1e-4, 0.1), st.integers(2, 512))
def test_the_fixed_part_of_a_step(fixed: float, a_sample: float, batch: int) -> None:
    smaller = batch // 2
    found = fixed_seconds((smaller, fixed + smaller * a_sample), (batch, fixed + batch * a_sample))
    assert found == pytest.approx(min(fixed, 0.9 * (fixed + batch * a_sample)), abs=1e-9)
    assert fixed_seconds((16, 0.01), (32, 0.1)) == 0.0  # less than in proportion is noise


# -------------------------------------------------------------------------------------- what is recommended


def speedups(**values: float) -> dict[str, float | None]:
    return {"ssgd": None, "pipe": None, "local": None, "cocod": None, "asynlocal": None, **values}


@pytest.mark.parametrize(
    ("given", "num_workers", "name", "why"),
    [
        (speedups(ssgd=1.0, cocod=1.0), 1, "ssgd", "one worker"),
        (speedups(ssgd=7.7, cocod=7.5), 8, "ssgd", "others need more steps than they save"),
        (speedups(ssgd=7.7, pipe=7.9, local=7.9, cocod=8.0), 8, "ssgd", "S-SGD is as good"),
        (speedups(ssgd=4.0, pipe=6.0, local=7.0, cocod=7.9), 8, "cocod", "1.98 times S-SGD"),
        (speedups(ssgd=4.0, cocod=7.9, asynlocal=8.0), 8, "cocod", "fastest to"),
        (speedups(ssgd=4.0, cocod=7.7, asynlocal=8.0), 8, "asynlocal", "fastest to"),
        (speedups(cocod=7.0), 8, "cocod", "fastest to"),
    ],
)
def test_the_fastest_algorithm_unless_nothing_is_gained(
    given: dict[str, float | None], num_workers: int, name: str, why: str
) -> None:
    found, reason = best_algorithm(given, num_workers)
    assert found == name
    assert why in reason


def test_algorithms_that_are_as_good_are_named() -> None:
    _, reason = best_algorithm(speedups(ssgd=4.0, pipe=6.0, local=7.8, cocod=7.9), 8)
    assert reason.endswith("; local is as good (7.80x)")


def pair(speed: float, jitter: float) -> Cluster:
    return Cluster(workers=[WorkerGroup(count=2, jitter=jitter), WorkerGroup(count=2, speed=speed, jitter=jitter)])


@pytest.mark.parametrize(
    ("speed", "jitter", "uneven"), [(1.04, 0.0, False), (1.1, 0.0, True), (1.1, 0.12, False), (2.0, 0.3, True)]
)
def test_speeds_that_differ_by_less_than_their_jitter_are_equal(speed: float, jitter: float, uneven: bool) -> None:
    assert is_uneven(pair(speed, jitter)) == uneven
    advice = advise(pair(speed, jitter), TASK, [4])
    assert advice.proportional == uneven
    found = Findings(
        devices=["cpu", "cpu"], batch=32, step_seconds=[0.1, 0.1 / speed], fixed_seconds=[0.0, 0.0],
        jitters=[jitter, jitter], transfers=[(1e5, 0.01), (1e6, 0.05)], interference=0.0, what="two cores",
    )  # fmt: skip
    assert len(as_cluster(found, "here").workers) == 1 + uneven


def test_linear_is_the_same_in_the_figure_and_in_the_table() -> None:
    """Of a mixed cluster: the sum of speeds."""
    expected = [Expected(n, "k=1", {"ssgd": 0.5 * n, "cocod": 0.9 * n}, 1.5 * n) for n in (1, 2, 4)]
    axes = draw_expected(scaling_of(expected))["expected_speedup"].axes[0]
    (line,) = [line for line in axes.get_lines() if line.get_label() == "linear"]
    drawn: Any = line.get_ydata()
    assert list(drawn) == [row.linear for row in expected]


def test_the_counts_of_workers_that_are_looked_at() -> None:
    assert worker_counts(2) == [1, 2, 4, 8, 16, 32, 64]
    assert worker_counts(3) == [1, 2, 3, 4, 8, 16, 32, 64]
    assert worker_counts(100)[-2:] == [64, 100]


def slow_link(megabit: float) -> Cluster:
    network = Network(latency_us=0.0, bandwidth_gbit=megabit / 1e3)
    return Cluster(step_seconds=0.1, network=network, payload_bytes=1_000_000)


def test_the_picture_shows_every_speedup() -> None:
    rows = [
        Expected(n, "k=3", {name: share * n for name, share in (("ssgd", 0.3), ("cocod", 0.9))}, float(n)) for n in (1, 64)
    ]
    low, high = draw_expected(scaling_of(rows))["expected_speedup"].axes[0].get_ylim()
    assert 0.15 < low < 0.3
    assert 64 < high < 130


def test_less_is_sent_before_it_is_sent_less_often() -> None:
    """8 Mbit at r Mbit/s take 80 / r steps of two workers."""

    def advised(megabit: float) -> tuple[str, int]:
        advice = advise(slow_link(megabit), TASK, [2])
        return advice.payload, advice.period

    assert advised(40) == ("int8", 1)  # 2 steps in float32, 1 in bf16, with nothing to spare
    assert advised(20) == ("int4", 1)
    assert advised(8) == ("ternary", 1)
    assert advised(4) == ("ternary", 2)
    assert advised(1) == ("ternary", 6)
    advice = advise(slow_link(20), TASK, [2])
    [why] = [why for what, _, why in advice.reasons if what == "payload"]
    assert why.startswith("the longest code that hides in one step; fp32 needs 5, bf16 needs 3, int8 needs 2; ")
    ssgd = next(c for c in advice.candidates if c.algorithm == "ssgd")
    assert why.endswith(f" MB a step, where S-SGD sends {ssgd.step_bytes / 1e6:.3f}")
    [why] = [why for what, _, why in advise(slow_link(1), TASK, [2]).reasons if what == "payload"]
    assert why.startswith("the shortest code: none hides in one step; fp32 needs 88, ")


def test_sixteen_workers_on_links_of_long_latency_take_longer_rounds() -> None:
    cluster = Cluster(step_seconds=0.1, network=Network(latency_us=20_000.0, bandwidth_gbit=1.0), payload_bytes=1_000_000)
    advice = advise(cluster.resized(16), [*TASK, "task.args={num_train: 65536}"], [16])
    # 30 messages of 20 ms, whatever is sent: S-SGD waits for six steps in every step.
    hiding = next(c for c in advice.candidates if (c.algorithm, c.payload, c.period) == ("cocod", "ternary", 7))
    assert hiding.steps_needed > 2
    # Rounds that hide it need so many steps that shorter ones, which wait for it or for a part of it, come sooner.
    [taken] = [c for c in advice.candidates if advice.is_taken(c)]
    assert 1 < taken.period < 7
    assert taken.algorithm in ("cocod", "local")
    assert taken.speedup >= 0.98 * max(c.speedup for c in advice.candidates)
    shorter = max(c.speedup for c in advice.candidates if c.algorithm == "cocod")
    assert shorter > hiding.speedup
    assert advice.expected[0].speedups["cocod"] == shorter


@settings(max_examples=6)
@given(st.floats(0.02, 0.2), st.floats(0.1, 30.0), st.sampled_from([2, 4, 16]))
def test_what_is_recommended_is_the_soonest_in_its_table(step: float, latency_ms: float, workers: int) -> None:
    network = Network(latency_us=1e3 * latency_ms, bandwidth_gbit=1.0)
    cluster = Cluster(step_seconds=step, network=network, payload_bytes=1_000_000).resized(workers)
    advice = advise(cluster, [*TASK, "task.args={num_train: 65536}"], [workers])
    best = max(c.speedup for c in advice.candidates)
    (taken,) = [c for c in advice.candidates if advice.is_taken(c)]
    assert taken.speedup >= (0.95 if taken.algorithm == "ssgd" else 0.96) * best


def test_the_papers_cluster_is_planned_with_short_rounds() -> None:
    """Float32 in every step would make steps 36 % longer."""
    advice = advise(load_cluster(CLUSTERS / "paper.yaml"), ["configs/homogeneous_16gpu.yaml"], [16])
    assert (advice.algorithm, advice.period, advice.payload, advice.warnings) == ("cocod", 1, "int8", [])
    paper = next(c for c in advice.candidates if (c.algorithm, c.period, c.payload) == ("cocod", 5, "fp32"))
    taken = next(c for c in advice.candidates if advice.is_taken(c))
    assert paper.step_seconds < 1.05 * taken.step_seconds
    assert paper.steps_needed > taken.steps_needed
    assert paper.speedup < taken.speedup


def test_candidates_are_what_is_simulated_and_what_was_learned() -> None:
    cluster = even_cluster(0.5, coding_ns={"int8": 0.0})
    advice = advise(cluster, [*TASK, "task.args={num_train: 131072}"], [2])
    found = {(c.algorithm, c.payload, c.period): c for c in advice.candidates}
    ssgd, cocod = found["ssgd", "fp32", 1], found["cocod", "fp32", 1]
    assert ssgd.step_seconds == pytest.approx(0.15)
    assert cocod.step_seconds == pytest.approx(0.1)
    assert ssgd.steps_needed == 1.0
    epochs = load_config(TASK).schedule.epochs
    assert epochs is not None
    num_steps = 131072 // 64 * epochs
    assert cocod.steps_needed == learned().steps_needed("cocod", 2, "fp32", 2, num_steps) > 1
    assert cocod.speedup == pytest.approx(2 / cocod.steps_needed)
    parameters = build_model(load_config(TASK), task_facts(load_config(TASK))).parameters()
    assert ssgd.step_bytes == cocod.step_bytes == 4 * sum(p.numel() for p in parameters)
    assert found["cocod", "fp32", 5].step_bytes == pytest.approx(ssgd.step_bytes / 5)


@given(
    st.sampled_from(["local", "cocod"]),
    st.integers(1, 40),
    st.sampled_from(CODES),
    st.integers(1, 128),
    st.integers(1, 10**5),
)
def test_more_steps_the_longer_apart_the_more_workers_and_the_shorter_the_run(
    name: str, period: int, payload: str, workers: int, steps: int
) -> None:
    measured = learned()
    span = span_of(name, period, None)
    assert span == (period if name == "local" else 2 * period)

    def needed(**more: Any) -> float:
        given = {"span": span, "payload": payload, "num_workers": workers, "num_steps": steps}
        return measured.steps_needed(name, **{**given, **more})

    assert 1 <= needed() <= needed(span=span + 1)
    assert needed(num_workers=1) == 1 <= needed()
    assert needed(num_steps=2 * steps) <= needed() + 1e-12
    assert measured.steps_needed("ssgd", 0, "fp32", workers, steps) == 1
    # After that many steps the method has gained what it is behind.
    x = math.log2(needed())
    behind = measured.loss(name, span, payload, workers, steps * 2**x)
    assert measured.gain * x == pytest.approx(behind, rel=1e-6, abs=1e-9)


def test_workers_that_never_meet_learn_nothing_together() -> None:
    measured = learned()
    for steps in (100, 1_000, 100_000):
        assert measured.steps_needed("cocod", 10**6, "fp32", 16, steps) > 100


def test_long_rounds_of_skewed_workers_are_warned_of() -> None:
    """docs/reproduction.md: of periods 1, 5, 8 and 24 the last one lost accuracy on label-skewed shards."""

    plain, skewed = _Planner(TASK), _Planner([*TASK, "task.label_skew=0.1"])
    assert not any("data differ" in warning for warning in plain.warnings(slow_link(1).resized(2), 8))
    assert not any("label_skew" in warning for warning in skewed.warnings(slow_link(1).resized(2), 8))
    (warning,) = (w for w in plain.warnings(slow_link(1).resized(2), 12) if "data differ" in w)
    assert warning.startswith("period 12 is above 8: if the workers' data differ, accuracy may suffer")
    (warning,) = (w for w in skewed.warnings(slow_link(1).resized(2), 12) if "label_skew" in w)
    assert warning.startswith("period 12 is above 8: with task.label_skew=0.1, accuracy may suffer")


def test_workers_that_differ_get_proportional_batches_and_their_rate() -> None:
    cluster = replace(slow_link(20), workers=[WorkerGroup(count=1), WorkerGroup(name="fast", count=1, speed=2.0)])
    advice = advise(cluster, [*TASK, "optimizer.learning_rate=0.01"], [2])
    assert advice.proportional
    assert advice.batches == (32, 64)
    assert advice.learning_rate == pytest.approx(0.03)
    assert {"cluster.proportional=true", "cluster.speeds=[1,2]"} <= set(advice.overrides)
    nearly = replace(cluster, workers=[WorkerGroup(count=1), WorkerGroup(name="fast", count=1, speed=1.04)])
    assert advise(nearly, TASK, [2]).batches == (32, 32)


def test_theory_counts_the_workers_and_what_it_finds_untried_is_said() -> None:
    """16 workers with 128 steps each: the bound is O(T^(1/4) / N^(3/4)), far below that of one."""
    cluster = replace(slow_link(2), workers=[WorkerGroup(count=16)])  # about 5 steps as ternary, of 16 workers
    advice = advise(cluster, TASK, [16])
    assert any("above theory's 1.6 for 128 steps of 16 workers" in warning for warning in advice.warnings)
    assert any(
        "is longer than the whole run of 1024" in warning for warning in advise(slow_link(0.0002), TASK, [2]).warnings
    )


@pytest.mark.parametrize(
    "more",
    [
        ["algorithm.fragments=4", "algorithm.period=4"],
        ["algorithm.payload=int8"],
        ["algorithm.optimizer_state=reset"],
        ["algorithm.name=local", "algorithm.optimizer_state=average"],
        ["algorithm.own_share=0.5", "algorithm.outer.momentum=0.5"],
        ["cluster.num_workers=4", "cluster.speeds=[1,1,2,2]", "cluster.proportional=true", "cluster.replan_epochs=1"],
        ["cluster.num_workers=3", "emulate.slowdown=[1,2,1]"],
    ],
    ids=str,
)
@pytest.mark.parametrize("megabit", [8.0, 1e6])
def test_the_command_loads_whatever_the_user_had(more: list[str], megabit: float) -> None:
    """A slow link, where models are averaged, and one on which gradients may be."""
    advice = advise(slow_link(megabit), [*TASK, *more], [2])
    config = load_config([*TASK, *more, *advice.overrides])
    assert config.algorithm.name == advice.algorithm == ("cocod" if megabit == 8 else "ssgd")
    assert config.cluster.num_workers == 2
    assert config.algorithm.payload == advice.payload
    if advice.algorithm == "cocod":
        assert config.period_by_epoch == [(0, advice.period)]
        assert config.algorithm.fragments == (4 if "algorithm.fragments=4" in more else 1)


def test_a_payload_of_several_parts_is_shortened_too() -> None:
    advice = advise(slow_link(1), [*TASK, "algorithm.fragments=4", "algorithm.period=4"], [2])
    assert advice.payload == "ternary"


def test_a_speed_is_handed_on_exactly() -> None:
    speed = 1.23456789
    cluster = replace(slow_link(20), workers=[WorkerGroup(count=1), WorkerGroup(name="fast", count=1, speed=speed)])
    assert load_config([*TASK, *advise(cluster, TASK, [2]).overrides]).cluster.speeds == [1.0, speed]


def test_too_few_samples_for_many_workers_are_no_reason_not_to_plan() -> None:
    advice = advise(slow_link(20), [*TASK, "task.args={num_train: 256}"], [2, 64])
    few, many = advice.expected
    assert few.speedups["cocod"] is not None
    assert (many.choice, set(many.speedups.values())) == (None, {None})


@pytest.mark.parametrize("ratio", [3.0, 30.0, 250.0])
def test_expected_throughput_does_not_depend_on_how_long_a_round_is(ratio: float) -> None:
    """Equal workers, nothing disturbs: hidden communication costs nothing, blocking costs T_comm in every round."""
    advice = advise(even_cluster(ratio), [*TASK, "task.args={num_train: 131072}"], [2])
    found = {c.algorithm: c for c in advice.candidates}
    # All codes take the same time here, so the shortest is chosen; and rounds that hide it are the longest.
    coded = [c for c in advice.candidates if (c.algorithm, c.payload) == ("cocod", "ternary")]
    found["cocod"] = max(coded, key=lambda candidate: candidate.period)
    assert found["cocod"].throughput == pytest.approx(2.0, rel=1e-6)
    assert found["local"].throughput == pytest.approx(2 * 5 / (5 + ratio), rel=1e-6)
    assert found["ssgd"].throughput == pytest.approx(2 / (1 + ratio), rel=1e-6)
    [row] = advice.expected
    found["cocod"] = max(coded, key=lambda candidate: candidate.speedup)
    assert row.speedups == {name: pytest.approx(candidate.speedup, rel=0.021) for name, candidate in found.items()}


def test_fragments_are_a_least_period() -> None:
    advice = advise(slow_link(80), [*TASK, "algorithm.fragments=4", "algorithm.period=4"], [2])
    assert (advice.period, advice.payload) == (4, "fp32")


# ------------------------------------------------------------------------------------------- the command


def plan(*arguments: str) -> int:
    return cli.main(["plan", *arguments])


@pytest.mark.parametrize(
    ("name", "model", "algorithm"),
    [("office_1gbe", "resnet18", "cocod"), ("office_1gbe", "small_resnet", "ssgd"), ("mixed_16", "small_resnet", "ssgd")],
)
def test_plan_from_a_cluster_file(
    name: str, model: str, algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["batch_size=32", f"model.name={model}", "task.name=synthetic", "task.args={num_train: 8192}"]
    assert plan(*given, "--cluster", str(CLUSTERS / f"{name}.yaml"), "--out", str(tmp_path / "out")) == 0
    out = capsys.readouterr().out
    assert f"algorithm: {algorithm} " in out
    assert "times simulated" in out
    assert out.count("recommended") == 2
    table = out.split("expected speedup")[1].split("\n\n")[0].splitlines()
    counts = [line.split()[0] for line in table[3:]]
    assert [int(count) for count in counts] == worker_counts(load_cluster(CLUSTERS / f"{name}.yaml").num_workers)
    line = next(line for line in out.splitlines() if line.startswith("  cocod train"))
    words = shlex.split(line)
    config = load_config(words[2:])
    assert config.algorithm.name == algorithm
    assert config.cluster.proportional == (name == "mixed_16")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"expected_speedup.png", "expected_speedup.svg"}
    assert "simulated" in (tmp_path / "out" / "expected_speedup.svg").read_text()


def test_failures_are_told_of_the_recommended_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_cluster(slow_link(20), tmp_path / "two.yaml")
    assert plan(*TASK, "--cluster", str(tmp_path / "two.yaml"), "--out", str(tmp_path), "--failures", "2") == 0
    said = capsys.readouterr().out
    assert "expected goodput with 2 failures an hour" in said
    assert said.split("expected goodput")[1].splitlines()[3].startswith("cocod ")


def test_one_worker_has_nothing_to_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_cluster(even_cluster(3.0).resized(1), tmp_path / "one.yaml")
    assert plan(*TASK, "--cluster", str(tmp_path / "one.yaml"), "--out", str(tmp_path)) == 0
    assert "one worker: there is nobody to communicate with" in capsys.readouterr().out


@pytest.mark.alone
def test_plan_measures_two_real_workers(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    link = ["emulate.link.bandwidth_mbit=100", "emulate.slowdown=[1, 3]"]
    done = command("cocod", "plan", *TASK, *link, "--save", str(file), "--seconds", "2", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("accelerate launch ")
    assert "measuring both together" in done.stderr
    cluster = load_cluster(file)
    assert cluster.num_workers == 2
    # A busy machine may make the slowed-down worker look like the other one, or AsynLocal-SGD the soonest there.
    fastest, slowest = cluster.speeds()
    assert fastest >= slowest == 1.0
    assert "emulated" in cluster.description
    rows = cluster.network.allreduce
    assert rows is not None
    assert len(rows) == 5
    for size, found in rows:  # an emulated link is never faster than it says
        assert found >= 0.999 * Link(100).seconds(round(size), 2)
    assert 0 <= cluster.interference < 1
    assert set(cluster.coding_ns) == {"bf16", "int8", "int4", "ternary"}
    assert all(0 < nanoseconds < 1e6 for nanoseconds in cluster.coding_ns.values())
    assert "recommended" in done.stdout
    uneven = is_uneven(cluster) and "algorithm.name=asynlocal" not in done.stdout
    assert f"cluster.proportional={str(uneven).lower()}" in done.stdout
    before = file.read_bytes()
    again = command("cocod", "plan", *TASK, "--save", str(file))
    assert again.returncode == 2
    assert "already exists" in again.stderr
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--cluster", "nowhere.yaml"], "error: nowhere.yaml: no such file"),
        (["--workers", "0"], "error: --workers=0: must be at least 1"),
        (["--seconds", "-1"], "error: --seconds=-1: must be positive"),
        (["--save", "no/where/c.yaml"], "error: --save=no/where/c.yaml: its folder does not exist"),
        (["--accelerate-config", "no.yaml"], "error: --accelerate-config=no.yaml: no such file"),
        (["algorithm.nam=cocod"], "error: override algorithm.nam: unknown key algorithm.nam; did you mean algorithm.name?"),
        (["algorithm.name=ssgd", "algorithm.period=auto"], "algorithm.period=auto: requires local or cocod, not ssgd"),
        (["algorithm.name=asynlocal", "algorithm.period=auto"], "requires local or cocod, not asynlocal"),
        (["algorithm.period=often"], "error: algorithm.period=often: must be a number of steps"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan(*arguments) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


def test_nodes_average_between_themselves() -> None:
    """16 workers in nodes of four are four models to average, each with a quarter of a node's bytes to send."""
    cluster = load_cluster(CLUSTERS / "paper_vgg16.yaml")
    advice = advise(cluster, ["configs/homogeneous_16gpu.yaml", "cluster.workers_per_replica=4"], [16])
    plain = advise(cluster, ["configs/homogeneous_16gpu.yaml"], [16])

    def of(some: Advice, algorithm: str) -> Candidate:
        return next(c for c in some.candidates if (c.algorithm, c.period, c.payload) == (algorithm, 5, "fp32"))

    ours, flat = of(advice, "cocod"), of(plain, "cocod")
    assert ours.step_bytes == pytest.approx(flat.step_bytes * (2 * 3 / 4 / 4) / (2 * 15 / 16), rel=1e-3)
    assert ours.steps_needed < flat.steps_needed  # of four workers, not of sixteen
    ssgd = [next(c for c in some.candidates if c.algorithm == "ssgd") for some in (advice, plain)]
    assert ssgd[0] == ssgd[1]
    assert load_config(["configs/homogeneous_16gpu.yaml", "cluster.workers_per_replica=4", *advice.overrides])


def test_sharded_nodes_are_planned_without_algorithms_that_sum_all_gradients() -> None:
    advice = advise(load_cluster(CLUSTERS / "paper_vgg16.yaml"), ["configs/sharded_4x4.yaml"])
    assert {candidate.algorithm for candidate in advice.candidates} == {"local", "cocod", "asynlocal"}
    assert [row.num_workers for row in advice.expected] == [4, 8, 16, 32, 64]
    config = load_config(["configs/sharded_4x4.yaml", *advice.overrides])
    assert (config.cluster.shard, config.cluster.workers_per_replica) == ("fsdp", 4)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["cluster.workers_per_replica=2"], "=2: does not make nodes of 2 workers; give --workers=4"),
        (["cluster.workers_per_replica=3"], "=3: does not make nodes of 2 workers; give --workers=6"),
    ],
)
def test_one_node_has_nobody_to_average_with(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_cluster(even_cluster(1.0), tmp_path / "two.yaml")
    assert plan(*TASK, *arguments, "--cluster", str(tmp_path / "two.yaml")) == 2
    assert f"error: cluster.workers_per_replica{line}" in capsys.readouterr().err


def test_a_shared_out_model_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("configs/sharded_4x4.yaml", "--save", "never.yaml") == 2
    assert "error: cluster.shard=fsdp: is not measured, which takes a whole model" in capsys.readouterr().err


# --------------------------------------------------------------------------------------- period: auto


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()


def test_a_round_under_way_keeps_its_period() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attach(model, optimizer, CoCoDSGD(period=3))
    ends = []
    for number in range(1, 17):
        step(model, optimizer)
        if number == 4:  # in the second round, which began after step 3
            sync.control.set_period([(0, 3), (4, 5)])
        if sync.control.is_round_start:
            ends.append(number)
    assert ends == [3, 6, 11, 16]
    with pytest.raises(ValueError, match="at least 1"):
        sync.control.set_period(0)
    sync.detach()


def trajectory(rank: int, timed: bool, payload: str) -> list[float]:
    model = DistributedDataParallel(loops.make_model(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    values = []
    with attach(model, optimizer, CoCoDSGD(period=2, payload=payload)) as sync:
        for number in range(9):
            optimizer.zero_grad()
            loops.loss_of(model, *loops.make_batch(rank, number, dtype=torch.float32)).backward()
            optimizer.step()
            if timed and number in (0, 3, 4):
                before = sync.stats()
                assert sync.control.time_transfer() > 0
                assert sync.stats().bytes == before.bytes
            values.append(float(sum(p.double().sum() for p in model.parameters())))
    return values


@pytest.mark.parametrize("payload", ["fp32", "int8"])
def test_timing_a_transfer_changes_no_model(payload: str) -> None:
    assert run_workers(2, trajectory, True, payload) == run_workers(2, trajectory, False, payload)


#: An average takes 310 ms on this link.
AUTO = [
    *TINY,
    "algorithm.period=auto",
    "task.args={num_train: 160}",  # 10 steps an epoch
    "schedule.epochs=3",
    "emulate.link.latency_ms=155",
    "logging.trackers=[]",
    "logging.every_steps=1",
]


def auto_worker(rank: int, arguments: list[str], stop_at: int | None = None) -> tuple[int, list[list[int]], int]:
    """Train as launched, with steps that seem to take 100 ms in the first epoch and 65 ms from then on."""
    trainers: list[Trainer] = []

    def known_seconds(epoch: int) -> float:
        return (0.1 if epoch == 0 else 0.065) * (1 if rank == 1 else 0.5)  # worker 0 is faster, and decides nothing

    def end(self: Pace, blocked: Callable[[], float]) -> None:
        self.seconds.append(known_seconds(trainers[0].at.epoch))

    run = Trainer.run

    def noted_run(self: Trainer) -> Any:
        trainers.append(self)
        return run(self)

    set_rate = Trainer._set_learning_rate

    def stopping_rate(self: Trainer, epoch: float) -> None:
        if self.step == stop_at and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        set_rate(self, epoch)

    def found(*_: Any, **__: Any) -> Measured:
        return Measured((2.0, 1.0), (0.05, 0.1), (10, 10), (0.0, 0.0))

    Pace.end = end  # type: ignore[method-assign, assignment]
    Trainer.run = noted_run  # type: ignore[method-assign]
    Trainer._set_learning_rate = stopping_rate  # type: ignore[method-assign]
    vars(adapt_module)["measure_speeds"] = found
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    code = train.main(arguments)
    [trainer] = trainers
    assert trainer.at.periods is not None
    return code, trainer.at.periods, trainer.sync.stats().rounds


def rounds_of(schedule: list[list[int]], steps: int) -> int:
    clock = RoundClock(Period.parse([(first, k) for first, k in schedule]))
    return sum(clock.tick() for _ in range(steps))


def test_auto_finds_the_period_of_a_known_link_and_all_workers_agree(tmp_path: Path) -> None:
    arguments = [*AUTO, f"output={tmp_path}", "name=auto"]
    results = run_workers(2, auto_worker, arguments, fresh=True)
    assert results[0] == results[1]
    code, schedule, rounds = results[0]
    assert code == 0
    (first, k), (later, longer) = schedule
    assert (first, k) == (0, 4)  # 310 ms and a tenth more, in steps of 100 ms
    assert later == 20  # known after the second epoch, in which steps took 65 ms
    assert longer == 6
    assert rounds == rounds_of(schedule, 30)
    rows = rows_of(tmp_path / "auto", "period")
    assert [(row["epoch"], row["step"], row["period"]) for row in rows] == [(0, 0, 4), (1, 10, 4), (2, 20, 6)]
    assert all(row["comm_seconds"] >= 0.31 * 0.999 and row["emulated"] for row in rows)
    assert [row["compute_seconds"] for row in rows] == pytest.approx([0.1, 0.1, 0.065])
    assert [row["period"] for row in rows_of(tmp_path / "auto", "train")] == [4] * 20 + [6] * 10
    assert load_config([str(tmp_path / "auto" / "config.yaml")]).algorithm.period == "auto"


def test_a_resumed_run_goes_on_with_the_periods_that_were_decided(tmp_path: Path) -> None:
    arguments = [*AUTO, "schedule.epochs=4", f"output={tmp_path}", "name=auto"]
    stopped = run_workers(
        2, auto_worker, arguments, 21, fresh=True
    )  # all know of it when the next average has landed, after step 32
    assert [code for code, _, _ in stopped] == [143, 143]
    assert stopped[0][1] == [[0, 4], [20, 6]]
    results = run_workers(2, auto_worker, arguments, fresh=True)
    assert results[0] == results[1] == (0, [[0, 4], [20, 6]], rounds_of([[0, 4], [20, 6]], 40))
    assert [row["step"] for row in rows_of(tmp_path / "auto", "period")] == [0, 10, 20, 30]  # nothing was decided anew


def test_auto_decides_anew_for_other_workers(tmp_path: Path) -> None:
    arguments = [*AUTO, f"output={tmp_path}", "name=auto"]
    run_workers(2, auto_worker, arguments, 11, fresh=True)
    [(code, schedule, _)] = run_workers(1, auto_worker, [*arguments, "cluster.num_workers=1"], fresh=True)
    assert (code, schedule) == (0, [[0, 1]])  # nobody to send to


def test_local_and_fragments_take_auto(tmp_path: Path) -> None:
    short = ["schedule.epochs=1", "schedule.warmup_epochs=1", f"output={tmp_path}"]
    [(code, schedule, _), _] = run_workers(2, auto_worker, [*AUTO, *short, "algorithm.name=local", "name=local"], fresh=True)
    assert (code, schedule) == (0, [[0, 4]])
    parts = ["algorithm.fragments=5", "name=parts", "model.name=small_resnet"]
    [(code, schedule, _), _] = run_workers(2, auto_worker, [*AUTO, *short, *parts], fresh=True)
    assert (code, schedule) == (0, [[0, 5]])


def test_nothing_is_decided_from_no_steps() -> None:
    model = torch.nn.Linear(2, 2)
    sync = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), CoCoDSGD(period=3))
    auto = AutoPeriod(sync, lambda values: [values, values], least=1)
    assert auto.decide(math.nan) is None
    assert auto.schedule == []
    decision = auto.decide(0.1)
    assert decision is not None
    assert decision.period == auto.period == 1
    sync.detach()


class FakeSync:
    """A link whose transfers take known times: the timing alone is stubbed."""

    attempts = 0

    def __init__(self, transfers: list[float]) -> None:
        self.control = self
        self.transfers = transfers
        self.periods: list[Any] = []

    def time_transfer(self) -> float:
        return self.transfers.pop(0)

    def time_coding(self) -> float:
        return 0.0

    def set_period(self, period: Any) -> None:
        self.periods.append(period)


def decided(rows: list[list[float]], own: int = 0) -> AutoPeriod:
    auto = AutoPeriod(FakeSync(rows[own][1:]), lambda values: rows, least=1)  # type: ignore[arg-type]
    auto.decide(rows[own][0])
    return auto


def test_a_decision_is_the_last_joiners_median_and_the_slowest_workers_step() -> None:
    # Worker 0 waited for worker 1 twice; the first transfer was slow for both.
    rows = [[0.05, 0.9, 0.5, 0.5, 0.0], [0.1, 0.8, 0.3, 0.3, 0.0]]
    assert decided(rows).schedule == decided(rows, own=1).schedule == [[0, 4]]
    assert decided([[0.1, 0.3, 0.3, 0.3, 0.0], [math.nan, 0.3, 0.3, 0.3, 0.0]]).schedule == []
    rows[0][-1] = 0.08  # worker 0 codes so long that it would be four fifths of a step
    assert decided(rows).schedule == decided(rows, own=1).schedule == [[0, 8]]


def test_deciding_twice_at_one_step_leaves_one_pair() -> None:
    sync = FakeSync([0.3] * 3 + [0.3] * 3 + [0.6] * 3)
    compute = [0.1]
    auto = AutoPeriod(sync, lambda values: [values], least=1)  # type: ignore[arg-type]
    auto.decide(compute[0])
    sync.attempts = 10
    auto.decide(0.05)
    auto.decide(0.1)
    assert auto.schedule == [[0, 4], [10, 7]]


def transfer_sizes(rank: int) -> list[int]:
    """Elements that a timed transfer sums, for cocod and local, with BatchNorm and averaged momentum."""
    found = []
    for algorithm in (CoCoDSGD(2), LocalSGD(2, optimizer_state="average")):
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sync = attach(model, optimizer, algorithm)
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        comm = sync._driver.replica.route.comm
        sizes: list[int] = []
        launch = comm.launch

        def noted(tensors: Any, launch: Any = launch, sizes: list[int] = sizes) -> Any:
            sizes.append(sum(tensor.numel() for tensor in tensors))
            return launch(tensors)

        comm.launch = noted  # type: ignore[method-assign]
        sync.control.time_transfer()
        found.append(sizes[-1])
        sync.detach()
    return found


def test_a_timed_transfer_is_as_large_as_a_rounds() -> None:
    parameters, buffers = 4 * 3 + 3 + 3 + 3, 3 + 3
    for found in run_workers(2, transfer_sizes):
        assert found == [parameters, 2 * parameters + buffers]
