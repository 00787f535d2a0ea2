"""One worker of a benchmark: started on a host of the lab, or on loopback, with a job as JSON.

    python -m cocod_accel.bench.worker '{"kind": "steps", ...}'

It finds the others through the environment, as every torch worker does, and prints one JSON row a result on worker 0.
"""

from __future__ import annotations

import json
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

from cocod_accel.bench.contenders import CONTENDERS, Contender, Ours
from cocod_accel.comm import Link
from cocod_accel.config import Config, load_config
from cocod_accel.schedule import learning_rate
from cocod_accel.sharding import seeded_generator
from cocod_accel.tasks import Task, build_model, build_optimizer, build_task
from cocod_accel.tasks.data import batches
from cocod_accel.work import Work


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = load_config([job["config"], *job.get("overrides", [])])
    config.cluster.num_workers = dist.get_world_size()
    torch.manual_seed(config.seed)
    task = build_task(config)
    jobs = {"measure": measure, "steps": time_steps, "accuracy": time_to_accuracy}
    for row in jobs[job["kind"]](config, task, job):
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def make(name: str, config: Config, task: Task, job: dict[str, Any]) -> Contender:
    torch.manual_seed(config.seed)
    contender = CONTENDERS[name](build_model(config, task), lambda model: build_optimizer(config, model), job["period"])
    link = job.get("emulate")
    if link is not None and isinstance(contender, Ours):
        contender.emulate(Link(**link))
    return contender


def everyones(value: float) -> list[float]:
    """Every worker's, in rank order."""
    values = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    return values.tolist()


# ------------------------------------------------------------------------------------------------- speed


def some_batches(config: Config, task: Task, count: int) -> list[tuple[Tensor, Tensor]]:
    """Batches in memory: the time of a step is to be that of training, not of loading."""
    generator = seeded_generator(config.seed, "bench", dist.get_rank())
    indices = torch.randperm(task.num_train, generator=generator)[: count * config.batch_size]
    return list(batches(task.train, indices, config.batch_size, torch.device("cpu")))


def block(contender: Contender, data: list[tuple[Tensor, Tensor]], prime: int, steps: int) -> float:
    """Seconds a step. The clock starts with a transfer in flight, if there are any, and stops with one."""
    for step in range(prime):
        contender.step(*data[step % len(data)])
    dist.barrier()
    begin = time.perf_counter()
    for step in range(steps):
        contender.step(*data[(prime + step) % len(data)])
    seconds = time.perf_counter() - begin
    contender.drain()
    dist.barrier()
    return max(everyones(seconds)) / steps


def measure(config: Config, task: Task, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a step takes without communication, and what one payload takes alone."""
    contender = make("none", config, task, job)
    data = some_batches(config, task, 4)
    seconds = [block(contender, data, 1, job["steps"]) for _ in range(job["repeats"])]
    payload = torch.zeros(sum(p.numel() for p in contender.module.parameters()))
    transfers = []
    for _ in range(job["repeats"] + 1):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(payload)
        transfers.append(max(everyones(time.perf_counter() - begin)))
    yield {
        "kind": "measured",
        "compute_seconds": statistics.median(seconds),
        "communicate_seconds": statistics.median(transfers[1:]),
        "payload_bytes": payload.numel() * payload.element_size(),
    }


def time_steps(config: Config, task: Task, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Interleaved blocks of every contender, each between two blocks of the limit: a machine's speed drifts in seconds."""
    data = some_batches(config, task, 4)
    names = [name for name in job["contenders"] if name != "none"]
    everybody = {name: make(name, config, task, job) for name in ["none", *names]}
    prime, steps = job["period"], job["steps"]
    for contender in everybody.values():  # what is done once: buckets, buffers, connections
        block(contender, data, prime, 2)
    for repeat in range(job["repeats"]):
        turn = repeat % max(1, len(names))
        order = names[turn:] + names[:turn]
        blocks = ["none", *(block_of for name in order for block_of in (name, "none"))]
        for place, name in enumerate(blocks):
            seconds = block(everybody[name], data, prime, steps)
            yield {"kind": "step", "contender": name, "repeat": repeat, "place": place, "seconds": seconds}
    for contender in everybody.values():
        contender.close()


# ---------------------------------------------------------------------------------------------- accuracy


def time_to_accuracy(config: Config, task: Task, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Train until a target is reached, every contender with every seed; only training is on the clock."""
    for seed in job["seeds"]:
        for name in job["contenders"]:
            config.seed = seed
            yield {"kind": "accuracy", "contender": name, "seed": seed, **train_until(name, config, task, job)}


def train_until(name: str, config: Config, task: Task, job: dict[str, Any]) -> dict[str, Any]:
    rank, target = dist.get_rank(), job["target"]
    work = Work.of(config, task.num_train, rank)
    contender = make(name, config, task, job)
    base, schedule = config.optimizer.learning_rate, config.schedule
    factor, decay = work.plan.learning_rate_factor, (schedule.decay_epochs, schedule.decay_factor)
    seconds, taken, accuracy = 0.0, 0, 0.0
    rows: list[list[float]] = []
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
    """Of the model this contender would use, over every test image once."""
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
    # Past torch's own destructors, which have been seen to abort a process that had done all its work (torch 2.15, gloo).
    os._exit(0)
