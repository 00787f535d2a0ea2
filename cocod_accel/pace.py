"""How fast workers compute: measured before training, measured while it runs, and slowed down on purpose.

Speeds are wanted of computation alone: what is timed contains no communication, or the time blocked by it is taken off. And
all workers are timed at once, because workers that share a machine slow each other down.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from cocod_accel.comm import default_group, try_together, wait_for_device

T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """Every worker's computation, as :func:`measure_speeds` found it."""

    #: Relative to the slowest worker, which is 1.
    speeds: tuple[float, ...]
    #: The median of each worker's steps.
    step_seconds: tuple[float, ...]
    #: How many steps that is the median of.
    num_steps: tuple[int, ...]
    #: Standard deviation of each worker's steps over their mean.
    jitters: tuple[float, ...]


def relative_speeds(batches: Sequence[float], step_seconds: Sequence[float]) -> tuple[float, ...]:
    """C_i, relative to the slowest worker, from what each computes in how long; three decimals, the same everywhere."""
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
    """How fast this and every other worker computes, all of them at once. Collective.

    ``run_step`` is one step without communication, with the same batch size on every worker: typically forward and backward
    on a copy of the model. Warm-up steps are not counted. Then all workers go on together until the slowest has taken
    ``min_steps`` and ``min_seconds`` are over. What raises on one worker is raised on all of them.
    """
    group = default_group()

    def timed_step() -> float:
        begin = clock()
        run_step()
        wait_for_device()
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
    """What ``call`` returns on every worker; its error on any is raised on all."""
    results, error = try_together(call, group)
    if error is not None:
        raise RuntimeError(f"speeds could not be measured; {error}")
    return results


@dataclass
class Pace:
    """Times the computation of every step of a loop, and stretches it where a slower worker is emulated.

    A device that works ahead of the host is waited for, so this is only switched on when it is needed.
    """

    is_on: bool
    #: How many times longer this worker's computation is to take.
    slowdown: float = 1.0
    #: Stretch by keeping the core busy, as computing would. A core that sleeps is slower when it wakes up and leaves more of
    #: the machine to the others: measured, one of two workers slept to half its speed was found at 0.43 of the other's.
    is_busy: bool = False
    #: Of every step since the list was emptied, stretching included.
    seconds: list[float] = field(default_factory=list)

    def begin(self, blocked: float) -> None:
        """A step begins; ``blocked``: seconds that communication has blocked this worker until now."""
        if self.is_on:
            wait_for_device()
            self._begin, self._blocked = time.perf_counter(), blocked

    def end(self, blocked: float) -> tuple[float, float] | None:
        """The step's computation is done; when it was stretched, from when to when."""
        if not self.is_on:
            return None
        wait_for_device()
        computed_at = time.perf_counter()
        computed = computed_at - self._begin - (blocked - self._blocked)
        if self.slowdown > 1:
            self._stretch_until(computed_at + (self.slowdown - 1) * computed)
        now = time.perf_counter()
        self.seconds.append(computed + now - computed_at)
        return (computed_at, now) if self.slowdown > 1 else None

    def _stretch_until(self, end: float) -> None:
        if not self.is_busy:
            time.sleep(max(0.0, end - time.perf_counter()))
        while time.perf_counter() < end:
            os.sched_yield()  # whoever communicates meanwhile may have the core

    def median_seconds(self) -> float:
        """Of the steps since the last call; not a number if there were none."""
        seconds, self.seconds = self.seconds, []
        return statistics.median(seconds) if seconds else math.nan
