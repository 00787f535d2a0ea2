"""A barrier through a file that all workers on one machine share, not through the link between them.

A barrier's message would queue behind the transfer in flight, which would then be done before the clock starts.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

#: The timeout of the barrier.
_SECONDS = 60.0


class Meeting:
    """The barrier of a benchmark's workers."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        with path.open("r+b") as file:
            self._counts = memoryview(mmap.mmap(file.fileno(), 8 * size)).cast("q")
        self._rank = rank

    @staticmethod
    def prepare(path: Path, size: int) -> None:
        """Create the file, before any worker is started."""
        path.write_bytes(bytes(8 * size))

    def wait(self) -> None:
        """Wait until every worker has arrived as often as this one."""
        self._counts[self._rank] += 1
        mine, deadline = self._counts[self._rank], time.monotonic() + _SECONDS
        while min(self._counts) < mine:
            if time.monotonic() > deadline:
                raise TimeoutError(f"a worker has not arrived within {_SECONDS:.0f} s")
            os.sched_yield()  # a transfer in flight needs this core


#: The barrier of this process's job. Here, because a module run as a script is not the one that others import.
_joined: list[Meeting] = []


def join(path: Path, rank: int, size: int) -> None:
    """Make :func:`meet` use the barrier of this job."""
    _joined[:] = [Meeting(path, rank, size)]


def meet() -> None:
    _joined[0].wait()
