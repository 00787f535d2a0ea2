"""How fast workers compute, relative to each other.

Only computation counts: timed steps contain no communication, or the time blocked by it is subtracted. All workers are
timed at once, because workers that share a machine slow each other down.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cocod_accel.comm.agreement import try_together
from cocod_accel.comm.device import wait_for_stream
from cocod_accel.comm.groups import default_group

T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """Every worker's speed, as measured by :func:`measure_speeds`."""

    #: Relative to the slowest worker, which is 1.
    speeds: tuple[float, ...]
    #: The median step time of each worker.
    step_seconds: tuple[float, ...]
    #: The number of steps behind each median.
    num_steps: tuple[int, ...]
    #: Standard deviation over mean of each worker's step times.
    jitters: tuple[float, ...]


def relative_speeds(batches: Sequence[float], step_seconds: Sequence[float]) -> tuple[float, ...]:
    """C_i relative to the slowest worker, from batch sizes and step times; rounded, so that all workers agree."""
    rates = [batch / seconds for batch, seconds in zip(batches, step_seconds, strict=True)]
    return tuple(round(rate / min(rates), 3) for rate in rates)


def measure_speeds(
    run_step: Callable[[], object],
    *,
    warmup_steps: int = 3,
    min_steps: int = 10,
    min_seconds: float = 8.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Measure the speed of all workers at once. Collective.

    ``run_step`` is one step without communication, with the same batch size on every worker: typically forward and backward
    on a copy of the model. Warm-up steps are not counted. Then all workers continue until the slowest has taken
    ``min_steps`` and ``min_seconds`` have passed. An error on one worker is raised on all.
    """
    group = default_group()

    def timed_step() -> float:
        begin = clock()
        run_step()
        wait_for_stream()
        return clock() - begin

    def warm_up() -> float:
        for _ in range(warmup_steps):
            run_step()
        return timed_step()

    first = _agreed(warm_up, group)
    enough = max(min_seconds, min_steps * max(first))

    def measure() -> tuple[float, int, float]:
        seconds: list[float] = []
        begin = clock()
        while clock() - begin < enough or len(seconds) < min_steps:
            seconds.append(timed_step())
        return statistics.median(seconds), len(seconds), statistics.pstdev(seconds) / statistics.fmean(seconds)

    rows = _agreed(measure, group)
    medians, counts, jitters = zip(*rows, strict=True)
    return Measured(relative_speeds([1] * len(rows), medians), medians, counts, jitters)


def _agreed(call: Callable[[], T], group: object) -> list[T]:
    """What ``call`` returns on every worker; an error on any worker is raised on all."""
    results, error = try_together(call, group)
    if error is not None:
        raise RuntimeError(f"speeds could not be measured; {error}")
    return results
