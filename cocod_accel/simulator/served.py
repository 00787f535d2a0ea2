"""The virtual time of a run with a server: workers that never wait for each other, and one link that they all share.

Events, and not steps side by side: workers are at different steps. A gradient passes the server's link on its way in, the
model on its way out; either way one message passes after the other, in the order in which workers have ended their steps.
The server itself takes no time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cocod_accel.simulator.fleet import Array, computed
from cocod_accel.simulator.payloads import ServerLink
from cocod_accel.simulator.timeline import Course, SpanSample, Timeline


@dataclass(frozen=True)
class Turn:
    """A gradient that arrives: whose it is, and how many of this worker's have been answered when it goes on."""

    rank: int
    answered: int


@dataclass
class _Sent:
    """A gradient under way, or answered and not taken in."""

    number: int
    version: int
    start: float
    end: float


@dataclass
class _Worker:
    """Where one worker is."""

    now: float = 0.0
    begun: float = 0.0
    steps: int = 0
    #: Of the model that it computes with, and gradients taken in.
    version: int = 0
    answered: int = 0
    sent: deque[_Sent] = field(default_factory=deque)
    #: The last answer that has come, and is not yet the model that it computes with.
    arrived: _Sent | None = None
    #: The last interval in which it was blocked, and when messages of its own are on the link.
    blocked: tuple[float, float] = (0.0, 0.0)
    busy: list[tuple[float, float]] = field(default_factory=list)


class ServedTimeline(Timeline):
    """``bound``: of its own gradients, how many may be unanswered while a worker computes. ``meetings``: after how many
    steps all workers wait for each other, as for an evaluation, which takes no training time.
    """

    def __init__(
        self,
        course: Course,
        num_steps: int,
        link: ServerLink,
        *,
        bound: int,
        meetings: Sequence[int] = (),
        sample: SpanSample | None = None,
    ) -> None:
        super().__init__(course, num_steps, sample=sample)
        self._link, self._bound = link, bound
        self._meetings = sorted({step for step in meetings if step < num_steps} | {num_steps})
        self._workers = [_Worker() for _ in course.periods]
        self._times: deque[Array] = deque()
        self._first_time = 0
        self._in_free = self._out_free = 0.0
        self._version = 0
        #: In the order in which gradients arrive.
        self.turns: list[Turn] = []
        self.staleness_sum, self.largest_staleness = 0, 0
        #: After each step of worker 0: its mean and largest staleness, and what has passed the server's link.
        self.lateness: list[tuple[float, int, int]] = []
        self._own_staleness, self._own_largest = 0, 0

    def run(self, progress: Callable[[], object] = lambda: None) -> ServedTimeline:
        for meeting in self._meetings:
            self._go_on(meeting, progress)
            self._meet()
        self._finish()
        return self

    # ---- what is known afterwards

    @property
    def steps(self) -> list[int]:
        return [worker.steps for worker in self._workers]

    @property
    def rounds(self) -> int:
        return self._workers[0].steps

    @property
    def staleness(self) -> float:
        """The mean over all gradients."""
        return self.staleness_sum / max(1, self._version)

    @property
    def server_bytes(self) -> int:
        """What has passed the server's link."""
        return self._version * (self._link.gradient.sent_bytes + self._link.model.sent_bytes)

    @property
    def link_share(self) -> float:
        """Of the time, in which the busier direction of the server's link carries something."""
        seconds = max(self._link.gradient.seconds, self._link.model.seconds)
        return self._version * seconds / self.train_seconds

    def lateness_in_words(self) -> str:
        return (
            f"staleness {self.staleness:.1f} updates in the mean, {self.largest_staleness} at most; the server's link is "
            f"busy for {self.link_share:.1%} of the time, and carried {self.server_bytes / 1e6:.1f} MB"
        )

    # ---- details

    def _go_on(self, meeting: int, progress: Callable[[], object]) -> None:
        """All workers take their steps up to the meeting."""
        ends: list[tuple[float, int]] = []
        for rank in range(len(self._workers)):
            heapq.heappush(ends, (self._compute(rank), rank))
        while ends:
            _, rank = heapq.heappop(ends)
            worker = self._workers[rank]
            self._send(worker, rank)
            self._receive(worker, rank)
            worker.steps += 1
            self._note(worker, rank)
            if rank == 0:
                progress()
            if worker.steps < meeting:
                heapq.heappush(ends, (self._compute(rank), rank))

    def _compute(self, rank: int) -> float:
        """The next step of a worker, up to the end of its backward."""
        worker = self._workers[rank]
        work = self._work(worker.steps, rank) + self._link.gradient.coding_seconds
        worker.begun = worker.now
        worker.busy = [span for span in worker.busy if span[1] > worker.now]
        busy = _union(worker.busy)
        worker.now = float(computed(np.array([worker.now]), np.array([work]), busy, self.course.interference)[0])
        return worker.now

    def _work(self, step: int, rank: int) -> float:
        while self._first_time + len(self._times) <= step:
            self._times.append(next(self.course.times))
        if rank == 0 and len(self._times) > 1024:  # what all workers have used is forgotten
            least = min(worker.steps for worker in self._workers)
            while self._first_time < least:
                self._times.popleft()
                self._first_time += 1
        return float(self._times[step - self._first_time][rank])

    def _send(self, worker: _Worker, rank: int) -> None:
        """A step has ended: its gradient passes the link, is applied, and the model comes back."""
        gradient, model, latency = self._link.gradient, self._link.model, self._link.latency_seconds
        begin = max(worker.now, self._in_free)
        self._in_free = begin + gradient.seconds
        arrived = self._in_free + latency
        back = max(arrived, self._out_free)
        self._out_free = back + model.seconds
        staleness = self._version - worker.version
        self._version += 1
        self.staleness_sum += staleness
        self.largest_staleness = max(self.largest_staleness, staleness)
        if rank == 0:
            self.fleet.sent_bytes += self._link.gradient.sent_bytes
            self._own_staleness += staleness
            self._own_largest = max(self._own_largest, staleness)
        end = self._out_free + latency
        worker.sent.append(_Sent(worker.steps + 1, self._version, worker.now, end))
        worker.busy += [(begin, self._in_free), (back, self._out_free)]

    def _receive(self, worker: _Worker, rank: int) -> None:
        """Wait for the answers that must be there, and take the last one that is, as the trainer does."""
        number = worker.steps + 1
        until, most = number - self._bound, number - min(self._bound, 1)
        self._adopt(worker, worker.arrived)
        while worker.sent:
            first = worker.sent[0]
            if first.number > until and (first.number > most or first.end > worker.now):
                break
            worker.sent.popleft()
            self._wait(worker, rank, first)
            self._adopt(worker, first)
        self.turns.append(Turn(rank, worker.answered))

    def _adopt(self, worker: _Worker, answer: _Sent | None) -> None:
        if answer is not None:
            worker.version, worker.answered, worker.arrived = answer.version, answer.number, None

    def _wait(self, worker: _Worker, rank: int, sent: _Sent) -> None:
        blocked_from, until = worker.now, max(worker.now, sent.end)
        last_from, last_until = worker.blocked
        seen = min(sent.end, blocked_from)
        hidden = max(0.0, seen - sent.start)
        hidden -= min(hidden, max(0.0, min(seen, last_until) - max(sent.start, last_from)))
        self.fleet.hidden_seconds[rank] += hidden
        self.fleet.exposed_seconds[rank] += max(0.0, sent.end - max(sent.start, blocked_from))
        worker.blocked = blocked_from, until
        worker.now = until
        self._span(rank, worker.steps, "communicate", sent.start, sent.end)
        if until > blocked_from:
            self._span(rank, worker.steps, "wait", blocked_from, until)

    def _note(self, worker: _Worker, rank: int) -> None:
        self.fleet.now[rank] = worker.now
        self._span(rank, worker.steps - 1, "compute", worker.begun, worker.now)
        if rank == 0:
            self.marks.note(self.fleet, worker.steps)
            self.lateness.append((self._own_staleness / worker.steps, self._own_largest, self.server_bytes))

    def _meet(self) -> None:
        """Everybody waits until all is answered and all have come; what has come is taken in after the next step."""
        for rank, worker in enumerate(self._workers):
            while worker.sent:
                worker.arrived = worker.sent.popleft()
                self._wait(worker, rank, worker.arrived)
        end = max(worker.now for worker in self._workers)
        for rank, worker in enumerate(self._workers):
            worker.now = self.fleet.now[rank] = end
        self.marks.all_seconds[-1] = end

    def _finish(self) -> None:
        """The server's model for everybody, one after the other."""
        begin = max(worker.now for worker in self._workers)
        end = begin + self.course.parcels.final.seconds
        for rank, worker in enumerate(self._workers):
            self.fleet.exposed_seconds[rank] += end - worker.now
            worker.now = self.fleet.now[rank] = end

    def _span(self, rank: int, step: int, name: str, start: float, end: float) -> None:
        if self.sample is not None:
            self.sample.add(rank, step, name, start, end)


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times as spans one after the other."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
