"""One worker's model whose original a server holds: what it sends there, and what it takes from there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cocod_accel.averaging.flat import FlatCopy, floating
from cocod_accel.averaging.gradients import fill
from cocod_accel.averaging.messages import Ask, Down, GradientCode, Up, numbers_of, packed, unpacked
from cocod_accel.averaging.polls import Ballot
from cocod_accel.averaging.replica import Replica
from cocod_accel.averaging.route import Route
from cocod_accel.comm.handles import Handle
from cocod_accel.comm.star import Spoke


@dataclass
class _Letter:
    """A message and the answer to it; the tensors are used again."""

    numbers: Tensor
    gradient: list[Tensor]
    answer: Tensor
    model: FlatCopy
    number: int = 0
    handle: Handle | None = None


class ServedReplica(Replica):
    """``bound``: of this worker's gradients, how many may be unanswered while it computes the next one."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        buffers: Callable[[], list[Tensor]],
        route: Route,
        optimizers: Sequence[Optimizer],
        *,
        payload: str,
        seed: int,
        bound: int,
    ) -> None:
        super().__init__(parameters, buffers, route)
        self.evaluation = _ServedEvaluation(self)
        self._optimizers, self._bound = optimizers, bound
        self._code = GradientCode(payload, self.parameters, seed, route.weights.rank)
        self._has_gradient = False
        #: Sent and not taken in, in their order; and the last that has been taken in, but not yet into the model.
        self._unanswered: deque[_Letter] = deque()
        self._arrived: _Letter | None = None
        self._spare: list[_Letter] = []
        #: Gradients sent, and the version of the model that this worker holds.
        self.number = self.version = 0
        self._ballot: Ballot | None = None
        self._stop_at = self._save_at = self._saved_at = 0
        #: Of this worker's gradients: their number, and the mean and the largest staleness.
        self.answered, self.staleness, self.largest_staleness = 0, 0.0, 0
        #: What has come and gone over the server's link, as far as this worker knows.
        self.link_bytes = 0

    # ---- verbs of the algorithm

    @torch.no_grad()
    def take_gradients(self) -> None:
        """From ``.grad``, which is then empty, so that the optimizer's step here changes nothing."""
        found = {p: p.grad for p in self.parameters if p.grad is not None}
        if found:
            fill(self._code.flat, found)
            self._has_gradient = True
        for parameter in self.parameters:
            parameter.grad = None

    def send(self) -> None:
        """Start the gradient that has been taken, if there is one."""
        if self._has_gradient:
            self._has_gradient = False
            self.number += 1
            letter = self._letter(Ask.STEP)
            self._code.write(letter.gradient, self.number)
            stop, save = (0, 0) if self._ballot is None else self._ballot.cast()
            letter.numbers[Up.STOP], letter.numbers[Up.SAVE] = stop, save
            self._post(letter, self._code.num_bytes)
            self.route.traffic.num_bytes += self._code.num_bytes
            self._unanswered.append(letter)

    def receive(self) -> None:
        """Wait until no more gradients than the bound are unanswered; then take in the last model that has come."""
        # Of the gradient that has just been sent no answer is taken in unless it must be: what this worker goes on with
        # would depend on a race.
        self._collect(self.number - self._bound, most=self.number - min(self._bound, 1))
        self._adopt()
        self._count_votes()

    def wait(self) -> None:
        """For all answers; they are taken into the model when they would have been."""
        self._collect(self.number)

    def settle(self) -> None:
        """Take in the answers to all that has been sent."""
        self.wait()
        self._adopt()

    def poll(self) -> None:
        for letter in self._unanswered:
            assert letter.handle is not None
            letter.handle.poll()

    def vote_with(self, ballot: Ballot) -> None:
        self._ballot = ballot

    def begin(self, *, equal: bool) -> None:
        if not equal:
            self._take_model(Ask.MODEL)

    # ---- the server's model

    def equalise(self) -> None:
        self.adopt_exact()

    def launch_exact(self) -> None:
        """There is nothing to start before all have settled."""

    def adopt_exact(self) -> None:
        """x <- the server's model, once all workers' gradients are in it; floating buffers <- their mean over workers."""
        self.settle()
        self._take_model(Ask.FINISH)
        self.average_buffers()

    def average_buffers(self) -> None:
        if not self.route.is_alone:
            copy = FlatCopy((), floating(self.buffers()))
            copy.load()
            self.route.average_(copy.buffers)
            copy.store()

    @contextmanager
    def served_model(self) -> Iterator[FlatCopy]:
        """A copy of the server's model, once all workers' gradients are in it; this worker's own stays as it is."""
        self._collect(self.number)
        letter = self._request(Ask.MODEL)
        yield letter.model
        self._spare.append(letter)

    def watch(self, seconds: float) -> None:
        """From now on the server watches the workers, as they do each other."""
        self._tell(Ask.WATCH, seconds)

    def leave(self) -> None:
        """This worker needs the server no more."""
        self._collect(self.number)
        self._tell(Ask.LEAVE)

    # ---- the state between two steps

    def exchange_state(self) -> dict[str, Any]:
        """Of this worker, and of the server on worker 0. All workers call this."""
        self._collect(self.number)
        arrived = self._arrived
        letter = self._request(Ask.SAVE)
        size, server = int(letter.answer[Down.EXTRA]), None
        if size:
            held = torch.empty(size, dtype=torch.uint8)
            self._wait_for(self._spoke.down.post([held]))
            server = unpacked(held)
        self._spare.append(letter)
        return {
            "version": self.version,
            "arrived": None if arrived is None else [int(arrived.answer[Down.VERSION]), *arrived.model.buffers],
            "code": self._code.state(),
            "staleness": [self.answered, self.staleness, self.largest_staleness],
            "server": server,
        }

    def load_exchanged(self, state: dict[str, Any] | None) -> None:
        """All workers call this. None: go on from worker 0's model, with an optimizer that has no state; and without a
        state of this worker's own, from the server's model.
        """
        self._collect(self.number)
        if self._arrived is not None:
            self._spare.append(self._arrived)
            self._arrived = None
        self.number = self._stop_at = self._save_at = self._saved_at = 0
        server = None if state is None else state["server"]
        if state is None and self.route.weights.rank == 0:
            model = FlatCopy(self.parameters)
            with torch.no_grad():
                model.load()
            server = {"version": 0, "model": model.buffers, "optimizers": None}
        sends = server is not None and self.route.weights.rank == 0
        letter = self._request(Ask.LOAD, packed(server) if sends else None)
        self._code.load(None if state is None else state.get("code"))
        self.answered, self.staleness, self.largest_staleness = 0, 0.0, 0
        if state is None or "version" not in state:
            self._adopt_from(letter)
            return
        self.version = state["version"]
        self.answered, self.staleness, self.largest_staleness = state["staleness"]
        if state["arrived"] is None:
            self._spare.append(letter)
        else:
            version, *buffers = state["arrived"]
            letter.answer[Down.VERSION] = version
            letter.model.fill(buffers)
            self._arrived = letter

    # ---- details

    @property
    def _spoke(self) -> Spoke:
        assert isinstance(self.route.server, Spoke), "there is no other process"
        return self.route.server

    def _letter(self, ask: Ask) -> _Letter:
        letter = self._spare.pop() if self._spare else self._new_letter()
        weights, own = self.route.weights, numbers_of(self._optimizers)
        letter.numbers.zero_()
        letter.numbers[Up.SIZE :] = torch.tensor(own, dtype=torch.float64)
        letter.numbers[Up.ASK], letter.numbers[Up.NUMBER], letter.numbers[Up.VERSION] = ask, self.number, self.version
        letter.numbers[Up.SCALE] = 1.0 if weights.equal else len(weights.values) * weights.share
        letter.number = self.number
        return letter

    def _new_letter(self) -> _Letter:
        size = int(Up.SIZE) + len(numbers_of(self._optimizers))
        numbers, answer = (torch.zeros(n, dtype=torch.float64) for n in (size, int(Down.SIZE)))
        return _Letter(numbers, self._code.room(), answer, FlatCopy(self.parameters))

    def _post(self, letter: _Letter, num_bytes: int) -> None:
        sent, received = [letter.numbers, *letter.gradient], [letter.answer, *letter.model.buffers]
        assert self.route.server is not None, "attached without a server"
        letter.handle = self.route.server.exchange(sent, received, num_bytes)

    def _request(self, ask: Ask, extra: Tensor | None = None) -> _Letter:
        """Ask, and wait until all workers have asked the same and the server has answered. Not counted: not training."""
        letter = self._letter(ask)
        letter.numbers[Up.EXTRA] = 0 if extra is None else len(extra)
        self._post(letter, 0)
        if extra is not None:
            self._wait_for(self._spoke.up.post([extra]))
        assert letter.handle is not None
        letter.handle.wait()
        self._note(letter)
        return letter

    def _tell(self, ask: Ask, value: float = 0.0) -> None:
        """Something that is not answered."""
        letter = self._letter(ask)
        letter.numbers[Up.EXTRA] = value
        self._wait_for(self._spoke.up.post([letter.numbers, *letter.gradient]))
        self._spare.append(letter)

    def _wait_for(self, works: Sequence[Any]) -> None:
        for work in works:
            work.wait()

    def _take_model(self, ask: Ask) -> None:
        self._adopt_from(self._request(ask))

    def _collect(self, until: int, most: int | None = None) -> None:
        """Take answers in, in their order: those to gradients up to ``until``, and up to ``most`` those that are there."""
        while self._unanswered:
            letter = self._unanswered[0]
            assert letter.handle is not None
            letter.handle.poll()
            is_wanted = letter.number <= until
            if not is_wanted and (most is None or letter.number > most or not letter.handle.is_complete):
                return
            self._unanswered.popleft()
            self.route.traffic.wait_for([letter.handle])
            self._note(letter)
            staleness = int(letter.answer[Down.STALENESS])
            self.answered += 1
            self.staleness += (staleness - self.staleness) / self.answered
            self.largest_staleness = max(self.largest_staleness, staleness)
            if self._arrived is not None:
                self._spare.append(self._arrived)
            self._arrived = letter

    def _note(self, letter: _Letter) -> None:
        letter.handle = None
        self.link_bytes = max(self.link_bytes, int(letter.answer[Down.LINK_BYTES]))
        self._stop_at, self._save_at = int(letter.answer[Down.STOP_AT]), int(letter.answer[Down.SAVE_AT])

    def _adopt(self) -> None:
        arrived, self._arrived = self._arrived, None
        if arrived is not None:
            self._adopt_from(arrived)

    @torch.no_grad()
    def _adopt_from(self, letter: _Letter) -> None:
        letter.model.store()
        self.version = int(letter.answer[Down.VERSION])
        self._spare.append(letter)

    def _count_votes(self) -> None:
        if self._ballot is not None:
            stops = 0 < self._stop_at <= self.number
            saves = self._saved_at < self._save_at <= self.number
            if saves:
                self._saved_at = self._save_at
            if stops or saves:
                self._ballot.count(stops, saves)


class _ServedEvaluation:
    """Puts the server's model in the place of a worker's, and the worker's back."""

    def __init__(self, replica: ServedReplica) -> None:
        self._replica = replica

    @contextmanager
    def averaged(self) -> Iterator[None]:
        replica = self._replica
        buffers = replica.buffers()
        with torch.no_grad():
            local = FlatCopy(replica.parameters)
            local.load()
            kept = [buffer.clone() for buffer in buffers]
        try:
            with replica.served_model() as model, torch.no_grad():
                model.store()
                replica.average_buffers()
            yield
        finally:
            with torch.no_grad():
                local.store()
                for buffer, value in zip(buffers, kept, strict=True):
                    buffer.copy_(value)
