"""``algorithm.period: auto``: the period that hides an average, measured before training and again after every epoch.

All workers time the same transfers and share what they found in one small gather, so all of them decide the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from cocod_accel.sync.auto import Decision, Gather, decide
from cocod_accel.sync.sync import Sync


class AutoPeriod:
    """The periods that have been chosen so far in a run."""

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
        control = self._sync.control
        decided = decide(control.time_transfer, control.time_coding, self._gather, compute_seconds, self._least)
        if decided is None:
            return None
        self._change_to(decided[0].period)
        return decided[0]

    def _change_to(self, period: int) -> None:
        first = self._sync.attempts if self.schedule else 0
        self.schedule = [pair for pair in self.schedule if pair[0] < first]
        if not self.schedule or self.period != period:
            self.schedule.append([first, period])
        self._tell()

    def _tell(self) -> None:
        self._sync.control.set_period([(first, k) for first, k in self.schedule])
