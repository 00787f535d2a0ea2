"""How fast a worker computes in a run, and how it is slowed down on purpose."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from cocod_accel.comm.device import wait_for_stream


def _never() -> float:
    return 0.0


@dataclass
class Pace:
    """Times the computation of every step of a loop, and stretches it where a slower worker is emulated.

    A device that works ahead of the host is waited for, so this is only switched on when it is needed. Only its computing:
    the average just started must go on beside the next step, or every algorithm would block.
    """

    is_on: bool
    device: torch.device = field(default=torch.device("cpu"), kw_only=True)
    #: Computation takes this many times longer.
    slowdown: float = 1.0
    #: Stretch by keeping the core busy, as computing would. A core that sleeps is slower when it wakes up and leaves more of
    #: the machine to the others: measured, one of two workers slept to half its speed was found at 0.43 of the other's.
    is_busy: bool = False
    #: Seconds of every step since the list was cleared, stretching included.
    seconds: list[float] = field(default_factory=list)

    def begin(self, blocked: Callable[[], float] = _never) -> None:
        """A step begins; ``blocked``: seconds that communication has blocked this worker so far, known once it has."""
        if self.is_on:
            wait_for_stream(self.device)
            self._begin, self._blocked = time.perf_counter(), blocked()

    def end(self, blocked: Callable[[], float] = _never) -> tuple[float, float] | None:
        """The step's computation is done; if it was stretched, the start and end of that."""
        if not self.is_on:
            return None
        wait_for_stream(self.device)
        computed_at = time.perf_counter()
        computed = computed_at - self._begin - (blocked() - self._blocked)
        if self.slowdown > 1:
            self._stretch_until(computed_at + (self.slowdown - 1) * computed)
        now = time.perf_counter()
        self.seconds.append(computed + now - computed_at)
        return (computed_at, now) if self.slowdown > 1 else None

    def _stretch_until(self, end: float) -> None:
        if not self.is_busy:
            time.sleep(max(0.0, end - time.perf_counter()))
        while time.perf_counter() < end:
            os.sched_yield()  # communication may use the core meanwhile

    def median_seconds(self) -> float:
        """Median seconds of the steps since the last call; NaN if there were none."""
        seconds, self.seconds = self.seconds, []
        return statistics.median(seconds) if seconds else math.nan
