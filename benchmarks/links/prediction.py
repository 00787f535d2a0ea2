"""What the simulator predicts for the links of a benchmark, compared with the measurements.

The simulator gets the step time (1, as everything here is relative to the limit), its jitter, the time of one payload
alone, and the share of a worker's computing that a transfer takes; no measurement of any algorithm.
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

#: At least enough for jitter to average out.
_STEPS = 2400


@dataclass(frozen=True)
class LinkFacts:
    """A link as the simulator sees it; times are relative to a step."""

    num_workers: int
    #: Time of one payload alone.
    ratio: float
    interference: float
    jitter: float


def simulated_step(name: str, period: int, facts: LinkFacts, block: int) -> float:
    """Step time over the limit's, whose blocks of ``block`` steps end with the slower worker."""
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
    # Skip the first round, which sends nothing.
    first = timeline.train_seconds_after(period)
    return (timeline.train_seconds_after(steps) - first) / (steps - period) / limit


def prediction_table(measured: dict[str, dict[float, float]], facts: dict[float, LinkFacts], period: int, block: int) -> str:
    """``measured``: algorithm -> link -> step over limit. Every cell: simulated, measured, difference."""
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
    """From what the workers measured on a link before the contenders were timed on it."""
    if not measured or "interference" not in measured[-1]:
        return None
    interference = statistics.fmean(row["interference"] for row in measured)
    return LinkFacts(num_workers, ratio, min(interference, 0.9), statistics.fmean(row["jitter"] for row in measured))
