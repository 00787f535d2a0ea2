"""What the simulator says of the links of a benchmark, beside what was measured on them.

The simulator is told what a step takes (1, as everything here is over the limit), how much that varies, what a payload takes
alone, and what a transfer takes of a worker's computing; nothing of what any algorithm took.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cocod_accel.algorithms.rounds import Period
from cocod_accel.runs.tables import aligned
from cocod_accel.simulator.cluster import Cluster, WorkerGroup
from cocod_accel.simulator.fleet import Parcel
from cocod_accel.simulator.payloads import Parcels
from cocod_accel.simulator.timeline import Course, Timeline, step_times

#: Enough for jitter to average out, at least.
_STEPS = 2400


@dataclass(frozen=True)
class LinkFacts:
    """A link as a simulator knows it; times are over that of a step."""

    num_workers: int
    #: Of one payload alone.
    ratio: float
    interference: float
    jitter: float


def simulated_step(name: str, period: int, facts: LinkFacts, block: int) -> float:
    """A step over that of the limit, whose blocks of so many steps end with the slower worker."""
    group = WorkerGroup(count=facts.num_workers, jitter=facts.jitter)
    steps = block * math.ceil(_STEPS / block)  # blocks are whole rounds
    times = step_times(Cluster(step_seconds=1.0, batch_size=1, workers=[group]), [1] * facts.num_workers, seed=0)
    parcel = Parcel(facts.ratio, 0)
    course = Course(
        algorithm=name,
        periods=[Period.parse(period)] * facts.num_workers,
        parcels=Parcels(parcel, (parcel,), Parcel(0.0, 0)),
        times=times,
        interference=facts.interference,
    )
    timeline = Timeline(course, steps).run()
    again = step_times(Cluster(step_seconds=1.0, batch_size=1, workers=[group]), [1] * facts.num_workers, seed=0)
    alone = np.array([next(again) for _ in range(steps)]).reshape(-1, block, facts.num_workers)
    limit = float(alone.sum(axis=1).max(axis=1).mean()) / block
    # The first round sends nothing, and is left out.
    first = timeline.train_seconds_after(period)
    return (timeline.train_seconds_after(steps) - first) / (steps - period) / limit


def prediction_table(measured: dict[str, dict[float, float]], facts: dict[float, LinkFacts], period: int, block: int) -> str:
    """``measured``: algorithm -> link -> step over limit. Every cell: simulated, measured, and by how much they differ."""
    ratios = sorted(facts)
    body, errors = [], []
    for name, steps in measured.items():
        cells = []
        for ratio in ratios:
            if ratio not in steps:
                cells.append("-")
                continue
            simulated = simulated_step(name, period, facts[ratio], block)
            errors.append(simulated / steps[ratio] - 1)
            cells.append(f"{simulated:.2f} / {steps[ratio]:.2f} {errors[-1]:+.1%}")
        body.append([name, *cells])
    if not errors:
        return ""
    table = aligned([["simulated / measured", *(f"r_1 = {ratio:g}" for ratio in ratios)], *body])
    middle, worst = statistics.median(map(abs, errors)), max(map(abs, errors))
    return f"{table}\nsimulated against measured: {middle:.1%} apart in the median, {worst:.1%} at worst, of {len(errors)}"


def facts_of(num_workers: int, measured: Sequence[dict[str, float]], ratio: float) -> LinkFacts | None:
    """From what the workers found out about a link before anything was timed on it."""
    if not measured or "interference" not in measured[-1]:
        return None
    interference = statistics.fmean(row["interference"] for row in measured)
    return LinkFacts(num_workers, ratio, min(interference, 0.9), statistics.fmean(row["jitter"] for row in measured))
