"""The virtual time of a run: who computes, communicates and waits when, and where every worker is after every step.

Workers go through their steps side by side, one Python iteration a step, and meet where the algorithm has them meet. Rounds
are counted by the trainer's own ``RoundClock``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cocod_accel.algorithms.rounds import Period, RoundClock
from cocod_accel.simulator.fleet import Array, Fleet
from cocod_accel.simulator.payloads import Parcels
from cocod_accel.simulator.rules import RULES
from cocod_accel.simulator.sampling import SpanSample


@dataclass(frozen=True)
class Course:
    """What the workers of a run do, as far as time is concerned."""

    algorithm: str
    #: Every worker's; the same one for all unless the algorithm has periods by speed.
    periods: Sequence[Period]
    parcels: Parcels
    #: Seconds of computing, an array with every worker's for each next step.
    times: Iterator[Array]
    fragments: int = 1
    interference: float = 0.0
    gradient_overlap: float = 0.0


@dataclass(frozen=True)
class Marks:
    """What worker 0 knows after each of its steps; one entry a step."""

    seconds: list[float] = field(default_factory=list)
    #: The slowest worker's.
    all_seconds: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    exposed_seconds: list[float] = field(default_factory=list)
    hidden_seconds: list[float] = field(default_factory=list)

    def note(self, fleet: Fleet, rounds: int) -> None:
        self.seconds.append(float(fleet.now[0]))
        self.all_seconds.append(float(fleet.now.max()))
        self.rounds.append(rounds)
        self.sent_bytes.append(fleet.sent_bytes)
        self.exposed_seconds.append(float(fleet.exposed_seconds[0]))
        self.hidden_seconds.append(float(fleet.hidden_seconds[0]))


class Timeline:
    """A run that has been gone through; all seconds are simulated."""

    def __init__(self, course: Course, num_steps: int, *, sample: SpanSample | None = None) -> None:
        self.course, self.sample = course, sample
        self.marks = Marks()
        self._num_steps = num_steps
        num_workers = len(course.periods)
        self.fleet = Fleet(num_workers, course.interference)
        if sample is not None and num_workers > 1:
            self.fleet.on_wait = self._waited
        self._rule = RULES[course.algorithm](self.fleet, course.parcels, course.gradient_overlap)
        kinds = sorted(set(course.periods), key=lambda period: period.schedule)
        #: A clock for each of the different periods, and which of them is every worker's.
        self._clocks = [RoundClock(period) for period in kinds]
        self._kinds = np.array([kinds.index(period) for period in course.periods])
        self._first_clock = self._clocks[kinds.index(course.periods[0])]
        #: Which of them have ended their round and wait for the others, and when every worker's step began.
        self._waiting = np.zeros(len(kinds), dtype=bool)
        self._begun = self.fleet.now

    def run(self, progress: Callable[[], object] = lambda: None) -> Timeline:
        """Go through all steps, and finish; ``progress`` is called after each of them."""
        while not self._is_over():
            self._step()
            progress()
        self._rule.finish()
        return self

    # ---- what is known afterwards

    @property
    def num_steps(self) -> int:
        """Of worker 0."""
        return len(self.marks.seconds)

    @property
    def steps(self) -> list[int]:
        """Of every worker."""
        return [self._clocks[kind].attempts for kind in self._kinds]

    @property
    def rounds(self) -> int:
        return self._first_clock.rounds

    @property
    def train_seconds(self) -> float:
        """Of the slowest worker, the last mean included."""
        return float(self.fleet.now.max())

    def train_seconds_after(self, step: int) -> float:
        """Of the slowest worker when worker 0 has taken ``step`` steps, whatever ends with them included."""
        return 0.0 if step == 0 else self.marks.all_seconds[step - 1]

    # ---- details

    def _is_over(self) -> bool:
        """Workers with periods of their own end together, where a round does."""
        has_ended = len(self._clocks) == 1 or all(clock.attempts == clock.start for clock in self._clocks)
        return self._first_clock.attempts >= self._num_steps and has_ended

    def _step(self) -> None:
        """One more step of every worker that is still in its round."""
        clocks, fleet, work = self._clocks, self.fleet, next(self.course.times)
        if self.sample is not None:
            self.sample.at(self.num_steps)
        active = ~self._waiting[self._kinds]
        if active.all():
            self._begun = fleet.now
        else:
            self._begun, work = np.where(active, fleet.now, self._begun), np.where(active, work, 0.0)
        for kind, clock in enumerate(clocks):
            self._waiting[kind] = self._waiting[kind] or clock.tick()
        self._rule.step(work)
        if self._waiting.all():
            self._waiting[:] = False
            self._rule.round_ends()
            active[:] = True  # those that waited are done with their step, too
        else:
            if self.course.fragments > 1:
                for part in clocks[0].parts_due(self.course.fragments):
                    self._rule.part_due(part)
            active &= ~self._waiting[self._kinds]
        self._conclude(active)

    def _waited(self, joined: Array, end: float, blocked_from: Array, blocked_until: Array) -> None:
        if self.sample is not None and self.sample.is_open:
            self.sample.waited(joined, end, blocked_from, blocked_until, self.steps)

    def _conclude(self, done: NDArray[np.bool_]) -> None:
        """The step of these workers has ended."""
        if done[0]:
            self.marks.note(self.fleet, self.rounds)
        if self.sample is not None and self.sample.is_open:
            self.sample.stepped(done, self.steps, self._begun, self.fleet.now)
