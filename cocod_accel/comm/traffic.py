"""What communication costs a worker: bytes, and seconds that blocked it or were hidden behind computation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from cocod_accel.comm.handles import Handle, exposed_and_hidden


@dataclass
class Traffic:
    """What communication has cost this worker so far, and, if asked for, when it happened."""

    num_bytes: int = 0
    exposed_seconds: float = 0.0
    hidden_seconds: float = 0.0
    #: (name, start, end) of every transfer ("communicate") and every time blocked by one ("wait"); None: not kept.
    spans: list[tuple[str, float, float]] | None = None
    _last_blocked: tuple[float, float] = (0.0, 0.0)

    def wait_for(self, handles: Sequence[Handle]) -> None:
        """Wait for collectives launched one after the other, and count what they cost together."""
        blocked_from = time.perf_counter()
        for handle in handles:
            handle.wait()
        blocked_until = time.perf_counter()
        spans = [(handle.start_seconds, handle.end_seconds) for handle in handles]
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

    def counters(self) -> dict[str, float]:
        return {
            "num_bytes": self.num_bytes,
            "exposed_seconds": self.exposed_seconds,
            "hidden_seconds": self.hidden_seconds,
        }
