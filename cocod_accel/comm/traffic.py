"""What communication costs a worker: bytes, and seconds that blocked it or were hidden behind computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cocod_accel.comm.device import Moment
from cocod_accel.comm.handles import Handle, exposed_and_hidden


@dataclass(frozen=True)
class _Wait:
    """Transfers that were waited for together: their starts and ends, and from when to when their waiter was blocked."""

    spans: list[tuple[Moment, Moment]]
    blocked_from: Moment
    blocked_until: Moment

    @property
    def has_come(self) -> bool:
        """Whether all of it is known without waiting."""
        return self.blocked_until.has_come and all(start.has_come and end.has_come for start, end in self.spans)


@dataclass
class Traffic:
    """What communication has cost this worker so far, and, if asked for, when it happened.

    A device comes to its waits later than the host, so they are counted when they have happened: see :meth:`catch_up`.
    """

    num_bytes: int = 0
    exposed_seconds: float = 0.0
    hidden_seconds: float = 0.0
    #: (name, start, end) of every transfer ("communicate") and every time blocked by one ("wait"); None: not kept.
    spans: list[tuple[str, float, float]] | None = None
    _last_blocked: tuple[float, float] = (0.0, 0.0)
    _uncounted: deque[_Wait] = field(default_factory=deque)

    def wait_for(self, handles: Sequence[Handle]) -> None:
        """Wait for collectives launched one after the other, and count what they cost together."""
        if not handles:
            return
        device = handles[0].device
        for handle in handles:
            handle.approach()
        blocked_from = Moment(device)
        for handle in handles:
            handle.wait()
        spans = [(handle.start, handle.end) for handle in handles]
        self._uncounted.append(_Wait(spans, blocked_from, Moment(device)))
        self.catch_up()

    def catch_up(self, *, wait: bool = False) -> None:
        """Count the waits that have happened by now; ``wait``: all of them, however far behind the device is."""
        while self._uncounted and (wait or self._uncounted[0].has_come):
            self._count(self._uncounted.popleft())

    def _count(self, waited: _Wait) -> None:
        blocked_from, blocked_until = waited.blocked_from.seconds, waited.blocked_until.seconds
        spans = [(start.seconds, end.seconds) for start, end in waited.spans]
        exposed, hidden = exposed_and_hidden(spans, blocked_from)
        # What ran while an earlier transfer was waited for was not hidden behind computation.
        last_from, last_until = self._last_blocked
        hidden -= min(
            hidden, sum(max(0.0, min(end, last_until, blocked_from) - max(start, last_from)) for start, end in spans)
        )
        self._last_blocked = blocked_from, blocked_until
        self.exposed_seconds += exposed
        self.hidden_seconds += hidden
        if self.spans is not None:
            self.spans.extend(("communicate", start, end) for start, end in spans)
            self.spans.append(("wait", blocked_from, blocked_until))

    def restore(self, counters: Mapping[str, float]) -> None:
        """Go on from :meth:`counters`, whatever was waited for meanwhile."""
        self._uncounted.clear()
        self._last_blocked = (0.0, 0.0)
        for name, value in counters.items():
            setattr(self, name, value)

    def counters(self) -> dict[str, float]:
        self.catch_up(wait=True)
        return {
            "num_bytes": self.num_bytes,
            "exposed_seconds": self.exposed_seconds,
            "hidden_seconds": self.hidden_seconds,
        }
