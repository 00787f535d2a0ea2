"""The other end of an asynchronous run: the process that holds the model, and applies gradients as they arrive."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import get_rank, get_world_size

from cocod_accel.algorithms import Algorithm
from cocod_accel.algorithms.asgd import ASGD
from cocod_accel.averaging.messages import Ask, Up
from cocod_accel.averaging.server import Answer, Served, Server
from cocod_accel.comm.agreement import exchange_reports
from cocod_accel.comm.groups import world_group
from cocod_accel.comm.meeting import LEFT, TransferError
from cocod_accel.comm.shutdown import rest, rest_before_exit
from cocod_accel.comm.star import Spoke, lines_to_workers
from cocod_accel.sync.peers import PeerWatch
from cocod_accel.sync.preflight import ATTACHED, Report, Subject, check_agreement, raise_problems

# Between two looks for messages, while none comes; and for whoever has left.
_LEAST_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3
_LOOK_SECONDS = 1.0


def serve(model: nn.Module, optimizer: Any, algorithm: ASGD) -> Served:
    """Hold the model of an ``ASGD`` run until all workers have detached, or ended after ``finish()``.

    The last rank calls this where all others call ``attach``, with a model and an optimizer that are built like theirs. The
    optimizer here is the one that steps: momentum is kept here, and learning rates come with the gradients. Returns what it
    has done; the model is then the trained one, without the buffers of workers.
    """
    problem: Exception | None = None
    subject: Subject | None = None
    group = world_group()
    try:
        if isinstance(algorithm, Algorithm) and not algorithm.is_served:
            raise ValueError(f"serve() is for ASGD, and {type(algorithm).__name__} has no server; call attach()")
        subject = Subject.examine(model, optimizer, algorithm, 1)
    except Exception as error:  # the workers must hear of it
        problem = error
    what = "" if group is None else f"attach() with {get_world_size(group)} workers"
    report = Report.of(subject, algorithm, 1, problem, serves=True)
    reports: list[Report] = exchange_reports(report, group, what=what)
    raise_problems(reports, problem)
    assert subject is not None
    check_agreement(reports, algorithm)
    rest_before_exit()
    counter = _Counter(subject, algorithm, lines_to_workers(group), get_rank(group))
    ATTACHED.add(subject.module)
    try:
        return counter.serve()
    finally:
        ATTACHED.discard(subject.module)


class _Window:
    """Where one worker is served: its next message, and answers on their way."""

    def __init__(self, spoke: Spoke, server: Server) -> None:
        self.spoke, self._server = spoke, server
        self.is_gone = self.is_done = self.has_said_so = False
        self._rooms = [[torch.zeros(server.numbers_size, dtype=torch.float64), *server.code.room()] for _ in range(2)]
        self._outgoing: deque[tuple[list[Any], Answer]] = deque()
        self._works: list[Any] = []
        self._post()

    def _post(self) -> None:
        self._works = self.spoke.up.post(self._rooms[0])

    @property
    def has_message(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def message(self) -> list[Tensor]:
        """The message that has come; the next one may come from now on."""
        for work in self._works:
            work.wait()
        self._rooms.reverse()
        message = self._rooms[1]
        ask = Ask(int(message[0][Up.ASK]))
        if ask is Ask.LEAVE:
            self.is_gone = True
        # What follows a message comes before the next one.
        elif not (ask is Ask.LOAD and int(message[0][Up.EXTRA])):
            self._post()
        return message

    def extra(self, size: int) -> Tensor:
        """So many bytes that follow a message."""
        held = torch.empty(size, dtype=torch.uint8)
        for work in self.spoke.up.post([held]):
            work.wait()
        self._post()
        return held

    def send(self, answer: Answer) -> None:
        works = self.spoke.down.post([answer.numbers, *answer.model.buffers])
        if len(answer.extra):
            works += self.spoke.down.post([answer.extra])
        self._outgoing.append((works, answer))

    def clear_out(self) -> None:
        """Use the memory of what has been sent again."""
        while self._outgoing and all(work.is_completed() for work in self._outgoing[0][0]):
            works, answer = self._outgoing.popleft()
            for work in works:
                work.wait()
            self._server.free(answer)


class _Counter:
    """Serves all workers until none is left."""

    def __init__(self, subject: Subject, algorithm: ASGD, lines: Sequence[Spoke], rank: int) -> None:
        self._rank = rank
        self._server = Server(subject.trainable, subject.optimizers, len(lines), algorithm.payload, algorithm.bound)
        self._windows = [_Window(spoke, self._server) for spoke in lines]
        self._peers: PeerWatch | None = None

    def serve(self) -> Served:
        try:
            self._serve()
        except BaseException as error:
            line = str(error).split("\n")[0]
            self._leave(line if LEFT in line else f"rank {self._rank}, the server, {LEFT}{type(error).__name__}: {line}")
            raise
        if self._peers is not None:
            self._peers.stop()
        rest()
        return self._server.served

    # ---- details

    def _serve(self) -> None:
        pause, looked = _LEAST_PAUSE, time.monotonic()
        while not all(window.is_gone for window in self._windows):
            if self._pass():
                pause, looked = _LEAST_PAUSE, time.monotonic()
                continue
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
            if time.monotonic() - looked > _LOOK_SECONDS:
                looked = time.monotonic()
                self._look()

    def _pass(self) -> bool:
        """Look at every worker once; whether any has sent something."""
        found = False
        for rank, window in enumerate(self._windows):
            if window.is_gone:
                continue
            try:
                window.clear_out()
                message = window.message() if window.has_message else None
            except RuntimeError as error:
                self._lost(window, rank, error)
                continue
            if message is not None:
                found = True
                self._handle(rank, window, message)
        return found

    def _handle(self, rank: int, window: _Window, message: Sequence[Tensor]) -> None:
        numbers, *gradient = message
        ask = Ask(int(numbers[Up.ASK]))
        if ask is Ask.WATCH:
            self._watch(float(numbers[Up.EXTRA]))
            return
        for answer in self._server.take(rank, numbers, gradient, window.extra):
            self._windows[answer.rank].send(answer)
            self._windows[answer.rank].is_done = ask is Ask.FINISH
        if ask.meets_all and any(other.is_gone for other in self._windows):
            gone = [r for r, other in enumerate(self._windows) if other.is_gone]
            raise TransferError(f"rank {gone[0]} {LEFT}it was detached, and rank {rank} waits for it")

    def _lost(self, window: _Window, rank: int, error: RuntimeError) -> None:
        """A worker's connection has failed: it may, once it has finished."""
        if window.is_done:
            window.is_gone = True
            return
        if isinstance(error, TransferError):
            raise error
        raise TransferError(f"rank {rank} {LEFT}its connection to the server has closed") from error

    def _look(self) -> None:
        """Has anybody left whose connection is still there? Seen twice, or what it said last may not have come yet."""
        for window in self._windows:
            line = None if window.is_gone else window.spoke.up.has_left()
            if line is not None and window.has_said_so:
                if not window.is_done:
                    raise TransferError(line)
                window.is_gone = True
            window.has_said_so = line is not None

    def _watch(self, seconds: float) -> None:
        if self._peers is None:
            num_workers = len(self._windows)
            where = lambda: f"update {self._server.version + 1}"  # noqa: E731
            self._peers = PeerWatch(self._rank, num_workers, world_group(), seconds, where, has_server=True)

    def _leave(self, line: str) -> None:
        for seat in [seat for window in self._windows for seat in window.spoke.seats]:
            seat.meeting.leave([seat.name], line)
