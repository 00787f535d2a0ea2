"""If a worker dies or freezes, the run soon ends on all others, and they name it and say where it was.

Without this the others wait in a collective: for a frozen worker until the process group's timeout, and then without a name.
Every worker keeps a heartbeat in the store that the processes were connected through, in a thread of its own, and watches
its neighbour's. Whoever finds something wrong, or fails itself, writes it down there, and all read it within a second.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_FAULT = "cocod_accel/fault"


class Watch:
    """One worker's heartbeat; it also watches the next worker's.

    Args:
        store: a ``torch.distributed`` store that no other thread uses.
        frozen_seconds: how long a worker that is there may be silent.
        on_fault: called in the watching thread with (rank, what happened); must end the process.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        num_workers: int,
        *,
        frozen_seconds: float,
        on_fault: Callable[[int, str], None],
        is_agreed: Callable[[BaseException], bool] = lambda error: False,
    ) -> None:
        self._store, self._rank, self._num_workers = store, rank, num_workers
        self._frozen_seconds, self._on_fault, self._is_agreed = frozen_seconds, on_fault, is_agreed
        self._seconds = min(0.25, frozen_seconds / 4)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cocod_accel watch", daemon=True)
        self._lock = threading.Lock()
        self._count = 0
        self._seen: tuple[int, float] = (-1, time.monotonic())
        #: What this worker is doing, in words; published a few times a second.
        self.doing = "starting"

    def __enter__(self) -> Self:
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # Nothing here may hide the error or wait for another worker.
        self._stopped.set()
        self._thread.join(timeout=5)
        with contextlib.suppress(Exception):
            if error is None or self._is_agreed(error):
                self._beat("done")
            elif not self._store.check([_FAULT]):
                line = str(error).split("\n")[0] or type(error).__name__
                self._accuse(self._rank, f"failed at {self.doing}: {line}")

    def explain(self, seconds: float) -> tuple[int, str] | None:
        """Which worker made a collective fail here; waits up to ``seconds`` for an answer."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = self._fault() or self._neighbour()
            if found is not None:
                return found
            time.sleep(0.05)
        return None

    # ---- the thread

    def _watch(self) -> None:
        failures = 0
        last = time.monotonic()
        while not self._stopped.wait(self._seconds):
            now = time.monotonic()
            if now - last > self._seconds + 1:  # this process was paused itself, and cannot tell who else was
                self._seen = self._seen[0], now
            last = now
            try:
                self._beat()
                found = self._fault() or self._neighbour()
                failures = 0
            except Exception:  # the store's connection is gone
                failures += 1
                found = (-1, "lost contact with the process that started the workers") if failures > 3 else None
            if found is not None and not self._stopped.is_set():
                with contextlib.suppress(Exception):
                    self._accuse(*found)
                self._on_fault(*found)

    def _beat(self, state: str = "") -> None:
        self._count += 1
        beat = {"count": self._count, "place": _place(), "pid": os.getpid(), "begun": _begun(os.getpid())}
        beat |= {"doing": self.doing, "state": state}
        self._store.set(f"cocod_accel/beat/{self._rank}", json.dumps(beat))

    def _fault(self) -> tuple[int, str] | None:
        if not self._store.check([_FAULT]):
            return None
        rank, what = json.loads(self._store.get(_FAULT))
        return int(rank), str(what)

    def _neighbour(self) -> tuple[int, str] | None:
        other = (self._rank + 1) % self._num_workers
        key = f"cocod_accel/beat/{other}"
        beat: dict[str, Any] = {"count": -1, "place": None, "doing": "starting", "state": ""}
        if self._store.check([key]):
            beat = json.loads(self._store.get(key))
        now = time.monotonic()
        with self._lock:
            if beat["count"] != self._seen[0]:
                self._seen = beat["count"], now
            silent = now - self._seen[1]
        if beat["state"] == "done":
            return None
        is_here = beat["place"] is not None and beat["place"] == _place()
        if is_here and _begun(beat["pid"]) != beat["begun"]:
            return other, f"died at {beat['doing']}"
        if silent > self._frozen_seconds:
            if is_here:  # otherwise its launcher would wait for it
                with contextlib.suppress(OSError):
                    os.kill(beat["pid"], signal.SIGKILL)
            return other, f"has not responded for {silent:.0f} s; it was at {beat['doing']}"
        return None

    def _accuse(self, rank: int, what: str) -> None:
        if not self._store.check([_FAULT]):
            self._store.set(_FAULT, json.dumps([rank, what]))


@functools.cache
def _place() -> str | None:
    """What two processes that see each other's process ids have in common; a host name would not tell containers apart."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


def _begun(pid: int) -> str | None:
    """When a process began, in the kernel's own count; None if it has ended or is a zombie."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in ("Z", "X") else rest[18]


def default_store() -> Any:
    """The store the processes were connected through, on a connection of its own."""
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    return store.clone()


def end_process(line: str | None, code: int) -> None:
    """Print a line and exit at once: the main thread may wait in a collective forever."""
    if line is not None:
        print(line, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)
