"""Virtual time against a clock in plain Python, against the paper's formulas, and against what the trainer sends."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import attach, cli
from cocod_accel.algorithms.rounds import Period
from cocod_accel.config.loading import load_config
from cocod_accel.config.settings import Config
from cocod_accel.config.strict import ConfigError
from cocod_accel.simulator.cluster import Cluster, Network, Stragglers, Wire, WorkerGroup, load_cluster, save_cluster
from cocod_accel.simulator.fleet import Array, Fleet, Parcel
from cocod_accel.simulator.folders import write
from cocod_accel.simulator.learning import Learning, Learnt
from cocod_accel.simulator.payloads import Parcels, parcels_of
from cocod_accel.simulator.simulate import configured, simulate, title
from cocod_accel.simulator.timeline import Course, SpanSample, Timeline, chosen_ranks, middle_window, step_times
from cocod_accel.tasks import build_model, build_task, task_facts
from cocod_accel.trainer.work import Work
from tests import reference_clock
from tests.workers import run_workers

TINY = ["task.name=synthetic", "model.name=mlp", "batch_size=4", "schedule.epochs=2", "schedule.warmup_epochs=0"]
FIVE = ("ssgd", "pipe", "local", "cocod", "asynlocal")

# ------------------------------------------------------------------------------ against a clock in plain Python

#: Halves and whole numbers too, so that events fall together.
seconds = st.one_of(st.floats(0.01, 4), st.integers(0, 6).map(lambda n: n / 2))


def round_lengths(pairs: Sequence[tuple[int, int]], steps: int) -> list[int]:
    """A round that starts at step s has the length in force at s."""
    lengths: list[int] = []
    while sum(lengths) <= steps:
        lengths.append([k for first, k in pairs if first <= sum(lengths)][-1])
    return lengths


@st.composite
def together(draw: st.DrawFn) -> tuple[reference_clock.Setting, list[list[tuple[int, int]]], int]:
    """Of algorithms whose workers take their steps together; with the pairs of every worker's period."""
    name = draw(st.sampled_from(["ssgd", "pipe", "local", "cocod"]))
    workers, steps = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    pairs = [(0, draw(st.integers(1, 4)))]
    if draw(st.booleans()):
        pairs.append((draw(st.integers(1, 6)), draw(st.integers(1, 5))))
    has_local_steps = name in ("local", "cocod")
    fragments = draw(st.integers(1, min(k for _, k in pairs))) if has_local_steps else 1
    node_size = draw(st.sampled_from([n for n in (1, 2, 3, 4) if workers % n == 0])) if has_local_steps else 1
    setting = reference_clock.Setting(
        algorithm=name,
        seconds=draw(st.lists(st.lists(seconds, min_size=steps, max_size=steps), min_size=workers, max_size=workers)),
        rounds=[round_lengths(pairs, steps)] * workers,
        steps=[steps] * workers,
        gradient_seconds=draw(seconds),
        part_seconds=draw(st.lists(seconds, min_size=fragments, max_size=fragments)),
        final_seconds=draw(seconds),
        interference=draw(st.sampled_from([0.0, 0.25, 0.9]) | st.floats(0, 0.95)),
        coding_seconds=draw(st.just(0.0) | seconds),
        delay=draw(st.none() | st.integers(1, max(k for _, k in pairs))) if name == "cocod" else None,
        node_size=node_size,
        inside_seconds=draw(seconds),
    )
    return setting, [pairs] * workers, steps


@st.composite
def by_speed(draw: st.DrawFn) -> tuple[reference_clock.Setting, list[list[tuple[int, int]]], int]:
    """AsynLocal-SGD: every worker has periods of its own, and the same number of rounds of each."""
    workers, phases = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    counts = [draw(st.integers(1, 3)) for _ in range(phases)]
    periods = [[draw(st.integers(1, 4)) for _ in range(phases)] for _ in range(workers)]
    fragments = draw(st.integers(1, min(min(own) for own in periods)))
    rounds = [[k for k, count in zip(own, counts, strict=True) for _ in range(count)] for own in periods]
    pairs = [[(0, own[0]), *([(counts[0] * own[0], own[1])] if phases == 2 else [])] for own in periods]
    steps = [sum(own) for own in rounds]
    setting = reference_clock.Setting(
        algorithm="asynlocal",
        seconds=[draw(st.lists(seconds, min_size=n, max_size=n)) for n in steps],
        rounds=[[*own, own[-1]] for own in rounds],
        steps=steps,
        part_seconds=draw(st.lists(seconds, min_size=fragments, max_size=fragments)),
        final_seconds=draw(seconds),
        interference=draw(st.floats(0, 0.95)),
        coding_seconds=draw(st.just(0.0) | seconds),
    )
    return setting, pairs, steps[0]


def side_by_side(setting: reference_clock.Setting) -> Iterator[Array]:
    """Steps of all workers at once; up to the turn of a part, those who have none left get one that must not count."""
    if setting.algorithm != "asynlocal":
        yield from np.array(setting.seconds).T
        return
    taken, fragments = [0] * len(setting.steps), len(setting.part_seconds)
    turns = range(1, fragments + 1)
    between = [[p * k // fragments - (p - 1) * k // fragments for k in own[:-1] for p in turns] for own in setting.rounds]
    for lengths in zip(*between, strict=True):
        for j in range(max(lengths)):
            yield np.array([own[t + j] if j < k else 1e6 for own, t, k in zip(setting.seconds, taken, lengths, strict=True)])
        taken = [t + k for t, k in zip(taken, lengths, strict=True)]


def timeline_of(setting: reference_clock.Setting, pairs: list[list[tuple[int, int]]], steps: int) -> Timeline:
    ranks = range(len(setting.steps))
    course = Course(
        algorithm=setting.algorithm,
        periods=[Period.parse(own) for own in pairs],
        parcels=Parcels(
            Parcel(setting.gradient_seconds, 0, setting.coding_seconds),
            tuple(Parcel(s, 1, setting.coding_seconds) for s in setting.part_seconds),
            Parcel(setting.final_seconds, 0),
            setting.inside_seconds,
        ),
        times=side_by_side(setting),
        fragments=len(setting.part_seconds),
        delay=setting.delay,
        node_size=setting.node_size,
        interference=setting.interference,
    )
    return Timeline(course, steps, sample=SpanSample(list(ranks), range(10**6))).run()


def assert_same(setting: reference_clock.Setting, pairs: list[list[tuple[int, int]]], steps: int) -> None:
    workers, ended = reference_clock.play(setting)
    found = timeline_of(setting, pairs, steps)
    assert found.steps == list(setting.steps)
    assert found.marks.seconds == pytest.approx(workers[0].marks, rel=1e-9, abs=1e-9)
    assert found.sample is not None
    for rank, worker in enumerate(workers):
        ends = [row["end"] for row in found.sample.rows[rank] if row["name"] == "compute"]
        assert ends == pytest.approx(worker.marks, rel=1e-9, abs=1e-9)
        starts = [row["start"] for row in found.sample.rows[rank] if row["name"] == "compute"]
        assert starts == pytest.approx([0.0, *worker.marks[:-1]], rel=1e-9, abs=1e-9)
        if len(workers) > 1:
            sent = [(row["start"], row["end"]) for row in found.sample.rows[rank] if row["name"] == "communicate"]
            expected = [*worker.meetings, *((worker.joins[number], end) for number, end in ended.items())]
            assert np.array(sorted(sent)) == pytest.approx(np.array(sorted(expected)), rel=1e-9, abs=1e-9)
        assert found.fleet.exposed_seconds[rank] == pytest.approx(worker.blocked_seconds, rel=1e-9, abs=1e-9)
        if len(setting.part_seconds) == 1:
            assert found.fleet.hidden_seconds[rank] == pytest.approx(
                reference_clock.hidden_seconds(worker, ended), rel=1e-9, abs=1e-9
            )
    assert found.train_seconds == pytest.approx(max(ended.values()), rel=1e-9, abs=1e-9)
    if setting.algorithm != "asynlocal":
        slowest = [max(marks) for marks in zip(*(worker.marks for worker in workers), strict=True)]
        assert found.marks.all_seconds == pytest.approx(slowest, rel=1e-9, abs=1e-9)
        assert [found.train_seconds_after(step) for step in (0, steps)] == pytest.approx(
            [0.0, slowest[-1]], rel=1e-9, abs=1e-9
        )


@settings(max_examples=400)
@given(together())
def test_steps_taken_together_agree_with_a_clock_in_plain_python(
    case: tuple[reference_clock.Setting, list[list[tuple[int, int]]], int],
) -> None:
    assert_same(*case)


@settings(max_examples=200)
@given(by_speed())
def test_periods_by_speed_agree_with_a_clock_in_plain_python(
    case: tuple[reference_clock.Setting, list[list[tuple[int, int]]], int],
) -> None:
    assert_same(*case)


@given(st.lists(st.floats(0.01, 4), min_size=1, max_size=4), st.floats(0, 6), st.floats(0, 1), st.floats(0, 0.9))
def test_overlapped_gradients_end_so_long_before_the_last_worker(
    work: list[float], transfer: float, overlap: float, interference: float
) -> None:
    """The start that hides ``overlap`` of a transfer behind the slowest backward, found by trying."""
    longest, rate = max(work), 1 - interference

    def end_of_computing(start: float, own: float) -> float:
        alone = min(own, start)
        under = min((own - alone) / rate, transfer)
        return alone + under + own - alone - under * rate

    low, high = 0.0, longest
    for _ in range(200):
        start = (low + high) / 2
        low, high = (low, start) if end_of_computing(start, longest) - start < overlap * transfer else (start, high)
    fleet = Fleet(len(work), interference)
    flight = fleet.compute_and_join(np.array(work), Parcel(transfer, 7), overlap)
    assert flight.end == pytest.approx(high + transfer, abs=1e-9)
    assert flight.joined == pytest.approx([min(high, end_of_computing(high, own)) for own in work], abs=1e-9)
    assert fleet.now == pytest.approx([end_of_computing(high, own) for own in work], abs=1e-9)


# -------------------------------------------------------------------------------------- against the paper's formulas


def homogeneous(
    algorithm: str, *, computing: float, transfer: float, period: int, interference: float, num_rounds: int = 200
) -> Timeline:
    """Equal workers without jitter, whose last mean costs nothing."""
    sent = Parcel(transfer, 0)
    steps = period * num_rounds
    course = Course(
        algorithm=algorithm,
        periods=[Period.parse(period)] * 3,
        parcels=Parcels(sent, (sent,), Parcel(0.0, 0)),
        times=iter(np.full((steps, 3), computing)),
        interference=interference,
    )
    return Timeline(course, steps).run()


def steady_step(timeline: Timeline, period: int) -> float:
    """Of the last hundred rounds."""
    steps = 100 * period
    return (timeline.marks.seconds[-1] - timeline.marks.seconds[-1 - steps]) / steps


@given(st.floats(0.1, 3), st.floats(0, 10), st.integers(1, 6), st.floats(0, 0.9))
def test_steps_of_equal_workers_are_those_of_section_4_2(comp: float, comm: float, k: int, a: float) -> None:
    """N T_comp over each denominator of the paper's equations; where a transfer does not fit behind a round, the bound."""
    step = {
        name: steady_step(homogeneous(name, computing=comp, transfer=comm, period=k, interference=a), k) for name in FIVE
    }
    assert step["ssgd"] == pytest.approx(comp + comm)
    assert step["local"] == pytest.approx(comp + comm / k)
    assert step["asynlocal"] == pytest.approx(comp + comm / k)
    assert step["pipe"] == pytest.approx(max(comm, comp + a * comm))
    assert step["cocod"] == pytest.approx(max(comm, k * comp + a * comm) / k)
    if comm <= k * comp + a * comm:
        assert step["cocod"] == pytest.approx(comp + a * comm / k)  # TS_CoCoD as printed


def test_without_communication_all_algorithms_are_equally_fast() -> None:
    found = {homogeneous(name, computing=0.5, transfer=0.0, period=4, interference=0.5).train_seconds for name in FIVE}
    assert found == {0.5 * 800}


def test_a_slow_worker_in_the_pipeline_is_waited_for_once_a_round() -> None:
    """By hand: work of 1 and 2 s a step, a transfer of 1 s, k = 2, no interference."""
    sent = Parcel(1.0, 10)
    course = Course(
        "cocod", [Period.parse(2)] * 2, Parcels(sent, (sent,), Parcel(3.0, 20)), iter(np.array([[1.0, 2.0]] * 6))
    )
    found = Timeline(course, 6).run()
    # Round ends: the fast worker at 2, the slow one at 4: the first mean travels from 4 to 5. At 4 the fast one is at its
    # second round end and waits until 5; the slow one comes to its own at 8: the second travels from 8 to 9, and so on.
    assert found.marks.seconds == [1.0, 2.0, 3.0, 5.0, 6.0, 9.0]
    assert found.marks.all_seconds == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    # The third mean travels from 12 to 13, then the exact one takes 3 s.
    assert found.train_seconds == 16.0
    assert found.rounds == 3
    assert found.marks.sent_bytes == [0, 0, 0, 10, 10, 20]
    assert found.fleet.sent_bytes == 50
    # The fast worker: 4 to 5, 7 to 9, 9 to 13, 13 to 16; the slow one waits at the end only.
    assert found.fleet.exposed_seconds.tolist() == [10.0, 4.0]


# ------------------------------------------------------------------------------------------- what the trainer sends


def real_counts(rank: int, arguments: list[str], steps: int) -> tuple[int, int]:
    config = load_config(arguments)
    task = build_task(config)
    work = Work.of(config, task.num_train, rank)
    model = DistributedDataParallel(build_model(config, task))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sync = attach(model, optimizer, work.algorithm, weight=work.plan.weights[rank])
    inputs = task.train.inputs[: work.batch]  # type: ignore[union-attr]
    for _ in range(steps if work.algorithm.same_period else steps * work.algorithm.period.at(0)):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
    sync.finish()
    stats = sync.stats()
    sync.detach()
    return stats.rounds, stats.bytes


@pytest.mark.parametrize(
    ("num_workers", "options"),
    [
        (2, ["algorithm.name=ssgd"]),
        (2, ["algorithm.name=pipe"]),
        (2, ["algorithm.name=local", "algorithm.period=3", "model.name=small_resnet"]),
        (2, ["algorithm.name=local", "algorithm.payload=int8", "model.name=small_resnet"]),
        (2, ["algorithm.name=local", "algorithm.optimizer_state=average", "algorithm.period=3"]),
        (3, ["algorithm.name=cocod", "algorithm.period=3", "model.name=small_resnet"]),
        (2, ["algorithm.name=cocod", "algorithm.period=4", "algorithm.fragments=3"]),
        (3, ["algorithm.name=cocod", "algorithm.payload=bf16", "algorithm.period=2"]),
        (2, ["algorithm.name=asynlocal", "algorithm.period=1", "cluster.speeds=[1,2]"]),
    ],
)
def test_rounds_and_bytes_are_those_of_real_workers(num_workers: int, options: list[str]) -> None:
    steps = 13
    speeds = [1.0, 2.0] if "cluster.speeds=[1,2]" in options else [1.0] * num_workers
    cluster = Cluster(workers=[WorkerGroup(count=1, speed=speed) for speed in speeds])
    config = configured(cluster, [*TINY, *options])
    found = simulate(cluster, config, steps=steps).timeline
    real = run_workers(num_workers, real_counts, [*TINY, *options, f"cluster.num_workers={num_workers}"], steps, fresh=True)
    assert {(rounds, sent) for rounds, sent in real} == {(found.rounds, found.fleet.sent_bytes)}


def test_a_payload_of_given_size_needs_no_model() -> None:
    network = Network(latency_us=0.0, bandwidth_gbit=8.0)
    cluster = Cluster(workers=[WorkerGroup(count=4)], network=network, payload_bytes=1_000_000)
    config = configured(cluster, ["model.name=nowhere:at_all", "algorithm.name=cocod", "algorithm.fragments=4"])
    facts = task_facts(config)
    found = parcels_of(config, cluster, Work.of(config, facts.num_train, 0).algorithm, facts)
    # 2 (N - 1) / N of a megabyte at a gigabyte a second, in four parts.
    assert found.final.seconds == pytest.approx(1.5e-3)
    assert found.final.sent_bytes == 1_500_000
    assert [part.sent_bytes for part in found.parts] == pytest.approx([375_000] * 4, rel=0.01)
    assert sum(part.seconds for part in found.parts) == pytest.approx(1.5e-3)


class Sent:
    """By hand: what each of two workers sends of a model cut into parts."""

    def __init__(self, *options: str, algorithm: str = "local") -> None:
        cluster = Cluster(network=Network(latency_us=1000.0, bandwidth_gbit=0.008))
        config = configured(cluster, [*TINY, "algorithm.period=4", "model.name=small_resnet", *options], algorithm)
        facts = task_facts(config)
        model = build_model(config, facts)
        self.buffers = sum(4 * buffer.numel() for buffer in model.buffers() if buffer.is_floating_point())
        self.sizes = [parameter.numel() for parameter in model.parameters()]
        kind = Work.of(config, facts.num_train, 0).algorithm
        self.whole = parcels_of(config, cluster, kind, facts)
        kind.fragments = 3
        self.cut = parcels_of(config, cluster, kind, facts)

    def bytes_of_parts(self) -> list[int]:
        return [part.sent_bytes for part in self.cut.parts]


def test_buffers_of_a_blocking_round_travel_with_part_0_alone() -> None:
    with_buffers, without = Sent(algorithm="local"), Sent(algorithm="cocod")
    assert with_buffers.buffers > 0
    # Two workers: a ring sends the payload once.
    assert sum(without.bytes_of_parts()) == 4 * sum(without.sizes)
    differences = [a - b for a, b in zip(with_buffers.bytes_of_parts(), without.bytes_of_parts(), strict=True)]
    assert differences == [with_buffers.buffers, 0, 0]
    assert with_buffers.cut.final == with_buffers.whole.final


def test_averaged_momentum_travels_with_its_own_part() -> None:
    plain, averaged = Sent(), Sent("algorithm.optimizer_state=average", "optimizer.momentum=0.9")
    first, *others = plain.bytes_of_parts()
    parameters = [first - plain.buffers, *others]
    assert averaged.bytes_of_parts() == [a + b for a, b in zip(plain.bytes_of_parts(), parameters, strict=True)]


@pytest.mark.parametrize(("payload", "of_float32"), [("bf16", 1 / 2), ("int8", 1 / 4)])
@pytest.mark.parametrize("algorithm", ["local", "cocod"])
def test_parts_are_coded_each(algorithm: str, payload: str, of_float32: float) -> None:
    """Parts together send what the whole does, but for scales and padding; buffers are never coded."""
    full, coded = Sent(algorithm=algorithm), Sent(f"algorithm.payload={payload}", algorithm=algorithm)
    buffers = full.buffers if algorithm == "local" else 0
    uncoded = [buffers, 0, 0]
    for own, plain, extra in zip(coded.bytes_of_parts(), full.bytes_of_parts(), uncoded, strict=True):
        assert own - extra == pytest.approx(of_float32 * (plain - extra), rel=0.02)
    assert sum(coded.bytes_of_parts()) == pytest.approx(coded.whole.parts[0].sent_bytes, rel=0.002)
    # A megabyte a second, and a message of a coded exchange takes a millisecond to begin with, as any does.
    assert sum(part.seconds for part in coded.cut.parts) < sum(part.seconds for part in full.cut.parts)


def test_local_sgd_waits_for_every_part_at_its_turn() -> None:
    """By hand: rounds of 4 steps of 1 s; part 1, of 2 s, after 2 of them, part 0, of 5 s, at their end."""
    course = Course(
        algorithm="local",
        periods=[Period.parse(4)] * 2,
        parcels=Parcels(Parcel(0.0, 0), (Parcel(5.0, 50), Parcel(2.0, 20)), Parcel(7.0, 70)),
        times=iter(np.ones((8, 2))),
        fragments=2,
    )
    found = Timeline(course, 8).run()
    assert found.marks.seconds == [1.0, 4.0, 5.0, 11.0, 12.0, 15.0, 16.0, 22.0]
    assert found.marks.rounds == [0, 0, 0, 1, 1, 1, 1, 2]
    assert found.marks.sent_bytes == [0, 20, 20, 70, 70, 90, 90, 140]
    assert found.train_seconds == 29.0
    assert found.fleet.exposed_seconds.tolist() == [21.0, 21.0]
    assert found.fleet.hidden_seconds.tolist() == [0.0, 0.0]


def test_fragments_need_as_many_parameters() -> None:
    cluster = Cluster()
    config = configured(cluster, [*TINY, "algorithm.name=cocod", "algorithm.period=9", "algorithm.fragments=9"])
    with pytest.raises(ConfigError, match=r"algorithm.fragments=9: is more than the model's 6 trainable parameters"):
        simulate(cluster, config)


# --------------------------------------------------------------------------------------------------- compute times


def test_jitter_and_stragglers_have_the_mean_and_spread_that_were_asked_for() -> None:
    cluster = Cluster(
        step_seconds=0.2,
        workers=[WorkerGroup(count=200, jitter=0.3), WorkerGroup(count=200, speed=2.0)],
        stragglers=Stragglers(probability=0.02, factor=5.0),
    )
    times = step_times(cluster, [32] * 400, seed=3)
    rows = np.array([next(times) for _ in range(500)])
    steady = rows[:, 200:]
    assert set(np.unique(steady).round(9)) == {0.1, 0.5}
    assert (steady > 0.3).mean() == pytest.approx(0.02, rel=0.1)
    calm = replace(cluster, stragglers=Stragglers())
    times = step_times(calm, [32] * 400, seed=3)
    jittery = np.array([next(times) for _ in range(500)])[:, :200]
    assert jittery.mean() == pytest.approx(0.2, rel=0.01)
    assert jittery.std() / jittery.mean() == pytest.approx(0.3, rel=0.02)
    again = step_times(cluster, [32] * 400, seed=3)
    assert (rows == np.array([next(again) for _ in range(500)])).all()
    other = step_times(cluster, [32] * 400, seed=4)
    assert (rows[0] != next(other)).any()


def test_batches_in_proportion_take_equally_long_but_for_what_is_fixed() -> None:
    cluster = Cluster(step_seconds=0.1, fixed_seconds=0.02, workers=[WorkerGroup(speed=1.0), WorkerGroup(speed=2.0)])
    assert next(step_times(cluster, [32, 64], 0)).tolist() == pytest.approx([0.1, (0.02 + 0.16) / 2])


# --------------------------------------------------------------------------------------------------------- a whole run


def small_cluster(**changes: Any) -> Cluster:
    network = Network(latency_us=100.0, bandwidth_gbit=0.05)
    groups = [WorkerGroup("slow", 2, 1.0, jitter=0.2), WorkerGroup("fast", 2, 2.0, jitter=0.2)]
    return replace(Cluster("small", step_seconds=0.01, workers=groups, network=network, interference=0.2), **changes)


@pytest.mark.parametrize("name", FIVE)
def test_the_same_seed_gives_the_same_run(name: str) -> None:
    cluster = small_cluster()
    first, again = (simulate(cluster, configured(cluster, [*TINY, "seed=3"], name)).timeline for _ in range(2))
    other = simulate(cluster, configured(cluster, [*TINY, "seed=4"], name)).timeline
    assert first.marks == again.marks
    assert first.marks != other.marks


def test_the_plan_is_the_trainers() -> None:
    cluster = small_cluster()
    options = [*TINY, "cluster.proportional=true", "algorithm.period=[[0, 1], [1, 3]]"]
    config = configured(cluster, options, "cocod")
    found = simulate(cluster, config)
    # 512 samples, batches 4, 4, 8, 8: 21 steps an epoch; rounds of 1 in the first epoch, of 3 in the second.
    assert found.work.plan.batches == (4, 4, 8, 8)
    assert found.timeline.steps == [42] * 4
    assert found.timeline.rounds == 21 + 7
    assert found.num_samples == 42 * 24
    by_speed = simulate(cluster, configured(cluster, [*TINY, "algorithm.period=2"], "asynlocal"))
    # k = 2, 2, 4, 4: 48 samples a round, 10 rounds an epoch.
    assert by_speed.timeline.steps == [40, 40, 80, 80]
    assert by_speed.timeline.rounds == 20


@pytest.mark.parametrize("options", [["algorithm.period=3"], ["algorithm.payload=int4"], ["algorithm.payload=topk:0.02"]])
def test_nodes_send_between_them_what_they_would_for_real(options: list[str]) -> None:
    """What is learnt is driven by the objects of a real run; the timeline only knows sizes."""
    cluster = small_cluster()
    config = configured(cluster, [*TINY, "cluster.workers_per_replica=2", *options], "cocod")
    learning = Learning(config)
    assert len(list(learning.rows())) > 0
    timeline = simulate(cluster, config).timeline
    assert timeline.fleet.sent_bytes == learning.outcome().comm_bytes
    assert timeline.rounds == learning.outcome().rounds


def test_what_a_node_takes_by_hand() -> None:
    wires = Network(latency_us=1e5, bandwidth_gbit=8e-3, workers_per_node=2, inner=Wire(latency_us=1e4, bandwidth_gbit=8e-2))
    cluster = Cluster(workers=[WorkerGroup(count=6)], network=wires)  # 1 MB/s between nodes, 10 MB/s inside
    # 2 messages of half a payload in a node of two; 4 of a third of it between three nodes, then one half is gathered.
    assert cluster.inside_seconds(6e6, 2) == pytest.approx(2 * (0.01 + 0.3))
    assert cluster.between_seconds(6e6, 2) == pytest.approx(4 * (0.1 + 2.0) + (0.01 + 0.3))
    assert cluster.inside_seconds(6e6, 1) == 0
    assert cluster.between_seconds(6e6, 1) == cluster.allreduce_seconds(6e6)
    # A node of three that no machine holds: its workers have no faster wire, and each link is shared by two of them.
    assert cluster.inside_seconds(6e6, 3) == pytest.approx(4 * (0.1 + 2.0))
    assert cluster.between_seconds(6e6, 3) == pytest.approx(2 * (0.1 + 2.0) + 2 * (0.1 + 2.0))
    assert cluster.between_seconds(6e6, 6) == 0
    # Measured sums over all workers say how much slower links are than their file says.
    slower = replace(cluster, network=replace(wires, allreduce=[[1e6, 1.0], [6e6, 2 * cluster.allreduce_seconds(6e6)]]))
    assert slower.inside_seconds(6e6, 2) == pytest.approx(2 * cluster.inside_seconds(6e6, 2))
    assert slower.between_seconds(6e6, 2) == pytest.approx(2 * cluster.between_seconds(6e6, 2))


def test_speedup_is_that_over_one_worker_of_speed_one() -> None:
    free = small_cluster(
        network=Network(latency_us=0.0, bandwidth_gbit=1e9), workers=[WorkerGroup(count=2), WorkerGroup(count=2, speed=2.0)]
    )
    config = configured(free, [*TINY, "batch_size=32", "cluster.proportional=true"], "cocod")
    found = simulate(free, config)
    assert found.speedup == pytest.approx(6.0, rel=1e-6)  # the sum of all speeds
    assert found.step_seconds == pytest.approx(0.01, rel=1e-6)
    assert found.exposed_share == pytest.approx(0.0, abs=1e-6)
    alone = replace(free, workers=[WorkerGroup(count=1)])
    assert simulate(alone, configured(alone, TINY, "pipe")).speedup == pytest.approx(1.0)


def test_steps_cut_the_schedule_or_make_it_longer() -> None:
    cluster = Cluster()  # 512 samples, two batches of 4: 64 steps an epoch
    options = [*TINY, "schedule.epochs=4", "schedule.decay_epochs=[1,3]", "algorithm.period=[[0, 1], [2, 4]]"]
    short = configured(cluster, options, "cocod", steps=70)
    assert (short.schedule.epochs, short.schedule.decay_epochs, short.period_by_epoch) == (2, [1], [(0, 1)])
    assert simulate(cluster, short, steps=70).timeline.num_steps == 70
    long = configured(cluster, options, "cocod", steps=64 * 9 + 1)
    assert (long.schedule.epochs, long.schedule.decay_epochs, long.period_by_epoch) == (10, [1, 3], [(0, 1), (2, 4)])
    assert simulate(cluster, long, steps=577).timeline.num_steps == 577
    mixed = small_cluster()
    by_speed = simulate(mixed, configured(mixed, [*TINY, "algorithm.period=2"], "asynlocal", 5), steps=5).timeline
    assert by_speed.steps == [6, 6, 12, 12], "workers with periods of their own end where a round does"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("emulate.slowdown=[1,1,2,2]", "emulate: slowdown [1, 1, 2, 2] is for real runs; describe workers and network"),
        ("algorithm.name=cocod_accel:Algorithm", "algorithm.name=cocod_accel:Algorithm: needs a class attribute name"),
        ("cluster.replan_epochs=1", "cluster.replan_epochs=1: is not simulated; use null"),
        ("cluster.speeds=measure", None),
        ("cluster.num_workers=7", None),
    ],
)
def test_what_cannot_be_simulated_is_one_line(option: str, said: str | None) -> None:
    options = [*TINY, "cluster.proportional=true", "algorithm.name=cocod", option]
    if said is None:  # the cluster file says it
        assert configured(small_cluster(), options).speeds == [1.0, 1.0, 2.0, 2.0]
    else:
        with pytest.raises(ConfigError) as caught:
            configured(small_cluster(), options)
        assert str(caught.value).startswith(said)


def test_a_cluster_is_told_by_all_that_makes_its_times() -> None:
    cluster = small_cluster()
    assert title(cluster) == title(replace(cluster.resized(40), description="larger"))
    assert title(cluster).startswith("small ")
    assert title(cluster) != title(replace(cluster, interference=0.3))
    assert configured(cluster, TINY).clock == "simulated"
    assert Config().clock == "real"
    assert load_config(["emulate.slowdown=[1,2]"]).clock == "emulated"


# ------------------------------------------------------------------------------------------------------------ spans


def test_spans_are_of_some_steps_of_some_workers() -> None:
    cluster = Cluster(workers=[WorkerGroup(count=500), WorkerGroup(count=2), WorkerGroup(count=522)])
    ranks = chosen_ranks(cluster)
    assert len(ranks) == 16
    assert {0, 500, 502} <= set(ranks)
    assert chosen_ranks(Cluster(workers=[WorkerGroup(count=3)])) == [0, 1, 2]
    assert chosen_ranks(Cluster(workers=[WorkerGroup(count=1)] * 40), most=4) == [0, 1, 2, 3]
    assert middle_window(100, 10) == range(45, 55)
    assert middle_window(3, 10) == range(3)
    small = small_cluster()
    sample = simulate(small, configured(small, TINY, "cocod"), span_steps=10).timeline.sample
    assert sample is not None
    for rank, rows in sample.rows.items():
        steps = [row["step"] for row in rows if row["name"] == "compute"]
        assert steps == list(range(28, 38))  # of 64
        assert all(row["rank"] == rank and row["simulated"] and row["end"] >= row["start"] for row in rows)


# ------------------------------------------------------------------------------------------------------- run folders


def test_a_folder_holds_the_trainers_rows_marked_as_simulated(tmp_path: Path) -> None:
    cluster = small_cluster()
    config = configured(cluster, [*TINY, f"output={tmp_path}", "logging.every_steps=16"], "cocod")
    run = simulate(cluster, config, span_steps=4)
    folder = write(run)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["step"]) for row in rows] == [("plan", 0), *(("train", s) for s in (16, 32, 48, 64))]
    assert all(row["simulated"] for row in rows)
    assert [row["epoch"] for row in rows[1:]] == [1, 1, 2, 2]
    assert rows[1]["train_seconds"] == run.timeline.marks.seconds[15]
    assert rows[1]["samples_per_second"] == pytest.approx(16 * 16 / rows[1]["train_seconds"])
    assert rows[-1]["rounds"] == 64 // 5
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["clock"], summary["best_accuracy"], summary["final_accuracy"]) == ("simulated", None, None)
    assert set(summary["time_to_accuracy"].values()) == {None}
    assert summary["samples_per_second"] == pytest.approx(64 * 16 / summary["train_seconds"])
    assert summary["emulated"] == f"cluster {title(cluster)}"
    assert load_cluster(folder / "cluster.yaml") == cluster
    assert load_config([str(folder / "config.yaml")]) == config
    assert len(list((folder / "spans").iterdir())) == 4
    assert write(run) != folder, "an earlier run is never written over"


def test_what_was_learnt_gets_the_seconds_at_which_it_would_have_been(tmp_path: Path) -> None:
    cluster = small_cluster()
    config = configured(cluster, [*TINY, f"output={tmp_path}", "evaluation.targets=[0.5,0.7,0.9]"], "local")
    run = simulate(cluster, config)
    learning = [
        Learnt("train", 20, {"epoch": 1, "loss": 2.0, "drift": 0.1}),
        Learnt("eval", 32, {"epoch": 1, "accuracy": 0.75, "test_loss": 1.0, "train_loss": 2.0}),
        Learnt("eval", 64, {"epoch": 2, "accuracy": 0.6, "test_loss": 1.0, "train_loss": 1.5}),
    ]
    folder = write(run, learning)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    assert rows[0]["train_seconds"] == run.timeline.marks.seconds[19]
    assert (rows[0]["loss"], rows[0]["rounds"]) == (2.0, 4)
    assert rows[1]["train_seconds"] == run.timeline.train_seconds_after(32)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["best_accuracy"], summary["final_accuracy"]) == (0.75, 0.6)
    first = run.timeline.train_seconds_after(32)
    assert summary["time_to_accuracy"] == {"0.5": first, "0.7": first, "0.9": None}
    assert math.isfinite(summary["train_seconds"])


# ---------------------------------------------------------------------------------------------------- the command line


def cluster_file(tmp_path: Path) -> str:
    save_cluster(small_cluster(), tmp_path / "small.yaml")
    return str(tmp_path / "small.yaml")


def test_the_command_prints_a_table_and_leaves_folders_that_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["simulate", cluster_file(tmp_path), *TINY, "--out", str(out), "algorithm.period=4"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "simulated: small, 4 workers, 64 steps"
    assert [line.split()[0] for line in said[3:8]] == list(FIVE)
    assert len(list(out.iterdir())) == 5
    assert cli.main(["compare", str(out), "--out", str(tmp_path / "page")]) == 0
    table = capsys.readouterr().out
    assert "cocod [simulated]" in table
    assert "ms/step" in table
    assert "best %" not in table
    assert "simulated without learning" in table
    page = (tmp_path / "page" / "report.html").read_text()
    assert "simulated without learning" in page
    assert (tmp_path / "page" / "timeline.png").is_file()
    assert not (tmp_path / "page" / "accuracy_over_time.png").exists()
    assert cli.main(["watch", str(next(out.glob("cocod*")))]) == 0
    assert "of simulated training" in capsys.readouterr().out
    assert cli.main(["train", "--dry-run", str(next(out.glob("cocod*")) / "config.yaml")]) == 2
    assert "emulate.cluster=small" in capsys.readouterr().err


def test_runs_of_time_alone_stand_beside_runs_that_learnt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = small_cluster()
    run = simulate(cluster, configured(cluster, [*TINY, f"output={tmp_path / 'runs'}"], "cocod"))
    write(run)
    write(run, [Learnt("eval", 64, {"epoch": 2, "accuracy": 0.8, "test_loss": 1.0, "train_loss": 1.5})])
    assert cli.main(["compare", str(tmp_path / "runs")]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert "s to 80%" in rows[0]
    learnt, alone = rows[2:4]
    assert " 80.00 " in learnt
    assert "never" not in alone
    assert alone.split()[-9:-4] == ["-", "-", "-", "-", f"{run.timeline.train_seconds:.1f}"]
    assert not any("no configuration reaches" in row for row in rows)


def test_the_command_takes_algorithms_workers_and_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = cluster_file(tmp_path)
    base = ["simulate", file, *TINY, "--out", str(tmp_path / "out"), "--steps", "9", "--spans", "0"]
    assert cli.main([*base, "--algorithms", "cocod,ssgd", "--workers", "8"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "simulated: small, 8 workers, 9 steps"
    assert [line.split()[0] for line in said[3:5]] == ["cocod", "ssgd"]
    assert not list((tmp_path / "out").glob("*/spans/*"))
    assert cli.main([*base, "algorithm.name=local"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[3:4]] == ["local"]
    assert cli.main([*base, "cluster.proportional=true", "algorithm.fragments=2", "name=mine"]) == 0
    both = capsys.readouterr()
    assert [line.split()[0] for line in both.out.splitlines()[3:5]] == ["local", "cocod"]
    assert [line.split(":")[1].split("=")[0].strip() for line in both.err.splitlines()] == [
        "algorithm.fragments", "algorithm.fragments", "cluster.proportional"
    ]  # fmt: skip
    assert (tmp_path / "out" / "mine-cocod").is_dir()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.yaml"], "nowhere.yaml: no such file"),
        (["FILE", "--algorithms", "cocod,sgd"], "--algorithms=sgd: unknown value; did you mean ssgd?"),
        (["FILE", "--workers", "0"], "--workers=0: must be at least 1"),
        (["FILE", "--steps", "0"], "--steps=0: must be at least 1"),
        (["FILE", "--spans", "-1"], "--spans=-1: must be at least 0"),
        (["FILE", "batchsize=3"], "override batchsize: unknown key batchsize; did you mean batch_size?"),
        (["FILE", "batch_size=3000"], "batch_size=3000: "),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    file = cluster_file(tmp_path)
    given = [file if argument == "FILE" else argument for argument in arguments]
    assert cli.main(["simulate", *given, "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {said}")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()
