"""``CoCoDSGD(period="auto")``: the period that hides an average, measured in a loop's first steps and agreed by all.

The trainer's ``algorithm.period: auto`` decides by the same rule, before training and between epochs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cocod_accel.algorithms.rounds import Period
from cocod_accel.theory import StepTimes
from cocod_accel.theory.hiding import LOSS, MARGIN, choose_period, hiding_delay

if TYPE_CHECKING:
    from cocod_accel.sync.control import Control

#: Transfers that are timed for a decision.
_NUM_TRANSFERS = 3
#: Steps that are not timed, because much happens in them for the first time, and steps that are.
_WARM_UP, _TIMED = 5, 15

#: One worker's figures to everybody's, in rank order. Collective.
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


@dataclass(frozen=True)
class Plan:
    """The period of rounds that start now, and why; ``print(sync.plan())`` says it in words."""

    period: int
    reason: str
    #: What it was chosen from: a step of the slowest worker, and one average alone. None: not measured.
    compute_seconds: float | None = None
    comm_seconds: float | None = None

    def __str__(self) -> str:
        return f"period {self.period}: {self.reason}"


def decide(
    transfer: Callable[[], float], coding: Callable[[], float], gather: Gather, compute_seconds: float, least: int
) -> tuple[Decision, StepTimes] | None:
    """Time some transfers and choose a period. Collective; None if a worker has not measured its steps (not a number)."""
    transfers = [transfer() for _ in range(_NUM_TRANSFERS)]
    rows = gather([compute_seconds, *transfers, coding()])
    if any(math.isnan(row[0]) for row in rows):
        return None
    # Whoever joined last has seen the transfer alone; the others have waited for that worker, too.
    alone = [min(row[1 + index] for row in rows) for index in range(_NUM_TRANSFERS)]
    # Steps are timed while averages are in flight, so they contain the interference; none is taken off once more.
    coding_seconds = max(row[-1] for row in rows)
    times = StepTimes(max(row[0] for row in rows), statistics.median(alone), interference=0.0, coding_seconds=coding_seconds)
    return Decision(choose_period(times, least=least), times.compute_seconds, times.comm_seconds), times


def why(times: StepTimes, least: int) -> str:
    """The reason for :func:`~cocod_accel.theory.hiding.choose_period`'s choice."""
    facts = f"a step takes {1e3 * times.compute_seconds:.1f} ms, an average {1e3 * times.comm_seconds:.1f} ms"
    chosen, hides = choose_period(times, least=least), hiding_delay(times, MARGIN)
    if chosen == hides:
        return f"{facts}; the smallest that hides it, with {MARGIN:.0%} to spare"
    if chosen == least:
        return f"{facts}; {hides} would hide it, and fragments or delay ask for {least}"
    return f"{facts}; {hides} would hide it, and with {chosen} its coding takes at most {LOSS:.0%} of a step"


class AutoPlan:
    """Times a loop's first steps, in the shortest rounds there are, then sets the period, once."""

    def __init__(
        self, least: int, control: Control, decide_here: Callable[[float], tuple[Decision, StepTimes] | None]
    ) -> None:
        self._least, self._control, self._decide = least, control, decide_here
        self._seconds: list[float] = []
        self._last: tuple[float, float] | None = None
        self._plan: Plan | None = None

    def attempted(self) -> None:
        """One more step, on every worker; where enough of them have been timed, all decide."""
        if self._plan is not None:
            return
        now = time.perf_counter(), self._control.blocked_seconds()
        if self._last is not None:
            self._seconds.append(now[0] - self._last[0] - (now[1] - self._last[1]))
        self._last = now
        if len(self._seconds) < _WARM_UP + _TIMED or not self._control.is_round_start:
            return
        decided = self._decide(statistics.median(self._seconds[_WARM_UP:]))
        assert decided is not None
        decision, times = decided
        self._adopt(Plan(decision.period, why(times, self._least), decision.compute_seconds, decision.comm_seconds))

    def plan(self) -> Plan:
        if self._plan is not None:
            return self._plan
        done, needed = len(self._seconds), _WARM_UP + _TIMED
        return Plan(self._least, f"the shortest there is, while steps are timed ({done} of {needed})")

    def _adopt(self, plan: Plan) -> None:
        self._plan = plan
        self._control.set_period(plan.period)

    def state(self) -> dict[str, Any] | None:
        """For a resumed run, which keeps what was decided; None: nothing yet."""
        return None if self._plan is None else asdict(self._plan)

    def load_state(self, state: dict[str, Any] | None) -> None:
        self._seconds, self._last = [], None
        if state is not None:
            self._adopt(Plan(**state))


def given(period: Period, step: int) -> Plan:
    """The plan of whoever states a period."""
    scheduled = "" if len(period.schedule) == 1 else f", from {period}"
    return Plan(period.at(step), f"as given{scheduled}")
