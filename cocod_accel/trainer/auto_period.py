"""``algorithm.period: auto``: the period that hides an average, measured before training and again after every epoch.

All workers time the same transfers and share what they found in one small gather, so all of them decide the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cocod_accel.sync.sync import Sync
from cocod_accel.theory import StepTimes
from cocod_accel.theory.hiding import choose_period

#: Transfers that are timed for a decision.
_NUM_TRANSFERS = 3

Gather = Callable[[list[float]], list[list[float]]]


@dataclass(frozen=True)
class Decision:
    """A period, and the times it was chosen from."""

    period: int
    #: A step of the slowest worker, without the time it was blocked by communication.
    compute_seconds: float
    #: One average alone, from when the last worker joined it.
    comm_seconds: float

    def __str__(self) -> str:
        compute, comm = 1e3 * self.compute_seconds, 1e3 * self.comm_seconds
        return f"period {self.period}; a step takes {compute:.1f} ms, an average {comm:.1f} ms"


class AutoPeriod:
    """The periods that have been chosen so far in a run.

    Steps are timed while averages are in flight, so they contain the interference; none is taken off once more.
    """

    def __init__(self, sync: Sync, gather: Gather, least: int) -> None:
        self._sync, self._gather, self._least = sync, gather, least
        #: (first step, period) pairs, as ``CoCoDSGD`` takes them.
        self.schedule: list[list[int]] = []

    @property
    def period(self) -> int:
        """The period of rounds that start now."""
        return self.schedule[-1][1]

    def restore(self, schedule: Sequence[Sequence[int]]) -> None:
        """Continue with the periods that were chosen before a checkpoint."""
        self.schedule = [list(pair) for pair in schedule]
        self._tell()

    def begin_anew(self) -> None:
        """Steps are counted differently from here on: forget earlier choices."""
        self.schedule = []

    def decide(self, compute_seconds: float) -> Decision | None:
        """Time some transfers, and choose the period of the rounds that start from now on. Collective.

        ``compute_seconds``: this worker's median step; not a number if it has not taken any. Then nothing is decided.
        """
        transfers = [self._sync.control.time_transfer() for _ in range(_NUM_TRANSFERS)]
        rows = self._gather([compute_seconds, *transfers, self._sync.control.time_coding()])
        if any(math.isnan(row[0]) for row in rows):
            return None
        # Whoever joined last has seen the transfer alone; the others have waited for that worker, too.
        alone = [min(row[1 + index] for row in rows) for index in range(_NUM_TRANSFERS)]
        coding = max(row[-1] for row in rows)
        times = StepTimes(max(row[0] for row in rows), statistics.median(alone), interference=0.0, coding_seconds=coding)
        decision = Decision(choose_period(times, least=self._least), times.compute_seconds, times.comm_seconds)
        self._change_to(decision.period)
        return decision

    def _change_to(self, period: int) -> None:
        first = self._sync.attempts if self.schedule else 0
        self.schedule = [pair for pair in self.schedule if pair[0] < first]
        if not self.schedule or self.period != period:
            self.schedule.append([first, period])
        self._tell()

    def _tell(self) -> None:
        self._sync.control.set_period([(first, k) for first, k in self.schedule])
