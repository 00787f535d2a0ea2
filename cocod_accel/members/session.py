"""One worker among workers that come and go: who is there is asked anew for every average.

Averages are made one after the other by a thread of this worker, so that neither an absent lighthouse nor a slow worker
holds up a step. All who ask together get one list and draw the same conclusions from it: who sums with whom, with which
weights, who lacks what. An average that fails is not merged. It may have succeeded elsewhere: then the others have merged
one round more, which the next list shows, and whatever all must have in common comes from one of them, in full.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import queue
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cocod_accel.averaging.header import Kind
from cocod_accel.averaging.weights import Weights
from cocod_accel.comm.meeting import TransferError
from cocod_accel.comm.regroup import RegroupingComm, Rendezvous
from cocod_accel.comm.shutdown import rest_before_exit
from cocod_accel.members.engine import Engine, NoAnswerError, TorchftEngine, UnreachableError
from cocod_accel.members.entries import JOINS, MEMBER, NEW, Answer, Entry, Line, ahead_of, line_at, open_line
from cocod_accel.members.healing import Donor, HealingError, fetch
from cocod_accel.members.settings import Members, MembersError

_PAUSE_SECONDS = 0.05
#: For those who have just answered to come together.
_COME_SECONDS = 3.0
#: A round of the others, in timeouts.
_PATIENCE = 20
#: How long a worker that leaves waits for an average under way.
_CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class Gathering:
    """Who makes an average together."""

    comm: RegroupingComm
    weights: Weights
    #: After how many steps, as all of them count.
    at: int
    names: tuple[str, ...]


#: Makes one average with those who are there; raises a RuntimeError if the transfer fails.
Send = Callable[[Gathering], None]


@dataclass
class Job:
    """One average, asked for and made in the background. In the shape of a torch ``Work``."""

    kind: Kind
    at: int
    send: Send
    is_ready: bool
    leaves: bool
    done: threading.Event = field(default_factory=threading.Event)
    succeeded: bool = False
    error: BaseException | None = None

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        """Until it is made, or has failed; what must not be passed over is raised."""
        self.done.wait()
        if self.error is not None:
            error, self.error = self.error, None
            raise error


@dataclass(frozen=True)
class Presence:
    """``sync.members``: who made the last mean that this worker has merged, and what has happened so far."""

    #: Sorted; a worker that was started again has another name.
    names: tuple[str, ...]
    #: What each counted; 0: it had just come.
    weights: tuple[float, ...]
    #: After how many steps that mean was started.
    step: int
    #: Rounds that were merged, by this worker or by whoever handed it the model.
    rounds: int
    #: Rounds that this worker could not merge, because a transfer failed or nobody answered.
    lost_rounds: int
    #: How often this worker has got the model from another one.
    joined: int


class Session:
    """Membership of one worker. ``answer``: what it hands over to others, called by other threads."""

    def __init__(
        self, members: Members, about: dict[str, str], weight: float, answer: Callable[[str], bytes | None]
    ) -> None:
        self.members, self.about, self.weight = members, about, weight
        self.name = f"{members.name}:{uuid.uuid4().hex[:8]}"
        self.comm = RegroupingComm()
        self.merged = 0
        self.lost_rounds = self.joined = 0
        #: Who made the last mean that was merged.
        self.last: Gathering | None = None
        #: Whether this worker leaves at the end of this round, and whether it has.
        self.is_leaving = self.has_left = False
        #: Whether the others are so far ahead that this worker must join them.
        self.is_behind = False
        #: Whether somebody waits to be let in, and this worker is to be ready at the next round.
        self.is_asked = False
        #: Fetches what all workers have in common, if this worker has missed a round; None: there is no such thing.
        self.catch_up: Callable[[Entry], None] | None = None
        self._group = ""
        self._names: tuple[str, ...] = ()
        self._last: list[Entry] = []
        #: Whether rounds are made without asking, because the engine does not answer.
        self._is_adrift = False
        self._quiet_until = 0.0
        self._serial = 0
        self._donor = Donor(members.interface, members.token, answer)
        self._store = Rendezvous(members.interface, members.timeout)
        self._engine: Engine = TorchftEngine(members.address, self.name)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="members-rounds", daemon=True)
        self._thread.start()
        rest_before_exit()
        atexit.register(self.close, wait=False)  # of a program that does not

    def presence(self) -> Presence:
        last = self.last
        if last is None:
            return Presence((), (), 0, self.merged, self.lost_rounds, self.joined)
        return Presence(last.names, last.weights.values, last.at, self.merged, self.lost_rounds, self.joined)

    def submit(self, kind: Kind, at: int, send: Send, *, is_ready: bool = False, leaves: bool = False) -> Job:
        """Make an average in the background. ``leaves``: it is this worker's last one."""
        job = Job(kind, at, send, is_ready, leaves)
        self._jobs.put(job)
        return job

    def close(self, *, wait: bool = True) -> None:
        """This worker is gone. ``wait``: for an average under way, which others count on."""
        atexit.unregister(self.close)
        self._jobs.put(None)
        if wait:
            self._thread.join(_CLOSE_SECONDS)
        self._engine.close()
        self._donor.close()
        if not self._thread.is_alive():
            self.comm.leave()

    # ---- at the start

    def begin(self, digest: str) -> bool | None:
        """Wait for workers to begin with. Whether all of them hold the same model; None: others are training already."""
        started = time.monotonic()
        while True:
            answer = self._asked_patiently(lambda: self._entry(NEW, Kind.ROUND, 0, digest=digest), self.members.timeout)
            self._check_admission(answer)
            alike = answer.like(self.about)
            if any(entry.stage == MEMBER for entry in alike):
                return None
            here = [entry for entry in alike if entry.stage in (NEW, JOINS)]
            if len(here) >= self.members.first_workers:
                self.merged = max(entry.merged for entry in here)
                return len({(entry.digest, entry.merged) for entry in here}) == 1
            if time.monotonic() > started + self.members.timeout:
                strangers = f", and {answer.num_strangers} with another token" if answer.num_strangers else ""
                raise MembersError(
                    f"only {len(here)} of {self.members.first_workers} workers have come within {self.members.timeout:g} s"
                    f"{strangers}; start the others, or lower begin_with"
                )
            time.sleep(_PAUSE_SECONDS)

    def join(self, take_part: Callable[[Gathering, Any], None]) -> Entry | None:
        """Wait to be let in, and take part in a round with weight 0. The entry of whoever handed over its state.

        None: nobody is left, and this worker goes on from what it has.
        """
        while True:  # rounds of the others may be long
            answer = self._asked_patiently(lambda: self._entry(JOINS, Kind.ROUND, 0), _PATIENCE * self.members.timeout)
            self._check_admission(answer)
            alike = answer.like(self.about)
            if not any(entry.stage == MEMBER for entry in alike):
                first = min(alike, key=lambda entry: (-entry.merged, entry.name))
                if first.name == self.name:
                    self.is_behind = False
                    return None
                time.sleep(_PAUSE_SECONDS)
                continue
            found = open_line(alike)
            if found is None:
                continue
            line, ready = found
            state = None
            with contextlib.suppress(HealingError):  # then it sends nothing, and asks again
                found_state = fetch(ready.donor, self.members.token, f"state {ready.at}", self.members.timeout)
                if self.catch_up is not None:
                    self.catch_up(line.donor)
                state = found_state
            try:
                gathering = self._gathered(line)
                self._call_the_roll(gathering, Kind(ready.kind))
                take_part(gathering, state)
            except RuntimeError:
                self._broken()
                continue
            if state is not None:
                self.merged, self.is_behind = line.merged + 1, False
                self.joined += 1
                return ready

    # ---- the thread

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            try:
                self._make(job)
            except BaseException as error:
                job.error = error
            finally:
                job.done.set()

    def _make(self, job: Job) -> None:
        deadline = time.monotonic() + self.members.timeout
        while True:
            line = self._line(job)
            if line is not None and len(line.members) >= self.members.min_workers:
                try:
                    self._take_part(job, line)
                except RuntimeError:  # gloo, the store, or a header that does not fit
                    self._broken()
                else:
                    return
            elif line is not None and time.monotonic() > deadline:
                raise MembersError(
                    f"only {len(line.members)} of min_workers={self.members.min_workers} workers are left; this one stops"
                )
            elif line is not None:
                time.sleep(_PAUSE_SECONDS)
                continue
            if job.kind is Kind.ROUND:  # no step waits for another attempt: the next round takes it in
                self.lost_rounds += 1
                return
            if time.monotonic() > deadline:
                if self.members.min_workers > 1:
                    raise MembersError(f"no average could be made within {self.members.timeout:g} s; this worker stops")
                self.lost_rounds += 1
                own = self._entry(MEMBER, job.kind, job.at)
                self._take_part(job, Line([own], []))  # needs nobody
                return

    def _line(self, job: Job) -> Line | None:
        """Who is at the same place; None: nobody knows, or this worker has been left behind."""
        own = replace(self._entry(MEMBER, job.kind, job.at, is_ready=job.is_ready), leaves=job.leaves)
        try:
            if self._is_adrift and self._group:
                raise UnreachableError
            entries = self._ask(own).like(self.about)
            self._is_adrift = False
        except UnreachableError:
            self._is_adrift = True
            if not self._group:
                return Line([own], []) if job.kind is not Kind.ROUND and self.members.min_workers == 1 else None
            # As long as nobody is lost, nobody needs to ask. Whoever was let in counts from now on.
            entries = [
                replace(entry, stage=MEMBER, kind=job.kind, at=job.at, is_ready=False, leaves=False)
                for entry in self._last
                if not entry.leaves
            ]
        except NoAnswerError:
            return None
        if job.kind is Kind.ROUND and ahead_of(entries, job.kind, job.at):
            self.is_behind = True
            self._broken()
            return None
        line = line_at(entries, job.kind, job.at)
        is_wanted = any(entry.stage in (JOINS, NEW) for entry in entries) and not line.joiners
        if is_wanted and job.kind is Kind.ROUND and line.donor.name == self.name:
            self.is_asked = True
        return line

    def _take_part(self, job: Job, line: Line) -> None:
        if self.merged < line.merged and self.catch_up is not None:
            try:
                self.catch_up(line.donor)
            except HealingError as error:
                raise RuntimeError(str(error)) from error
        gathering = self._gathered(line)
        self._call_the_roll(gathering, job.kind)
        job.send(gathering)
        if any(entry.leaves for entry in self._last):
            # The engine would wait until it has forgotten them; those who are left know who they are.
            self._is_adrift, self._quiet_until = True, time.monotonic() + self._engine.forgets_after
        if job.kind is not Kind.EVALUATION:
            self.merged = line.merged + (job.kind is Kind.ROUND)
            self._last = [replace(entry, merged=self.merged) for entry in self._last]
        job.succeeded = True

    def _gathered(self, line: Line) -> Gathering:
        everyone = line.everyone
        names = tuple(entry.name for entry in everyone)
        rank = names.index(self.name)
        groups = {entry.group for entry in everyone}
        if not (self._names == names and groups == {self._group} and self._group):
            self._broken()
            tickets = ",".join(f"{entry.name}/{entry.serial}/{line.members[0].at}" for entry in everyone)
            group = hashlib.blake2b(tickets.encode(), digest_size=12).hexdigest()
            # Whoever is handed something first comes later; else, who does not come at once has died since it asked.
            is_slow = bool(line.joiners) or any(entry.merged < line.merged for entry in line.members)
            most = self.members.timeout
            come = most if is_slow else min(_COME_SECONDS, most)
            here = self.members.interface
            self.comm.form(everyone[0].store, group, rank, len(names), here, come=come, seconds=most)
            self._group, self._names = group, names
        self._last = everyone
        joining = {entry.name for entry in line.joiners}
        values = tuple(0.0 if entry.name in joining else entry.weight for entry in everyone)
        return Gathering(self.comm, Weights(values, rank), line.members[0].at, names)

    def _call_the_roll(self, gathering: Gathering, kind: Kind) -> None:
        """Everybody is here for the same, and they agree whether to ask again: else some would ask, and others wait."""
        is_up = 1.0 if self._engine.is_up and time.monotonic() > self._quiet_until else 0.0
        fields = [float(kind), float(kind) ** 2, float(gathering.at), float(gathering.at) ** 2, is_up]
        roll = torch.tensor(fields, dtype=torch.float64)
        gathering.comm.launch([roll]).wait()
        *sums, num_up = roll.tolist()
        size = gathering.comm.size
        if sums != [size * field for field in fields[:-1]]:
            raise TransferError("workers came for different averages")
        if num_up == size:
            self._is_adrift = False

    def _broken(self) -> None:
        """The group is of no use any more."""
        self._group, self._names = "", ()
        self.comm.leave()

    # ---- asking

    def _entry(self, stage: str, kind: Kind, at: int, *, is_ready: bool = False, digest: str = "") -> Entry:
        self._serial += 1
        return Entry(
            name=self.name,
            stage=stage,
            kind=int(kind),
            at=at,
            merged=self.merged,
            weight=self.weight,
            group=self._group,
            store=self._store.address,
            donor=self._donor.address,
            is_ready=is_ready,
            serial=self._serial,
            digest=digest,
            about=self.about,
        )

    def _ask(self, entry: Entry) -> Answer:
        present = self._engine.ask(entry.signed(self.members.token), self.members.timeout)
        return Answer.of(present, self.members.token)

    def _asked_patiently(self, entry: Callable[[], Entry], seconds: float) -> Answer:
        """Where nothing can be done without an answer."""
        started = time.monotonic()
        while True:
            try:
                return self._ask(entry())
            except (UnreachableError, NoAnswerError) as error:
                most = self.members.timeout if isinstance(error, UnreachableError) else seconds
                if time.monotonic() > started + most:
                    raise MembersError(f"{error}; start one with `cocod lighthouse`, or check the address") from error
                time.sleep(_PAUSE_SECONDS)

    def _check_admission(self, answer: Answer) -> None:
        """Whoever does not fit is refused by itself, before anybody waits for it."""
        training = [entry for entry in answer.entries if entry.stage == MEMBER]
        if not training and answer.are_strangers_training:
            raise MembersError("the token is not that of the workers of this run; start this one with their token")
        if any(entry.about == self.about for entry in training):
            return
        first = min(answer.entries, key=lambda entry: entry.name)
        others = training or ([first] if len(answer.like(self.about)) == 1 and len(answer.entries) > 1 else [])
        for key, there in others[0].about.items() if others else ():
            here = self.about.get(key, "")
            if here != there:
                is_digest = key in ("model", "frozen parameters")
                what = f"another {key}" if is_digest else f"{key} {there}, this one {here}"
                raise MembersError(f"the workers of this run have {what}; start this one like the others")
