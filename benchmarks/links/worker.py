"""One worker of a benchmark: started on a host of the lab, or on loopback, with a job as JSON.

    python -m benchmarks.links.worker '{"kind": "steps", ...}'

It finds the others through the environment, like any torch worker; worker 0 prints one JSON row per result. A row that
requests a link is answered on worker 0's standard input once the link is set up.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.links import meeting
from benchmarks.links.contenders import CONTENDERS, Ours
from benchmarks.links.peers import Contender
from cocod_accel.comm.emulated import Link
from cocod_accel.config.loading import load_config
from cocod_accel.config.settings import Config
from cocod_accel.sharding.sampler import seeded_generator
from cocod_accel.tasks import Task, build_model, build_optimizer, build_task
from cocod_accel.tasks.data import batches
from cocod_accel.trainer.schedule import learning_rate
from cocod_accel.trainer.work import Work

#: How long the limit is timed before a link is set up for it.
_FEW_STEPS, _FEW_REPEATS = 5, 5


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    meeting.join(Path(job["meeting"]), dist.get_rank(), dist.get_world_size())
    config = load_config([job["config"], *job.get("overrides", [])])
    config.cluster.num_workers = dist.get_world_size()
    torch.manual_seed(config.seed)
    task = build_task(config)
    from benchmarks.links.periods import time_periods

    jobs = {"steps": time_steps, "accuracy": time_to_accuracy, "periods": time_periods}
    for row in jobs[job["kind"]](config, task, job):
        say(row)
    dist.barrier()
    dist.destroy_process_group()


def say(row: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(row), flush=True)


def ask(compute_seconds: float, *, emulated: bool, ratio: float | None = None) -> dict[str, Any]:
    """Request a link for this step time: a machine's speed drifts, but r_1 must stay constant.

    ``ratio``: an r_1 other than the job's. Returns a description of the link.
    """
    say({"kind": "ask", "compute_seconds": compute_seconds, "emulated": emulated, "ratio": ratio})
    answer: list[dict[str, Any]] = [json.loads(sys.stdin.readline()) if dist.get_rank() == 0 else {}]
    dist.broadcast_object_list(answer)
    return answer[0]


def make(name: str, config: Config, task: Task, job: dict[str, Any]) -> Contender:
    torch.manual_seed(config.seed)
    return CONTENDERS[name](build_model(config, task), lambda model: build_optimizer(config, model), job["period"])


def everyones(value: float) -> list[float]:
    """Every worker's value, in rank order."""
    values = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    return values.tolist()


# ------------------------------------------------------------------------------------------------- speed


def some_batches(config: Config, task: Task, count: int) -> list[tuple[Tensor, Tensor]]:
    """Batches in memory, so that step times do not include loading."""
    generator = seeded_generator(config.seed, "bench", dist.get_rank())
    indices = torch.randperm(task.num_train, generator=generator)[: count * config.batch_size]
    return list(batches(task.train, indices, config.batch_size, torch.device("cpu")))


def block(contender: Contender, data: list[tuple[Tensor, Tensor]], prime: int, steps: int) -> float:
    """Seconds per step. The clock starts and stops with a transfer in flight, if the contender has any."""
    for step in range(prime):
        contender.step(*data[step % len(data)])
    meeting.meet()
    begin = time.perf_counter()
    for step in range(steps):
        contender.step(*data[(prime + step) % len(data)])
    seconds = time.perf_counter() - begin
    contender.drain()
    dist.barrier()
    return max(everyones(seconds)) / steps


def measure(limit: Contender, data: list[tuple[Tensor, Tensor]]) -> Iterator[dict[str, Any]]:
    """Measure one payload alone on the requested link. Twice: the first result corrects the link."""
    payload = torch.zeros(sum(p.numel() for p in limit.module.parameters()))
    for _ in range(2):
        compute = statistics.median(block(limit, data, 1, _FEW_STEPS) for _ in range(_FEW_REPEATS))
        link = ask(compute, emulated=False)
        transfers = []
        for step in range(_FEW_REPEATS + 1):
            limit.step(*data[step % len(data)])  # a link is idle before most transfers
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(payload)
            transfers.append(max(everyones(time.perf_counter() - begin)))
        yield {
            "kind": "measured",
            "compute_seconds": compute,
            "communicate_seconds": statistics.median(transfers[1:]),
            "payload_bytes": payload.numel() * payload.element_size(),
            "jitter": jitter(limit, data),
            "interference": interference(limit, data, payload, link["payload_seconds"] / compute),
            "link": link,
        }


def jitter(limit: Contender, data: list[tuple[Tensor, Tensor]]) -> float:
    """Standard deviation over mean of the step time without communication, averaged over workers."""
    seconds = []
    for step in range(1 + _FEW_STEPS * _FEW_REPEATS):
        begin = time.perf_counter()
        limit.step(*data[step % len(data)])
        seconds.append(time.perf_counter() - begin)
    return statistics.fmean(everyones(statistics.stdev(seconds[1:]) / statistics.fmean(seconds[1:])))


def interference(limit: Contender, data: list[tuple[Tensor, Tensor]], payload: Tensor, ratio: float) -> float:
    """The share of a worker's computing that a transfer takes while in flight."""
    found = []
    steps = 2 * _FEW_STEPS
    for _ in range(_FEW_REPEATS):
        before = block(limit, data, 1, steps)
        dist.barrier()
        begin = time.perf_counter()
        # Enough for twice as long, so that one is always in flight.
        works = [dist.all_reduce(payload.clone(), async_op=True) for _ in range(math.ceil(2 * steps / ratio))]
        for step in range(steps):
            limit.step(*data[step % len(data)])
        taken = (time.perf_counter() - begin) / steps
        for work in works:
            work.wait()
        taken = max(everyones(taken))
        found.append(1 - (before + block(limit, data, 1, steps)) / 2 / taken)
    return max(0.0, statistics.median(found))


def time_steps(config: Config, task: Task, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Interleaved blocks of every contender, each between two blocks of the limit, on a link adjusted to the limit."""
    data = some_batches(config, task, 4)
    limit = make("none", config, task, job)
    blocks = [(name, False) for name in job["contenders"]] if job["has_lab"] else []
    blocks += [(name, True) for name in job["emulated"]]
    # A contender's real and emulated blocks are adjacent.
    blocks.sort(key=lambda block: [*job["contenders"], *job["emulated"]].index(block[0]))
    contenders = {block_of: make(block_of[0], config, task, job) for block_of in blocks}
    prime, steps = job["period"], job["steps"]
    for contender in [limit, *contenders.values()]:  # one-time work: buckets, buffers, connections
        block(contender, data, prime, prime)
    if job["has_lab"]:
        yield from measure(limit, data)
    closer = [block_of for block_of in blocks if block_of[0] in job["closer"] and block_of[1] != job["has_lab"]]
    for repeat in range(job["repeats"] + (job["closer_repeats"] if closer else 0)):
        turns = blocks if repeat < job["repeats"] else closer
        turn = repeat % max(1, len(turns))
        # The same warm-up as the contenders: the first steps after another model are slower.
        seconds = block(limit, data, prime, steps)
        yield {"kind": "step", "contender": "none", "repeat": repeat, "place": 0, "seconds": seconds}
        for place, (name, emulated) in enumerate(turns[turn:] + turns[:turn]):
            contender, row = contenders[name, emulated], {"kind": "step", "repeat": repeat}
            link = ask(seconds, emulated=emulated)
            if emulated:
                assert isinstance(contender, Ours)
                contender.emulate(Link(bandwidth_mbit=link["bandwidth_mbit"]))
            taken = block(contender, data, prime, steps)
            more = {"clock": "emulated"} if emulated else {}
            yield {**row, "contender": name, "place": 2 * place + 1, "seconds": taken, "link": link, **more}
            seconds = block(limit, data, prime, steps)
            yield {**row, "contender": "none", "place": 2 * place + 2, "seconds": seconds}
    for contender in contenders.values():
        contender.close()


# ---------------------------------------------------------------------------------------------- accuracy


def time_to_accuracy(config: Config, task: Task, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Train until a target is reached, every contender with every seed; only training is on the clock."""
    limit, data = make("none", config, task, job), some_batches(config, task, 4)
    block(limit, data, 1, _FEW_STEPS)
    if job["has_lab"]:
        yield from measure(limit, data)
    for seed in job["seeds"]:
        for name in job["contenders"]:
            config.seed = seed
            contender = make(name, config, task, job)
            compute = statistics.median(block(limit, data, 1, _FEW_STEPS) for _ in range(_FEW_REPEATS))
            link = ask(compute, emulated=not job["has_lab"])
            if not job["has_lab"]:
                assert isinstance(contender, Ours)
                contender.emulate(Link(bandwidth_mbit=link["bandwidth_mbit"]))
            row = {"kind": "accuracy", "contender": name, "seed": seed, "compute_seconds": compute, "link": link}
            yield {**row, **train_until(contender, config, task, job)}


def train_until(contender: Contender, config: Config, task: Task, job: dict[str, Any]) -> dict[str, Any]:
    rank, target = dist.get_rank(), job["target"]
    work = Work.of(config, task.num_train, rank)
    base, schedule = config.optimizer.learning_rate, config.schedule
    factor, decay = work.plan.learning_rate_factor, (schedule.decay_epochs, schedule.decay_factor)
    seconds, taken, accuracy = 0.0, 0, 0.0
    rows: list[list[float]] = []
    assert schedule.epochs is not None, "the bench trains whole epochs"
    for epoch in range(schedule.epochs):
        sampler = work.plan.sampler(rank, seed=config.seed)
        indices = sampler.epoch(epoch, work.all_steps[epoch])
        generator = seeded_generator(config.seed, "augment", rank, epoch)
        supply = batches(task.train, indices, work.batch, torch.device("cpu"), generator=generator)
        steps = work.steps[epoch]
        stops = {round(steps * (i + 1) / job["looks"]) for i in range(job["looks"])}
        contender.model.train()
        begin = time.perf_counter()
        for index in range(steps):
            rate = learning_rate(epoch + index / steps, base, base * factor, schedule.warmup_epochs, *decay)
            for group in contender.optimizer.param_groups:
                group["lr"] = rate
            contender.step(*next(supply))
            taken += 1
            if index + 1 in stops:
                seconds += time.perf_counter() - begin
                slowest = max(everyones(seconds))
                accuracy = evaluate(contender, config, task)
                rows.append([slowest, accuracy])
                if accuracy >= target:
                    contender.close()
                    return {"reached": slowest, "steps": taken, "accuracy": accuracy, "curve": rows}
                begin = time.perf_counter()
    contender.close()
    return {"reached": None, "steps": taken, "accuracy": accuracy, "curve": rows}


def evaluate(contender: Contender, config: Config, task: Task) -> float:
    """Accuracy of the model this contender would use, over every test image once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    correct = 0
    with contender.averaged(), torch.no_grad():
        contender.model.eval()
        indices = torch.arange(rank, task.num_test, size)
        for inputs, labels in batches(task.test, indices, config.evaluation.batch_size, torch.device("cpu")):
            correct += int((contender.module(inputs).argmax(1) == labels).sum())
        contender.model.train()
    return sum(everyones(correct)) / task.num_test


if __name__ == "__main__":
    given = sys.argv[1]
    main(json.loads(Path(given).read_text() if Path(given).is_file() else given))
    sys.stdout.flush()
    # Skip torch's destructors, which sometimes abort a process after all its work is done (torch 2.15, gloo).
    os._exit(0)
