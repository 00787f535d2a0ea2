"""A clean exit: gloo's threads are at rest before the interpreter ends.

A thread of gloo lets go of a collective, and so of tensors that Python made, a moment after it has woken the main thread.
An interpreter that ends in that moment aborts the process ("terminate called without an active exception"; torch 2.15,
pytorch issue 190489), although the groups were destroyed: DDP still holds them. Busy machines make the moment long.
"""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Iterator
from pathlib import Path

_THREAD = "(pt_gloo_runloop)"
_LONGEST_SECONDS = 2.0
_LOOKS = 3


@functools.cache  # once for a process
def rest_before_exit() -> None:
    atexit.register(_rest)


def _states() -> Iterator[str]:
    for path in Path("/proc/self/task").glob("*/stat"):
        try:
            text = path.read_text()
        except OSError:  # it has just ended
            continue
        if _THREAD in text:
            yield text[text.rindex(")") + 2]


def _rest() -> None:
    """Wait until all of gloo's threads sleep; several looks, because one that waits for the GIL sleeps as well."""
    deadline = time.monotonic() + _LONGEST_SECONDS
    quiet = 0
    while quiet < _LOOKS and time.monotonic() < deadline:
        quiet = quiet + 1 if all(state in "SI" for state in _states()) else 0
        time.sleep(0.001)  # gives the GIL away
