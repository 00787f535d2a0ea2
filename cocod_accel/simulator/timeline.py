"""The virtual time of a run: who computes, communicates and waits when, and where every worker is after every step.

Workers go through their steps side by side, one Python iteration a step, and meet where the algorithm has them meet. Rounds,
and the turns of parts within them, are counted by the trainer's own ``RoundClock``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cocod_accel.algorithms.rounds import Period, RoundClock
from cocod_accel.simulator.cluster import Cluster
from cocod_accel.simulator.fleet import Array, Fleet
from cocod_accel.simulator.payloads import Parcels
from cocod_accel.simulator.rules import RULES, Rule

#: A timeline with more workers cannot be read.
MAX_WORKERS = 16
#: Random numbers are drawn for about this many steps of all workers together at once.
_DRAWN_AT_ONCE = 1 << 18


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
    delay: int | None = None
    #: Workers next to each other that sum their gradients in every step.
    node_size: int = 1
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
        self._rule = RULES.get(course.algorithm, Rule)(self.fleet, course.parcels, course.gradient_overlap)
        kinds = sorted(set(course.periods), key=lambda period: period.schedule)
        #: A clock for each of the different periods, and which of them is every worker's.
        self._clocks = [RoundClock(period, course.delay) for period in kinds]
        self._kinds = np.array([kinds.index(period) for period in course.periods])
        self._first_clock = self._clocks[kinds.index(course.periods[0])]
        #: The part whose turn each of them has come to and waits at for the others; and when every worker's step began.
        self._turns: list[int | None] = [None] * len(kinds)
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
        """One more step of every worker that does not wait for others."""
        fleet, work = self.fleet, next(self.course.times)
        if self.sample is not None:
            self.sample.at(self.num_steps)
        active = self._is_active()
        if active.all():
            self._begun = fleet.now
        else:
            self._begun, work = np.where(active, fleet.now, self._begun), np.where(active, work, 0.0)
        for kind, clock in enumerate(self._clocks):
            if self._turns[kind] is None:
                clock.tick()
                # At most one: there are never more parts than steps in a round. Part 0 has its turn where a round ends.
                self._turns[kind] = next(iter(clock.parts_due(self.course.fragments)), None)
        self._rule.step(work)
        if self.course.node_size > 1:
            self.fleet.meet_inside(self.course.node_size, self.course.parcels.inside_seconds, active)
        for merged in self._first_clock.take_merges():
            self._rule.merge_due(merged)
        part = self._turns[0]
        if part is not None and all(turn == part for turn in self._turns):
            self._turns = [None] * len(self._turns)
            self._rule.part_due(part)
            self._first_clock.launched(part)
            active[:] = True  # those that waited are done with their step, too
        else:
            active &= self._is_active()
        self._conclude(active)

    def _is_active(self) -> NDArray[np.bool_]:
        """Of every worker: whether it takes steps, and does not wait for others."""
        active: NDArray[np.bool_] = np.array([turn is None for turn in self._turns])[self._kinds]
        return active

    def _waited(self, joined: Array, end: Array, blocked_from: Array, blocked_until: Array) -> None:
        if self.sample is not None and self.sample.is_open:
            self.sample.waited(joined, end, blocked_from, blocked_until, self._sampled_steps(self.sample))

    def _conclude(self, done: NDArray[np.bool_]) -> None:
        """The step of these workers has ended."""
        if done[0]:
            self.marks.note(self.fleet, self.rounds)
        if self.sample is not None and self.sample.is_open:
            self.sample.stepped(done, self._sampled_steps(self.sample), self._begun, self.fleet.now)

    def _sampled_steps(self, sample: SpanSample) -> dict[int, int]:
        """Of the workers whose spans are kept."""
        return {rank: self._clocks[self._kinds[rank]].attempts for rank in sample.ranks}


# ---------------------------------------------------------------------------------------------------- how long steps take


def mean_seconds(cluster: Cluster, batches: Sequence[int]) -> Array:
    """Every worker's step with its batch."""
    by_kind: dict[tuple[float, int], float] = {}
    speeds = cluster.speeds()
    for rank, kind in enumerate(zip(speeds, batches, strict=True)):
        if kind not in by_kind:
            by_kind[kind] = cluster.step_seconds_of(rank, kind[1])
    return np.array([by_kind[kind] for kind in zip(speeds, batches, strict=True)])


def step_times(cluster: Cluster, batches: Sequence[int], seed: int) -> Iterator[Array]:
    """All workers' seconds of computing, step by step, without end.

    Algorithms that are simulated with the same seed meet the same slow steps.
    """
    mean, jitter = mean_seconds(cluster, batches), np.array(cluster.jitters())
    probability, factor = cluster.stragglers.probability, cluster.stragglers.factor
    # Lognormal with the mean and the coefficient of variation that are wanted.
    sigma = np.sqrt(np.log1p(jitter**2))
    shapes, lots = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(2))
    block = max(1, _DRAWN_AT_ONCE // len(mean))
    while True:
        rows = np.broadcast_to(mean, (block, len(mean)))
        if jitter.any():
            rows = rows * np.exp(shapes.standard_normal(rows.shape) * sigma - sigma**2 / 2)
        if probability > 0 and factor > 1:
            rows = np.where(lots.random(rows.shape) < probability, factor * rows, rows)
        yield from rows


# --------------------------------------------------------------------------------------------------- which spans are kept


def chosen_ranks(cluster: Cluster, most: int = MAX_WORKERS) -> list[int]:
    """Worker 0, one of every group, and others evenly spread, in rank order."""
    num_workers = cluster.num_workers
    firsts = np.cumsum([0, *(group.count for group in cluster.workers)])[:-1].tolist()
    chosen = set(firsts[:most])
    for rank in np.linspace(0, num_workers - 1, min(most, num_workers)).round().astype(int).tolist():
        if len(chosen) < most:
            chosen.add(rank)
    return sorted(chosen)


def middle_window(num_steps: int, wanted: int) -> range:
    """``wanted`` steps in the middle of a run, where its periods are those of most of it."""
    length = min(num_steps, wanted)
    first = (num_steps - length) // 2
    return range(first, first + length)


class SpanSample:
    """Rows as the trainer's: {rank, step, name, start, end}, in simulated seconds."""

    def __init__(self, ranks: Sequence[int], window: range) -> None:
        self.ranks, self._window = list(ranks), window
        self.rows: dict[int, list[dict[str, Any]]] = {rank: [] for rank in ranks}
        self.is_open = False

    def at(self, steps_taken: int) -> None:
        """Worker 0 has taken this many steps."""
        self.is_open = steps_taken in self._window

    def waited(self, joined: Array, end: Array, blocked_from: Array, blocked_until: Array, steps: Mapping[int, int]) -> None:
        """Everybody has waited for a transfer."""
        for rank in self.ranks:
            self._add(rank, steps[rank], "communicate", joined[rank], end[rank])
            if blocked_until[rank] > blocked_from[rank]:
                self._add(rank, steps[rank], "wait", blocked_from[rank], blocked_until[rank])

    def stepped(self, done: NDArray[np.bool_], steps: Mapping[int, int], begun: Array, ended: Array) -> None:
        """These workers' steps have ended; waits lie inside steps."""
        for rank in self.ranks:
            if done[rank]:
                self._add(rank, steps[rank], "compute", begun[rank], ended[rank])

    def add(self, rank: int, step: int, name: str, start: float, end: float) -> None:
        """A span of a worker that is at a step of its own, counted from 0."""
        if rank in self.rows and step in self._window:
            self._add(rank, step + 1, name, start, end)

    def _add(self, rank: int, step: int, name: str, start: float, end: float) -> None:
        row = {"rank": rank, "step": step, "name": name, "start": float(start), "end": float(end), "simulated": True}
        self.rows[rank].append(row)
