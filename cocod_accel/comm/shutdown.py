"""A clean exit: gloo's threads are at rest before the interpreter ends.

A thread of gloo lets go of a collective, and so of tensors that Python made, a moment after it has woken the main thread.
An interpreter that ends in that moment aborts the process ("terminate called without an active exception"; torch 2.15,
pytorch issue 190489), although the groups were destroyed: DDP still holds them. Busy machines make the moment long.
In the same moment ``destroy_process_group()`` of torch 2.7 waits for that thread for ever, holding the lock it needs.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
from pathlib import Path

_THREAD = "(pt_gloo_runloop)"
_LONGEST_SECONDS = 2.0
_LOOKS = 3


@functools.cache  # once for a process
def rest_before_exit() -> None:
    atexit.register(rest)


def _states() -> list[str]:
    """Of gloo's threads; of all that are not Python's, where they have no name of their own (torch 2.7)."""
    known = {thread.native_id for thread in threading.enumerate()}
    named, others = [], []
    for path in Path("/proc/self/task").glob("*/stat"):
        try:
            text = path.read_text()
        except OSError:  # it has just ended
            continue
        state = text[text.rindex(")") + 2]
        if _THREAD in text:
            named.append(state)
        elif int(path.parent.name) not in known:
            others.append(state)
    return named or others


def rest() -> None:
    """Wait until all of gloo's threads sleep; several looks, because one that waits for the GIL sleeps as well."""
    deadline = time.monotonic() + _LONGEST_SECONDS
    quiet = 0
    while quiet < _LOOKS and time.monotonic() < deadline:
        quiet = quiet + 1 if all(state in "SI" for state in _states()) else 0
        time.sleep(0.001)  # gives the GIL away
