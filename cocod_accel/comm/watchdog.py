"""If a worker dies or freezes, the run soon ends on all others, and they name it and say where it was.

Without this the others wait in a collective: for a frozen worker until the process group's timeout, and then without a name.
Every worker keeps a heartbeat in the store that the processes were connected through, in a thread of its own, and watches
its neighbour's. Whoever finds something wrong, or fails itself, writes it down there, and all read it within a second.
If the network between them is cut, a call to the store may hang for a quarter of an hour: a second thread sees to that.
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
import uuid
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
        is_agreed: whether all workers know of an error, so that this one has not failed alone.
        where: what this worker is doing, in words, for whoever does not set ``doing``.
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
        where: Callable[[], str] | None = None,
    ) -> None:
        self._store, self._rank, self._num_workers = store, rank, num_workers
        self._frozen_seconds, self._on_fault, self._is_agreed = frozen_seconds, on_fault, is_agreed
        self._seconds = min(0.25, frozen_seconds / 4)
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._watch, self._time_out)]
        self._lock = threading.Lock()
        self._where = where
        self._count = 0
        self._seen: tuple[int, float] = (-1, time.monotonic())
        self._answered = time.monotonic()
        #: Of the worker in whose process the store may be.
        self._first: dict[str, Any] | None = None
        #: What this worker is doing, in words; published a few times a second.
        self.doing = "starting"

    def __enter__(self) -> Self:
        self._beat()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # Nothing here may hide the error or wait for another worker.
        self._stopped.set()
        self._threads[0].join(timeout=5)
        if self._threads[0].is_alive():  # the store does not answer
            return
        with contextlib.suppress(Exception):
            if error is None or self._is_agreed(error):
                self._beat("done")
            else:
                line = str(error).split("\n")[0] or type(error).__name__
                self._accuse(self._rank, f"failed at {self._place_now}: {line}")

    def explain(self, seconds: float) -> tuple[int, str] | None:
        """Which worker made a collective fail here; waits up to ``seconds`` for an answer. All others are told, too."""
        found: list[tuple[int, str]] = []

        def look() -> None:
            nonlocal found
            try:
                while not found and time.monotonic() < end:
                    culprit = self._culprit(is_needed=True)
                    if culprit is not None:
                        found.append(culprit)
                        self._accuse(*culprit)
                    time.sleep(0.05)
            except Exception:  # the store is gone
                found = found or [self._without_store()]

        end = time.monotonic() + seconds
        thread = threading.Thread(target=look, daemon=True)  # the store may hang as well
        thread.start()
        thread.join(seconds + 0.5)
        return found[0] if found else None

    # ---- the threads

    @property
    def _place_now(self) -> str:
        return self.doing if self._where is None else self._where()

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
                found = self._culprit()
                failures, self._answered = 0, time.monotonic()
            except Exception:  # the store's connection is gone
                failures += 1
                found = self._without_store() if failures > 3 else None
            if found is not None and not self._stopped.is_set():
                with contextlib.suppress(Exception):
                    self._accuse(*found)
                self._on_fault(*found)

    def _time_out(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(self._seconds):
            now = time.monotonic()
            if now - last > self._seconds + 1:  # paused itself
                self._answered = now
            last = now
            silent = now - self._answered
            if silent > self._frozen_seconds and not self._stopped.is_set():
                self._on_fault(-1, f"cut off: the process that started the workers has not answered for {silent:.0f} s")

    def _without_store(self) -> tuple[int, str]:
        first = self._first
        if first is not None and first["place"] == _place() and _begun(first["pid"]) != first["begun"]:
            return 0, "died"
        return -1, "lost contact with the process that started the workers"

    def _beat(self, state: str = "") -> None:
        self._count += 1
        beat = {"count": self._count, "place": _place(), "pid": os.getpid(), "begun": _begun(os.getpid())}
        beat |= {"doing": self._place_now, "state": state}
        self._store.set(f"cocod_accel/beat/{self._rank}", json.dumps(beat))

    def _culprit(self, *, is_needed: bool = False) -> tuple[int, str] | None:
        """What somebody has written down; if nobody has, what is wrong with the neighbour."""
        found = self._fault() or self._neighbour(is_needed=is_needed)
        # A neighbour may have ended because of another worker, and written that down between the two looks.
        return found and (self._fault() or found)

    def _fault(self) -> tuple[int, str] | None:
        if not self._store.check([_FAULT]):
            return None
        rank, what = json.loads(self._store.get(_FAULT))
        return int(rank), str(what)

    def _neighbour(self, *, is_needed: bool = False) -> tuple[int, str] | None:
        other = (self._rank + 1) % self._num_workers
        key = f"cocod_accel/beat/{other}"
        beat: dict[str, Any] = {"count": -1, "place": None, "doing": "starting", "state": ""}
        if self._store.check([key]):
            beat = json.loads(self._store.get(key))
        if self._rank != 0:
            self._note_first(beat if other == 0 else None)
        now = time.monotonic()
        with self._lock:
            if beat["count"] != self._seen[0]:
                self._seen = beat["count"], now
            silent = now - self._seen[1]
        is_here = beat["place"] is not None and beat["place"] == _place()
        is_dead = is_here and _begun(beat["pid"]) != beat["begun"]
        if beat["state"] == "done":
            return (other, f"ended at {beat['doing']}, before the others") if is_needed and is_dead else None
        if is_dead:
            return other, f"died at {beat['doing']}"
        if silent > self._frozen_seconds:
            if is_here:  # otherwise its launcher would wait for it
                with contextlib.suppress(OSError):
                    os.kill(beat["pid"], signal.SIGKILL)
            return other, f"has not responded for {silent:.0f} s; it was at {beat['doing']}"
        return None

    def _note_first(self, beat: dict[str, Any] | None) -> None:
        """Keep what is known of worker 0, for when nothing can be read any more."""
        if beat is None and self._first is None and self._store.check(["cocod_accel/beat/0"]):
            beat = json.loads(self._store.get("cocod_accel/beat/0"))
        if beat is not None and beat["place"] is not None:
            self._first = beat

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
    return store.clone() if hasattr(store, "clone") else _reopened(store)


def _reopened(store: Any) -> Any:
    """A clone, for torch 2.7, which has none and does not tell a store's prefix: one is agreed on in the store itself."""
    from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

    prefix = store.compare_set("cocod_accel/prefix", "", uuid.uuid4().hex).decode()
    opened = store._underlying_non_prefix_store
    if isinstance(opened, TCPStore):
        opened = TCPStore(opened.host, opened.port, is_master=False, wait_for_workers=False)
    elif isinstance(opened, FileStore):
        opened = FileStore(opened.path)  # type: ignore[attr-defined]
    return PrefixStore(prefix, opened)


def store_of(group: Any) -> Any:
    """The same, with keys of its own if these are not all workers; None: all of them."""
    from torch.distributed import get_process_group_ranks, get_world_size
    from torch.distributed.distributed_c10d import PrefixStore

    store = default_store()
    if group is None or get_world_size(group) == get_world_size():
        return store
    return PrefixStore("workers " + " ".join(map(str, get_process_group_ranks(group))), store)


def end_process(line: str | None, code: int) -> None:
    """Print a line and exit at once: the main thread may wait in a collective forever."""
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
        if line is not None:
            print(line, file=sys.stderr, flush=True)
        sys.stdout.flush()
    os._exit(code)


def identity(pid: int) -> str:
    """A process on this machine, as one word for :func:`is_gone`; a process id alone may be used again."""
    return f"{pid}/{_begun(pid)}/{_place()}".replace(" ", "/")


def is_gone(known: str) -> bool:
    """Whether a process has ended; one that cannot be seen from here has not."""
    pid, _, place = known.split("/", 2)
    return place == str(_place()).replace(" ", "/") and identity(int(pid)) != known


def end_after(is_over: Callable[[], bool], line: str | None, code: int) -> None:
    """End this process once ``is_over``, whatever its main thread is doing."""

    def look() -> None:
        while not is_over():
            time.sleep(0.25)
        end_process(line, code)

    threading.Thread(target=look, daemon=True).start()
