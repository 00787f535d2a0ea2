"""A barrier through a file that all workers of one machine see, not through the link between them.

A message of a barrier's would queue behind the transfer in flight, which so would be done before the clock starts.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

#: Nobody is later than this.
_SECONDS = 60.0


class Meeting:
    """Where the workers of a benchmark meet."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        with path.open("r+b") as file:
            self._counts = memoryview(mmap.mmap(file.fileno(), 8 * size)).cast("q")
        self._rank = rank

    @staticmethod
    def prepare(path: Path, size: int) -> None:
        """Before any worker is started."""
        path.write_bytes(bytes(8 * size))

    def wait(self) -> None:
        """Until everybody has come as often as this worker."""
        self._counts[self._rank] += 1
        mine, deadline = self._counts[self._rank], time.monotonic() + _SECONDS
        while min(self._counts) < mine:
            if time.monotonic() > deadline:
                raise TimeoutError(f"some worker has not come for {_SECONDS:.0f} s")
            os.sched_yield()  # a transfer in flight needs this core


#: The one of this process's job. Here, because a module that is run as a script is another one when it is imported.
_joined: list[Meeting] = []


def join(path: Path, rank: int, size: int) -> None:
    """From now on :func:`meet` is with the workers of this job."""
    _joined[:] = [Meeting(path, rank, size)]


def meet() -> None:
    _joined[0].wait()
