"""Does ``cocod plan`` find the best period? It measures a link; then CoCoD-SGD is timed on it with every period.

Every row has the intended r_1, and the one that was measured, with which the periods are tried.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate.accelerator import Accelerator

from benchmarks.links.contenders import CONTENDERS, Ours
from benchmarks.links.worker import ask, block, make, measure, some_batches
from cocod_accel.comm.emulated import Link
from cocod_accel.config.settings import Config
from cocod_accel.plan.findings import as_cluster
from cocod_accel.plan.measure import measure as measure_cluster
from cocod_accel.simulator.cluster import save_cluster
from cocod_accel.tasks import Task

_FEW_STEPS, _FEW_REPEATS = 5, 5


def time_periods(config: Config, task: Task, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The measurement of ``cocod plan``, then blocks of every period, each between two blocks of the limit."""
    data, emulated = some_batches(config, task, 4), not job["has_lab"]
    limit = make("none", config, task, job)
    block(limit, data, 1, _FEW_STEPS)
    if job["has_lab"]:
        yield from measure(limit, data)
    compute = statistics.median(block(limit, data, 1, _FEW_STEPS) for _ in range(_FEW_REPEATS))
    link = ask(compute, emulated=emulated)
    if emulated:
        config.emulate.link.bandwidth_mbit = link["bandwidth_mbit"]
    cluster = as_cluster(measure_cluster(config, task, Accelerator(cpu=True), job["seconds"]), "lab")
    if dist.get_rank() == 0:
        save_cluster(cluster, Path(job["cluster"]))
    # A machine's speed drifts, and r_1 with it: keep r_1 as planned for every period.
    payload_bytes = sum(p.numel() * p.element_size() for p in limit.module.parameters())
    ratio = cluster.allreduce_seconds(payload_bytes) / cluster.step_seconds
    periods: list[int] = job["periods"]
    contenders = {k: make("cocod", config, task, {**job, "period": k}) for k in periods}
    for k, contender in contenders.items():
        block(contender, data, k, k)
    for repeat in range(job["repeats"]):
        turn = repeat % len(periods)
        before = block(limit, data, _FEW_STEPS, job["steps"])
        for k in periods[turn:] + periods[:turn]:
            contender = contenders[k]
            link = ask(before, emulated=emulated, ratio=ratio)
            if emulated:
                assert isinstance(contender, Ours)
                contender.emulate(Link(bandwidth_mbit=link["bandwidth_mbit"]))
            # Whole rounds, with two for warm-up.
            taken = block(contender, data, 2 * k, k * math.ceil(job["steps"] / k))
            after = block(limit, data, _FEW_STEPS, job["steps"])
            row = {"kind": "period", "contender": CONTENDERS["cocod"].label, "period": k, "repeat": repeat, "link": link}
            row["planned_ratio"] = ratio
            yield {**row, "seconds": taken, "limit_seconds": (before + after) / 2}
            before = after
    for contender in contenders.values():
        contender.close()
