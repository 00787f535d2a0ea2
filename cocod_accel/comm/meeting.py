"""Workers that wait for each other for ever notice it here, and say who is where.

Workers meet in collectives by order alone. Each process group of ours carries one kind of them, numbered by its members, so
that none can pair up with another kind: rounds and gradients on groups of their own, and a call that meets all workers
(``averaged()``, ``finish()``) is announced in the store first, with the step at which it is made. If workers disagree, some
wait in one place for others who wait in another. So a worker that has waited for two seconds writes down in the store where
it is and what it has started, and looks where the others are. If they wait for each other in a circle, or somebody has left,
all of them raise the same line. Nothing of this costs a step or a round anything.

Only waits on the host are watched: a device waits for a collective by itself, until its group's timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# How long a worker waits before it looks for the others, and between two looks.
_PATIENCE = timedelta(seconds=2)
_LOOK = timedelta(seconds=1)
# More workers look less often, for all of them read from one process.
_WORKERS_PER_SECOND = 64
# How long the worker in whose process the store may be stays, so that others can read why.
_LINGER_SECONDS = 3.0
#: How the groups are named that calls are announced in.
CALLS = "calls "
#: In what is said of a worker that whoever waits for it waits for in vain.
LEFT = "has left: "
#: And of the process whose store it is.
SILENT = "the store that the workers were connected through does not answer"


class TransferError(RuntimeError):
    """Workers are at different places, so what they send does not belong together."""


@dataclass(frozen=True)
class _Wait:
    """What a worker waits for: the collective of this number in a group, and who takes part in it."""

    group: str
    number: int
    members: tuple[int, ...]
    where: str

    @property
    def is_call(self) -> bool:
        return self.group.startswith(CALLS)


@dataclass
class _Post:
    """What a worker has written down: what it has started in each group, which it has left, and what it waits for."""

    serial: int = 0
    started: dict[str, int] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    wait: _Wait | None = None

    def has_started(self, wait: _Wait) -> bool:
        return self.started.get(wait.group, 0) >= wait.number

    def text(self) -> str:
        wait = None if self.wait is None else [self.wait.group, self.wait.number, self.wait.members, self.wait.where]
        return json.dumps([self.serial, self.started, self.left, wait])

    @classmethod
    def of(cls, text: bytes | str) -> _Post:
        serial, started, left, wait = json.loads(text)
        return cls(serial, started, left, None if wait is None else _Wait(wait[0], wait[1], tuple(wait[2]), wait[3]))


class Meeting:
    """What this process writes down and reads, for all groups that it is in."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self.rank = rank
        self._own = _Post()
        self._present: set[int] = set()
        self._suspected: tuple[tuple[int, int], ...] = ()
        self._publish()

    @classmethod
    def here(cls) -> Meeting | None:
        """This process's; None where processes share no store."""
        global _current
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if world is None:
            return None
        held = _current
        if held is None or held[0]() is not world:
            try:
                _current = held = (weakref.ref(world), cls(_own_store(), dist.get_rank()))
            except (AttributeError, RuntimeError, TypeError):  # no store that could be used beside others
                return None
        return held[1]

    # ---- while waiting

    def started(self, group: str) -> int:
        """One more collective has been started there; its number."""
        number = self._own.started[group] = self._own.started.get(group, 0) + 1
        return number

    @contextlib.contextmanager
    def waiting(self, wait: _Wait) -> Iterator[None]:
        """Written down meanwhile; if it ends in an error of ours, that stays there for the others."""
        self._own.wait = wait
        self._publish()
        self._suspected = ()
        yield
        self._own.wait = None
        self._publish()

    def look(self) -> None:
        """Raise if what this worker waits for cannot come."""
        try:
            self._look()
        except TransferError:
            raise
        except RuntimeError:  # the store does not answer: what is waited for fails by itself
            self._suspected = ()

    def _look(self) -> None:
        wait = self._own.wait
        assert wait is not None
        posts: dict[int, _Post | None] = {self.rank: self._own}
        told = self.told(wait, posts)
        if told is not None:
            self._fail(told, ())
        if wait.is_call:
            here = [post.wait for post in posts.values() if post is not None and post.wait is not None]
            if any((other.group, other.number) == (wait.group, wait.number) and other.where != wait.where for other in here):
                self._fail(_line({rank: p.wait for rank, p in posts.items() if p is not None and p.wait in here}), posts)
        circle = self._circle(self.rank, posts, [], set())
        # Somebody may have gone on since: only what is seen twice is true.
        serials = tuple((rank, self._post_of(rank, posts).serial) for rank in circle)
        if circle and serials == self._suspected:
            stuck = [rank for rank in (self.rank, *wait.members) if self._circle(rank, posts, [], set())]
            self._fail(_line({rank: self._post_of(rank, posts).wait for rank in {*stuck, *circle}}), circle)
        self._suspected = serials

    def told(self, wait: _Wait, posts: dict[int, _Post | None] | None = None) -> str | None:
        """What another worker said when it left what this one waits for. ``posts``: all that is read is kept there.

        None: it has failed, so whoever has left is the reason, even if it had started its own side.
        """
        has_failed = posts is None
        posts = {self.rank: self._own} if posts is None else posts
        for rank in wait.members:
            post = self._read(rank, posts)
            has_left = rank != self.rank and post is not None and wait.group in post.left
            if post is not None and has_left and (has_failed or not post.has_started(wait)):
                return post.left[wait.group]
        return None

    def leave(self, groups: Sequence[str], line: str) -> None:
        """This worker starts nothing more in these groups. Waits for nobody: the network may be what failed."""
        for group in groups:
            self._own.left[group] = line
        self._own.serial += 1
        text = self._own.text()

        def write() -> None:
            with contextlib.suppress(Exception):
                self._store.set(_key(self.rank), text)

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        thread.join(1.0)

    def leave_all(self, how: str) -> None:
        """At the end of the program."""
        groups = [group for group in self._own.started if group not in self._own.left]
        if groups:
            self.leave(groups, f"rank {self.rank} {LEFT}{how}")

    def come_back(self, groups: Sequence[str]) -> None:
        """After :meth:`leave`."""
        lines = [self._own.left.pop(group, "") for group in groups]
        if any(lines):
            self._publish()

    # ---- calls

    def announce(self, group: str, what: str, members: Sequence[int], passing: Callable[[], None]) -> None:
        """Wait until all members announce the same; raises if they do not. ``passing``: called meanwhile."""
        number = self.started(group)
        place = f"cocod_accel/call/{group}/{number}"
        try:
            self._meet(place, _Wait(group, number, tuple(members), f"in {what}"), passing)
        except TransferError:
            raise
        except RuntimeError as error:
            raise TransferError(f"{what}: {SILENT}") from error

    def _meet(self, place: str, wait: _Wait, passing: Callable[[], None]) -> None:
        num_members = len(wait.members)
        if self._store.add(f"{place}/{wait.where}", 1) == num_members:
            self._store.set(place, "")
            return
        if self._comes(place, num_members, _PATIENCE, passing):
            return
        with self.waiting(wait):
            self.look()
            while not self._comes(place, num_members, self.interval(num_members), passing):
                self.look()

    def interval(self, num_members: int) -> timedelta:
        """Between two looks."""
        return max(_LOOK, timedelta(seconds=num_members / _WORKERS_PER_SECOND))

    def _comes(self, place: str, num_members: int, patience: timedelta, passing: Callable[[], None]) -> bool:
        end, pause = time.monotonic() + patience.total_seconds(), 0.0002
        longest = 0.01 * max(1.0, num_members / _WORKERS_PER_SECOND)
        while not self._store.check([place]):
            if time.monotonic() > end:
                return False
            passing()
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
        return True

    # ---- details

    def _circle(self, rank: int, posts: dict[int, _Post | None], path: list[int], done: set[int]) -> list[int]:
        """Workers that wait for each other, and that ``rank`` waits for in the end; [] if there are none."""
        if rank in path:
            return path[path.index(rank) :]
        post = self._read(rank, posts)
        if rank in done or post is None or post.wait is None:
            return []
        done.add(rank)
        for other in post.wait.members:
            known = self._read(other, posts)
            if other != rank and known is not None and not known.has_started(post.wait):
                found = self._circle(other, posts, [*path, rank], done)
                if found:
                    return found
        return []

    def _fail(self, line: str, others: Iterable[int]) -> None:
        for group in self._own.started:
            self._own.left[group] = line
        self._publish()
        end = time.monotonic() + _LINGER_SECONDS
        while self.rank == 0 and time.monotonic() < end and not all(self._has_failed(rank) for rank in others):
            time.sleep(0.05)
        raise TransferError(line)

    def _has_failed(self, rank: int) -> bool:
        return rank == self.rank or bool(self._post_of(rank, {}).left)

    def _publish(self) -> None:
        self._own.serial += 1
        with contextlib.suppress(RuntimeError):  # the store does not answer
            self._store.set(_key(self.rank), self._own.text())

    def _read(self, rank: int, posts: dict[int, _Post | None]) -> _Post | None:
        if rank not in posts:
            if rank not in self._present and self._store.check([_key(rank)]):
                self._present.add(rank)
            posts[rank] = _Post.of(self._store.get(_key(rank))) if rank in self._present else None
        return posts[rank]

    def _post_of(self, rank: int, posts: dict[int, _Post | None]) -> _Post:
        return self._read(rank, posts) or _Post()


_current: tuple[Any, Meeting] | None = None


@atexit.register
def _at_exit() -> None:
    """Whoever still waits for this worker is told that it does not come."""
    if _current is not None:
        error = getattr(sys, "last_value", None)
        line = "" if error is None else str(error).split("\n")[0]
        _current[1].leave_all("its program has ended" if error is None else f"{type(error).__name__}: {line}")


def _key(rank: int) -> str:
    return f"cocod_accel/post/{rank}"


def _own_store() -> Any:
    from cocod_accel.comm.watchdog import default_store

    return default_store()


def _line(waits: dict[int, Any]) -> str:
    """Who is where, and what to do about it."""
    ranks_at: dict[str, list[int]] = {}
    for rank in sorted(waits, reverse=True):
        ranks_at.setdefault(waits[rank].where, []).insert(0, rank)
    places = [f"{_ranks(ranks)} {where}" for where, ranks in ranks_at.items()]
    is_attaching = any("attach(" in where for where in ranks_at)
    fix = "attach the same model with the same inner on all workers" if is_attaching else (
        "call averaged(), finish() and reweight() on all workers at the same step"
    )  # fmt: skip
    return f"{', '.join(places)}: {fix}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    shown = ", ".join(map(str, ranks[:8])) + (" and others" if len(ranks) > 8 else "")
    return f"ranks {shown} are"


class Seat:
    """One worker's place in one group, whose collectives it counts. ``where``: what the worker does when it waits there."""

    def __init__(self, meeting: Meeting, name: str, members: Sequence[int]) -> None:
        self.meeting, self.name, self.members = meeting, name, tuple(members)
        self.where: Callable[[], str] = lambda: "in a collective"

    @classmethod
    def of(cls, group: Any) -> Seat | None:
        """Of a process group whose collectives are waited for on the host; None where nothing can be told."""
        meeting = None if group is None else Meeting.here()
        if meeting is None or "gloo" not in str(dist.get_backend_config(group)):
            return None
        return cls(meeting, str(group.group_name), dist.get_process_group_ranks(group))

    @classmethod
    def for_calls(cls, group: Any) -> Seat | None:
        """Of the workers of a process group, whatever its backend, to announce calls in."""
        meeting = None if group is None else Meeting.here()
        if meeting is None or "fake" in str(dist.get_backend_config(group)):  # where nobody else is there
            return None
        return cls(meeting, f"{CALLS}{group.group_name}", dist.get_process_group_ranks(group))

    def takes(self, work: Any) -> Any:
        """The collective that has just been started there, to be waited for with patience."""
        return _Awaited(work, self, self.meeting.started(self.name))

    def told(self) -> str | None:
        """What another member said when it left; None if none has, or nothing can be read."""
        with contextlib.suppress(RuntimeError):
            return self.meeting.told(_Wait(self.name, 0, self.members, self.where()))
        return None

    def meets(self, what: str, passing: Callable[[], None] = lambda: None) -> None:
        """All workers are to call this now; raises on all of them if some call something else."""
        self.meeting.announce(self.name, what, self.members, passing)


class _Awaited:
    """A collective whose waiter looks up now and then."""

    __slots__ = ("_number", "_seat", "_work")

    def __init__(self, work: Any, seat: Seat, number: int) -> None:
        self._work, self._seat, self._number = work, seat, number

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        if not self._ends_within(_PATIENCE):
            meeting = self._seat.meeting
            with meeting.waiting(self._wait):
                meeting.look()
                while not self._ends_within(meeting.interval(len(self._seat.members))):
                    meeting.look()

    def _ends_within(self, patience: timedelta) -> bool:
        """False if it is still under way then; raises if it has failed."""
        try:
            self._work.wait(patience)
        except RuntimeError as error:
            if not self._work.is_completed():
                return False
            try:
                self._work.wait()  # it may have ended in the meantime
            except RuntimeError:
                told = None
                with contextlib.suppress(Exception):  # the store may have gone as well
                    told = self._seat.meeting.told(self._wait)
                if told is None:
                    raise
                raise TransferError(told) from error
        return True

    @property
    def _wait(self) -> _Wait:
        return _Wait(self._seat.name, self._number, self._seat.members, self._seat.where())
