"""Mixed hardware: batches by speed in any loop, exact; speeds that are measured, change, or are emulated."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from cocod_accel import ALGORITHMS, attach, measure_speeds, pass_through, plan_workers
from cocod_accel.comm.emulated import EmulatedLink, Link
from cocod_accel.comm.groups import TorchComm, default_group, private_group
from cocod_accel.comm.handles import SoloComm, ring_bytes
from cocod_accel.config.loading import load_config
from cocod_accel.report import read_summary
from cocod_accel.report.groups import compare
from cocod_accel.runs.reading import read_run
from cocod_accel.tasks import build_model, build_task
from cocod_accel.trainer.pace import Pace
from cocod_accel.trainer.schedule import learning_rate
from cocod_accel.trainer.trainer import Trainer
from cocod_accel.trainer.work import Work
from tests import loops, reference
from tests.test_exactness import assert_traces_equal
from tests.test_trainer import ROOT, TINY, as_launched, rows_of
from tests.workers import run_outcomes, run_workers

NUM_SAMPLES = 53
SPEEDS = [3.0, 1.0]
BASE = 2


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randn(NUM_SAMPLES, 3, generator=generator, dtype=torch.float64))


def batches_of(rank: int, epochs: int, across: bool) -> list[tuple[Tensor, Tensor]]:
    """What a worker is meant to train on, straight from the plan."""
    plan = plan_workers(SPEEDS, NUM_SAMPLES, base_batch=BASE)
    sampler = plan.sampler(rank, seed=4, across=across)
    chosen = [part for epoch in range(epochs) for part in sampler.epoch(epoch).split(plan.batches[rank])]
    return [(data().tensors[0][part], data().tensors[1][part]) for part in chosen]


# ------------------------------------------------------------------------- the library in loops of one's own


def torch_loop(rank: int, name: str, across: bool) -> Any:
    plan = plan_workers(SPEEDS, NUM_SAMPLES, base_batch=BASE)
    loader = DataLoader(data(), batch_sampler=plan.sampler(rank, seed=4, across=across))
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["momentum"](model)
    attach(model, optimizer, loops.make_algorithm(name, 2), weight=plan.weights[rank])
    trace = []
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loops.loss_of(model, inputs, targets).backward()
            optimizer.step()
            trace.append(loops.snapshot(model))
    return trace


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("name", ["ssgd", "pipe", "local", "cocod"])
def test_batches_three_to_one_equal_the_serial_reference(name: str, across: bool) -> None:
    traces = run_workers(2, torch_loop, name, across)
    expected = reference.run(
        name,
        loops.make_model(),
        loops.OPTIMIZERS["momentum"],
        [batches_of(rank, 2, across) for rank in range(2)],
        loops.loss_of,
        [6, 2],
        [2, 2],
    )
    assert_traces_equal(traces, expected, f"{name}, {across=}")


def test_weighted_ssgd_is_one_process_on_the_whole_batch() -> None:
    traces = run_workers(2, torch_loop, "ssgd", False)
    model = loops.make_model()
    optimizer = loops.OPTIMIZERS["momentum"](model)
    for step, parts in enumerate(zip(batches_of(0, 2, False), batches_of(1, 2, False), strict=True)):
        optimizer.zero_grad()
        loops.loss_of(model, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])).backward()
        optimizer.step()
        for ours, theirs in zip(traces[0][step], loops.snapshot(model), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def accelerate_loop(rank: int) -> Any:
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # as a launcher does
    from accelerate.accelerator import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    plan = plan_workers(SPEEDS, NUM_SAMPLES, base_batch=BASE)
    numbered = TensorDataset(torch.arange(NUM_SAMPLES))
    loader = pass_through(DataLoader(numbered, batch_sampler=plan.sampler(rank, seed=4)), accelerator)
    model = nn.Linear(1, 1)
    model, optimizer, prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    assert prepared is loader, "accelerate has taken the loader for one to be dealt"
    epochs, steps = [], 0
    for _ in range(3):
        seen = []
        for (numbers,) in prepared:
            with accelerator.accumulate(model):
                accelerator.backward(model(numbers[:, None].float()).mean())
                optimizer.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients
            seen.append(numbers.tolist())
        epochs.append(seen)
    return epochs, steps, len(prepared)


def test_accelerate_leaves_a_workers_own_batches_alone_and_sees_where_they_end() -> None:
    """It would notice a change of the private flag: FACTS of accelerate 1.15."""
    plan = plan_workers(SPEEDS, NUM_SAMPLES, base_batch=BASE)
    results = run_workers(2, accelerate_loop)
    for rank, (epochs, steps, length) in enumerate(results):
        sampler = plan.sampler(rank, seed=4)
        assert epochs == [[part.tolist() for part in sampler.epoch(e).split(plan.batches[rank])] for e in range(3)]
        assert length == plan.steps[rank] == 6
        assert steps == 3 * 2, "6 batches in groups of 4 are 2 steps; without an end the last 2 batches would be lost"
    first = [index for epochs, _, _ in results for batch in epochs[0] for index in batch]
    assert len(first) == len(set(first)) == 48


# --------------------------------------------------------------------------------------- measuring speeds


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def measured(rank: int) -> Any:
    clock = FakeClock()
    lengths = iter([9.0, 9.0, 9.0, *([0.1, 0.1, 5.0] * 1000)])  # warm-up is slow, and so is every third step

    def step() -> None:
        clock.now += next(lengths) * (1 if rank == 0 else 3)

    return measure_speeds(step, min_steps=10, min_seconds=0.0, clock=clock)


def test_speeds_are_medians_without_the_warm_up_and_the_same_everywhere() -> None:
    first, second = run_workers(2, measured)
    assert first == second
    assert first.speeds == (3.0, 1.0)
    assert first.step_seconds == pytest.approx((0.1, 0.3))
    assert min(first.num_steps) >= 10


def failing_measure(rank: int, when: int) -> None:
    clock, count = FakeClock(), 0

    def step() -> None:
        nonlocal count
        count += 1
        clock.now += 1.0
        if rank == 1 and count == when:
            raise ArithmeticError("no such kernel")

    measure_speeds(step, clock=clock)


@pytest.mark.parametrize("when", [2, 8])
def test_what_fails_on_one_worker_while_measuring_is_heard_by_all(when: int) -> None:
    outcomes = run_outcomes(2, failing_measure, when, seconds=40, fresh=True)
    line = "speeds could not be measured; rank 1: ArithmeticError: no such kernel"
    assert [outcome.error and outcome.error[:2] for outcome in outcomes] == [("RuntimeError", line)] * 2


def test_a_stretched_step_takes_so_many_times_its_computation() -> None:
    pace = Pace(is_on=True, slowdown=3.0, is_busy=True)
    pace.begin(lambda: 1.0)
    begin = time.perf_counter()
    while time.perf_counter() < begin + 0.02:
        pass
    stretched = pace.end(lambda: 1.015)  # 15 of the 20 ms were blocked, and are not stretched
    assert stretched is not None
    computed = stretched[0] - begin - 0.015
    assert stretched[1] - stretched[0] >= 2 * computed * 0.999
    assert pace.seconds[0] >= 3 * computed * 0.999
    assert Pace(is_on=False, slowdown=3.0).end() is None


# ------------------------------------------------------------------------------------------ emulated link


def sums_on_a_slow_link(rank: int) -> Any:
    link = Link(bandwidth_mbit=8, latency_ms=100)
    slow = EmulatedLink(TorchComm(private_group(default_group())), link)
    first, second = torch.full((50_000,), float(rank + 1)), torch.full((3,), 10.0 * (rank + 1))
    handles = [slow.launch([first]), slow.launch([second])]
    for handle in handles:
        handle.poll()
    early = [handle.is_complete for handle in handles]
    returned = time.perf_counter()
    for handle in handles:
        handle.wait()
    took = returned - handles[0].start.seconds
    ends, num_bytes = [handle.end.seconds for handle in handles], [handle.num_bytes for handle in handles]
    return first[0].item(), second[0].item(), early, took, ends, num_bytes


@pytest.mark.alone
def test_an_emulated_link_queues_transfers_in_the_background_alike_on_all_workers() -> None:
    results = run_workers(2, sums_on_a_slow_link)
    assert ring_bytes([torch.zeros(50_000)], 2) == 200_000
    for one, other, early, launching, ends, num_bytes in results:
        assert (one, other) == (3.0, 30.0)
        assert num_bytes == [200_000, 12]
        assert early == [False, False], f"complete after {launching} s"
        # 0.2 s for 200 kB at 8 Mbit/s and 2 messages of 0.1 s each; then 0.2 s more for the next one.
        assert ends[1] - ends[0] >= 0.2 * 0.999
    assert results[0][4] == pytest.approx(results[1][4], abs=0.05), "workers share a clock, and agree on the ends"


def test_the_time_of_a_ring() -> None:
    assert Link(100, 1).seconds(num_bytes=12_500_000, num_workers=4) == pytest.approx(1.0 + 6e-3)
    assert Link(None, 5).seconds(10**9, 2) == pytest.approx(0.01)
    assert EmulatedLink(SoloComm(), Link(1, 1)).launch([torch.zeros(9)]).num_bytes == 0


def on_a_link(rank: int, name: str, slow: bool) -> Any:
    model = DistributedDataParallel(loops.make_model())
    optimizer = loops.OPTIMIZERS["momentum"](model)
    sync = attach(model, optimizer, loops.make_algorithm(name, 2), weight=1)
    if slow:
        sync.control.emulate_link(Link(bandwidth_mbit=None, latency_ms=3))
    for step in range(6):
        optimizer.zero_grad()
        loops.loss_of(model, *loops.make_batch(rank, step)).backward()
        optimizer.step()
    sync.finish()
    stats = sync.stats()
    return loops.snapshot(model), stats.rounds, stats.bytes, stats.exposed_seconds + stats.hidden_seconds


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_an_emulated_link_changes_time_and_nothing_else(name: str) -> None:
    fast, slow = run_workers(2, on_a_link, name, False), run_workers(2, on_a_link, name, True)
    for (ours, *counts, _), (theirs, *others, seconds) in zip(fast, slow, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert counts == others
        assert seconds >= 3 * 2 * 0.003 * 0.999, "at least three collectives of two messages"


# -------------------------------------------------------------------------------------------- the trainer


def mixed_run(tmp_path: Path, name: str, *overrides: str) -> Path:
    arguments = [str(ROOT / "configs/quickstart.yaml"), *TINY, "logging.trackers=[]", f"output={tmp_path}", f"name={name}"]
    assert run_workers(2, as_launched, [*arguments, *overrides], fresh=True) == [0, 0]
    return tmp_path / name


def test_measured_speeds_are_kept_and_measuring_leaves_no_trace(tmp_path: Path) -> None:
    """A run from the speeds of another is the same run, bit for bit."""
    measure = ["cluster.speeds=measure", "cluster.measure_seconds=0.2", "emulate.slowdown=[4, 1]"]
    first = mixed_run(tmp_path, "first", "cluster.proportional=true", *measure)
    saved = json.loads((first / "speeds.json").read_text())
    assert saved["speeds"][0] == 1.0 < saved["speeds"][1]
    assert saved["emulated"] == "slowdown [4, 1]"
    assert load_config([str(first / "config.yaml")]).cluster.speeds == saved["speeds"]
    second = mixed_run(tmp_path, "second", "cluster.proportional=true", f"cluster.speeds={first / 'speeds.json'}")
    summaries = [read_summary(run) for run in (first, second)]
    assert len({summary["model_digest"] for summary in summaries}) == 1
    assert summaries[0]["batches"][1] > summaries[0]["batches"][0] == 8
    # Both say what they were: one emulated a slow worker, the other only used its speeds.
    assert [summary["clock"] for summary in summaries] == ["emulated", "real"]
    compared = compare([read_run(run) for run in (first, second)])
    assert {group.label.split(" slowdown=")[0] for group in compared.groups} == {"cocod + PS"}
    assert any(note.startswith("emulated (slowdown [4, 1]): cocod + PS") for note in compared.notes)


def test_an_emulated_run_says_so_in_every_row(tmp_path: Path) -> None:
    run = mixed_run(tmp_path, "slow", "emulate.slowdown=[1, 2]", "emulate.link={bandwidth_mbit: 500, latency_ms: 0.1}")
    files = [run / "metrics.jsonl", *(run / "spans").glob("*.jsonl")]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert all(row["emulated"] is True for row in rows)
    assert {row["name"] for row in rows if row.get("rank") == 1} == {
        "compute",
        "stretch",
        "communicate",
        "wait",
        "checkpoint",
    }
    assert {row["name"] for row in rows if row.get("rank") == 0} == {"compute", "communicate", "wait", "checkpoint"}
    assert read_summary(run)["emulated"] == "slowdown [1, 2]; link 500 Mbit/s, 0.1 ms"


@pytest.mark.parametrize("shuffle", ["within", "across"])
def test_a_global_batch_is_kept(shuffle: str, tmp_path: Path) -> None:
    overrides = ["cluster.global_batch=21", "cluster.speeds=[1, 2.1]", "cluster.proportional=true"]
    run = mixed_run(tmp_path, "kept", *overrides, f"cluster.shuffle={shuffle}")
    summary = read_summary(run)
    assert summary["batches"] == [7, 14]
    assert summary["steps"] == 2 * (512 // 21)
    (last,) = rows_of(run, "train")[-1:]
    assert last["learning_rate"] == pytest.approx(0.02 * 21 / 8)


def replanned(rank: int, arguments: list[str], seconds: list[list[float]]) -> Any:
    """Train with step times that are given; the model at the end."""
    times = iter(seconds[rank])
    Pace.median_seconds = lambda self: next(times)  # type: ignore[method-assign]
    trainer: list[Any] = []
    run = Trainer.run

    def remember(self: Trainer) -> Any:
        trainer.append(self)
        return run(self)

    Trainer.run = remember  # type: ignore[method-assign]
    assert as_launched(rank, arguments) == 0
    return [p.detach().clone() for p in trainer[0].model.parameters()]


@pytest.mark.parametrize("name", ["ssgd", "local", "cocod"])
def test_replanned_training_equals_the_serial_reference(name: str, tmp_path: Path) -> None:
    """Worker 0 is found 3 times slower after the first epoch, as it was before the third, and hardly slower then."""
    overrides = [
        f"algorithm.name={name}", "algorithm.period=3", "optimizer.momentum=0", "optimizer.weight_decay=0",
        "schedule.epochs=4", "schedule.warmup_epochs=0", "cluster.speeds=[1, 1]", "cluster.proportional=true",
        "cluster.replan_epochs=1",
    ]  # fmt: skip
    arguments = [str(ROOT / "configs/quickstart.yaml"), *TINY, "logging.trackers=[]", f"output={tmp_path}", "name=moved"]
    arguments += overrides
    seconds = [[3.0, 1.0, 1.04], [1.0, 3.0, 1.0]]
    models = run_workers(2, replanned, arguments, seconds, fresh=True)
    rows = rows_of(tmp_path / "moved", "plan")
    assert [(row["epoch"], row["batches"], row["speeds"]) for row in rows] == [
        (0, [8, 8], [1.0, 1.0]),
        (1, [4, 12], [1.0, 3.0]),
        (2, [8, 8], [1.0, 1.0]),
    ]

    config = load_config(arguments)
    torch.manual_seed(config.seed)
    task = build_task(config)
    model = build_model(config, task)
    rate = config.optimizer.learning_rate * 2
    images: Any = task.train
    for epochs, speeds in (([0], [1, 1]), ([1], [1, 3]), ([2, 3], [1, 1])):
        plan = plan_workers(speeds, task.num_train, base_batch=8, global_batch=16)
        assert plan.steps == (32, 32)
        supply = []
        for rank in range(2):
            sampler = plan.sampler(rank, seed=config.seed)
            parts = [part for epoch in epochs for part in sampler.epoch(epoch).split(plan.batches[rank])]
            supply.append([images.batch(part, torch.device("cpu"), None) for part in parts])
        trace = reference.run(
            name,
            model,
            lambda m: torch.optim.SGD(m.parameters(), lr=rate),
            supply,
            lambda m, x, y: nn.functional.cross_entropy(m(x), y),
            plan.batches,
            [3, 3],
        )
        ends = []
        for worker in trace:
            end = build_model(config, task)
            reference.assign(end, worker[-1])
            ends.append(end)
        reference.assign(model, reference.weighted_mean(ends, reference.shares(plan.batches)))
    for ours in models:
        for parameter, expected in zip(ours, model.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected.detach(), rtol=1e-4, atol=1e-6)


def test_replanning_follows_a_worker_that_becomes_slower(tmp_path: Path) -> None:
    run = mixed_run(
        tmp_path, "follow", "cluster.speeds=[1, 1]", "cluster.proportional=true", "cluster.replan_epochs=1",
        "schedule.epochs=4", "model.name=small_resnet", "emulate.slowdown=[[[0, 1], [1, 8]], 1]",
    )  # fmt: skip
    last = rows_of(run, "plan")[-1]
    assert sum(last["batches"]) == 16
    assert last["batches"][0] < last["batches"][1], "worker 0 has become 8 times slower"
    assert read_summary(run)["steps"] == 4 * 32


VARIANTS = {
    "ssgd": (False, 0.16),
    "ssgd_ps": (True, 0.24),
    "pipe": (False, 0.16),
    "pipe_ps": (True, 0.24),
    "asynlocal": (False, 0.16),
    "cocod": (True, 0.24),
}


def test_the_variants_are_the_papers_section_5_3() -> None:
    assert {path.stem for path in (ROOT / "configs/variants").glob("*.yaml")} == set(VARIANTS)
    for variant, (proportional, rate) in VARIANTS.items():
        files = [ROOT / "configs/heterogeneous_16gpu.yaml", ROOT / f"configs/variants/{variant}.yaml"]
        config = load_config([str(file) for file in files])
        work = [Work.of(config, 50_000, rank) for rank in range(16)]
        assert config.algorithm.name == variant.removesuffix("_ps")
        assert [w.batch for w in work] == [32] * 8 + [64 if proportional else 32] * 8
        scaled = config.optimizer.learning_rate * work[0].plan.learning_rate_factor
        assert learning_rate(5, 0.01, scaled, 5, [80], 0.1) == pytest.approx(rate)
        if variant == "asynlocal":
            assert [w.algorithm.period.at(sum(w.steps[:11])) for w in work] == [5] * 8 + [10] * 8
            assert work[0].plan.weights == (1,) * 16
            used = [b * s for b, s in zip(work[0].plan.batches, work[0].plan.steps, strict=True)]
            assert [count / used[0] for count in used] == [1] * 8 + [2] * 8
        else:
            assert work[0].plan.weights == work[0].plan.batches
