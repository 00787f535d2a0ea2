"""All workers' clocks at once: they compute, join transfers and wait for them, in virtual seconds.

Every array has one entry per worker. A transfer is one sum over all of them: it begins when the last worker has joined and
the link is free, and while it is under way everybody computes at the rate 1 - interference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Parcel:
    """What one transfer takes, and what one worker sends for it."""

    seconds: float
    sent_bytes: int
    #: What every worker computes for it before it joins: coding.
    coding_seconds: float = 0.0


@dataclass(frozen=True)
class Flight:
    """A transfer: when each worker joined it, and when it ends for all of them."""

    joined: Array
    end: float
    sent_bytes: int


def computed(now: Array, work: Array, busy: list[tuple[float, float]], interference: float) -> Array:
    """When workers that begin at ``now`` have done ``work`` seconds of computing.

    ``busy``: (start, end) of the transfers under way, one after the other.
    """
    if interference == 0:
        return now + work
    rate = 1 - interference
    for start, end in busy:
        before = np.minimum(work, np.maximum(start - now, 0.0))
        now, work = now + before, work - before
        under = np.minimum(work / rate, np.maximum(end - np.maximum(now, start), 0.0))
        now, work = now + under, np.maximum(work - under * rate, 0.0)
    return now + work


class Fleet:
    """Where every worker is, and what communication has cost it so far, counted as the trainer counts it."""

    def __init__(self, num_workers: int, interference: float = 0.0) -> None:
        self.now: Array = np.zeros(num_workers)
        self.exposed_seconds: Array = np.zeros(num_workers)
        self.hidden_seconds: Array = np.zeros(num_workers)
        self.sent_bytes = 0
        #: Told of every wait as (joined, end, blocked from, blocked until); None: nobody asks.
        self.on_wait: Callable[[Array, Array, Array, Array], object] | None = None
        self._interference = interference
        self._link_free = 0.0
        #: Transfers that some worker may still compute under.
        self._busy: list[tuple[float, float]] = []
        self._blocked: tuple[Array, Array] = np.zeros(num_workers), np.zeros(num_workers)

    def compute(self, work: Array) -> None:
        """Everybody computes for ``work`` seconds, longer where transfers interfere."""
        if self._busy:
            earliest = self.now.min()
            self._busy = [interval for interval in self._busy if interval[1] > earliest]
        self.now = computed(self.now, work, self._busy, self._interference)

    def join(self, parcel: Parcel) -> Flight:
        """Everybody codes and joins the next transfer, which queues behind those before it."""
        if parcel.coding_seconds:
            self.compute(np.full_like(self.now, parcel.coding_seconds))
        return self._sent(parcel, max(float(self.now.max()), self._link_free), self.now)

    def compute_and_join(self, work: Array, parcel: Parcel, overlap: float) -> Flight:
        """The same together, the transfer beginning early: the share ``overlap`` of it before the last worker is done.

        Workers begin together, and the link is free. If c is the longest computation, a the interference and h the
        seconds that are hidden, the transfer begins at c - (1 - a) h, but not before the step does.
        """
        work = work + parcel.coding_seconds
        begin, longest = float(self.now.max()), float(work.max())
        start = max(begin + longest - (1 - self._interference) * overlap * parcel.seconds, begin)
        flight = self._sent(parcel, start, self.now)
        self.compute(work)
        return Flight(np.minimum(self.now, start), flight.end, parcel.sent_bytes)

    def wait(self, flight: Flight) -> None:
        """Everybody is blocked until the transfer has ended."""
        blocked_from, end, joined = self.now, flight.end, flight.joined
        until = np.maximum(blocked_from, end)
        hidden = np.maximum(np.minimum(end, blocked_from) - joined, 0.0)
        # What ran while an earlier transfer was waited for was not hidden behind computation.
        last_from, last_until = self._blocked
        waited = np.minimum(np.minimum(end, last_until), blocked_from) - np.maximum(joined, last_from)
        self.hidden_seconds += hidden - np.minimum(hidden, np.maximum(waited, 0.0))
        self.exposed_seconds += np.maximum(end - np.maximum(joined, blocked_from), 0.0)
        self.sent_bytes += flight.sent_bytes
        self._blocked = blocked_from, until
        self.now = until
        if self.on_wait is not None:
            self.on_wait(joined, np.full_like(until, end), blocked_from, until)

    def meet_inside(self, node_size: int, seconds: float, active: NDArray[np.bool_]) -> None:
        """The active workers of every node wait until the last of them has come, and for ``seconds`` more.

        A node's own links are its own: what travels between nodes is not held up.
        """
        joined = self.now
        ends = joined.reshape(-1, node_size).max(axis=1) + seconds
        until = np.where(active, np.repeat(ends, node_size), joined)
        self.exposed_seconds += until - joined
        self.now = until
        if self.on_wait is not None:
            self.on_wait(joined, until, joined, until)

    def _sent(self, parcel: Parcel, start: float, joined: Array) -> Flight:
        self._link_free = start + parcel.seconds
        if self._interference > 0 and parcel.seconds > 0:
            self._busy.append((start, self._link_free))
        return Flight(joined, self._link_free, parcel.sent_bytes)
