"""The watchdog for a loop of the user's own: ``sync.watch()``."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from cocod_accel.comm.meeting import LEFT, SILENT
from cocod_accel.comm.watchdog import Watch, end_process, store_of

# How long a worker looks for the one that made its collective fail.
_EXPLAIN_SECONDS = 5.0
_LINGER_SECONDS = 2.0


class PeerWatch:
    """Ends this process, and says why, once another worker is gone. Until it stops, or the process ends."""

    def __init__(
        self,
        rank: int,
        num_workers: int,
        group: Any,
        frozen_seconds: float,
        where: Callable[[], str],
        *,
        has_server: bool = False,
    ) -> None:
        """``has_server``: there is one, whose rank follows the workers'."""
        self.rank, self._server = rank, num_workers if has_server else None
        self._watch = Watch(
            store_of(group),
            rank,
            num_workers + has_server,
            frozen_seconds=frozen_seconds,
            on_fault=lambda rank, what: self._end(self._line(rank, what)),
            where=where,
        )
        self._watch.__enter__()
        self._is_on = True
        self._hook: Callable[..., object] = sys.excepthook
        sys.excepthook = self._failed
        atexit.register(self.stop)

    def stop(self, error: BaseException | None = None) -> None:
        """This worker has done its part: that its process ends is no fault from here on. May be called again."""
        if self._is_on:
            self._is_on = False
            atexit.unregister(self.stop)
            if sys.excepthook == self._failed:
                sys.excepthook = self._hook
            self._watch.__exit__(None if error is None else type(error), error, None)

    def explain(self, error: BaseException) -> str | None:
        """Which worker made this collective fail, in one line; None if the error is this worker's own."""
        if not is_lost_peer(error):
            return None
        found = self._watch.explain(_EXPLAIN_SECONDS)
        return None if found is None else self._line(*found)

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        hook = self._hook
        line = self.explain(error)
        if line is None:
            self.stop(error)
        hook(kind, error, trace)
        if line is not None:
            self._end(line)

    def _end(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        if self.rank == 0:  # whose process may hold the store, in which others read why
            time.sleep(_LINGER_SECONDS)
        end_process(None, 1)

    def _line(self, rank: int, what: str) -> str:
        who = "" if rank < 0 else f"{self._name(rank)} "
        return f"error: {who}{what}; {self._name(self.rank)} ends as well"

    def _name(self, rank: int) -> str:
        return "the server" if rank == self._server else f"worker {rank}"


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed, which it does if another worker is gone."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", LEFT, SILENT))
