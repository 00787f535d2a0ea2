"""Communication between N workers that live in one process: a sum is formed when the last of them has joined it.

A communicator like those of :mod:`cocod_accel.comm.groups`. As on a process group, the n-th thing that one worker starts
belongs to the n-th thing that every other starts. Nobody can wait here for a worker that has not joined, because nobody
else is running: a driver must let all workers launch before it lets any of them land.

Workers may share nodes, as with :class:`~cocod_accel.comm.groups.TwoLevelComm`: what is summed is then equal inside a node,
or has been handed to :meth:`InProcessGroup.inside` before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cocod_accel.comm.handles import Exchange, Handle, SoloComm, ring_bytes, ring_total, shares

_Part = Tensor | Exchange


@dataclass
class _Meeting:
    """One sum, or one exchange, and who has joined it so far."""

    size: int
    joined: dict[int, Sequence[_Part]] = field(default_factory=dict)
    is_over: bool = False

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.joined]


@dataclass(frozen=True)
class _Work:
    """A worker's part in a meeting, as :class:`~cocod_accel.comm.handles.Handle` knows it from ``torch.distributed``."""

    meeting: _Meeting
    rank: int

    def is_completed(self) -> bool:
        return self.meeting.is_over

    def wait(self) -> None:
        if not self.meeting.is_over:
            raise RuntimeError(
                f"worker {self.rank} waits for workers {self.meeting.missing} of its own process, which can never join; "
                "launch on all workers before any of them lands"
            )


@dataclass(frozen=True)
class _Waiting:
    """What is to be summed inside a node, and what is to be done with the sum."""

    tensor: Tensor
    then: Callable[[], object]


class InProcessGroup:
    """Workers 0 to ``size`` - 1 of this process; :meth:`member` is what each of them communicates through.

    ``node_size``: of workers next to each other, which share a node.
    """

    def __init__(self, size: int, node_size: int = 1) -> None:
        self.size, self.node_size = size, node_size
        self._meetings: dict[int, _Meeting] = {}
        self._num_joined = [0] * size
        #: What each worker wants to be summed inside its node before its next sum between nodes.
        self._first: list[list[_Waiting]] = [[] for _ in range(size)]

    def member(self, rank: int) -> InProcessComm:
        return InProcessComm(self, rank)

    def inside(self, rank: int) -> InsideNode:
        """The way to the others of a worker's node, for what then travels between nodes."""
        return InsideNode(self._first[rank], rank % self.node_size, self.node_size)

    def join(self, rank: int, parts: Sequence[_Part]) -> _Work:
        """Worker ``rank`` brings its part of what it starts next; the last one to come completes it for all."""
        number = self._num_joined[rank]
        self._num_joined[rank] += 1
        meeting = self._meetings.setdefault(number, _Meeting(self.size))
        for other, theirs in meeting.joined.items():
            if _kind(theirs) != _kind(parts):
                raise RuntimeError(f"worker {rank} starts {_kind(parts)} where worker {other} has started {_kind(theirs)}")
            break  # all who came before are alike
        meeting.joined[rank] = parts
        if len(meeting.joined) == self.size:
            del self._meetings[number]
            self._complete([meeting.joined[rank] for rank in range(self.size)])
            meeting.is_over = True
            meeting.joined = {}  # the tensors belong to their workers again
        return _Work(meeting, rank)

    @torch.no_grad()
    def _complete(self, everybodys: list[Sequence[_Part]]) -> None:
        nodes = [slice(first, first + self.node_size) for first in range(0, self.size, self.node_size)]
        for node in nodes:
            for everyones in zip(*self._first[node], strict=True):
                _sum([own.tensor for own in everyones])
                for own in everyones:
                    own.then()
        for waiting in self._first:
            waiting.clear()
        for parts in zip(*everybodys, strict=True):
            if isinstance(parts[0], Exchange):
                exchanges = [part for part in parts if isinstance(part, Exchange)]
                for place in range(self.node_size):
                    _exchange(exchanges[place :: self.node_size])
                for node in nodes if self.node_size > 1 else ():
                    _gather(exchanges[node])
            else:
                _sum([part for part in parts if isinstance(part, Tensor)], self.node_size)


class InProcessComm:
    """One worker's end of an :class:`InProcessGroup`. Rank and size are those of nodes."""

    def __init__(self, group: InProcessGroup, worker: int) -> None:
        self._group, self._worker = group, worker
        self.rank, self.size = worker // group.node_size, group.size // group.node_size
        self.shard_index, self.num_shards = worker % group.node_size, group.node_size

    def launch(self, tensors: Sequence[Tensor]) -> Handle:
        return Handle([self._group.join(self._worker, list(tensors))], self.sent_bytes(tensors))

    def sent_bytes(self, tensors: Sequence[Tensor]) -> int:
        """What this worker would send if it had a machine of its own; between nodes."""
        own = [part for tensor in tensors for part in shares(tensor, self.shard_index, self.num_shards)]
        return ring_bytes(own, self.size)

    def let_go(self, seconds: float) -> None:
        """Whatever all workers have joined is complete."""

    def exchange(self, parts: Sequence[Exchange]) -> Handle:
        num_bytes = ring_total(sum(part.num_bytes for part in parts), self.size)
        return Handle([self._group.join(self._worker, list(parts))], num_bytes)


class InsideNode(SoloComm):
    """Sums inside a node that need not wait: they are formed when the workers of all nodes next meet."""

    def __init__(self, waiting: list[_Waiting], rank: int, size: int) -> None:
        self._waiting = waiting
        self.rank, self.size = rank, size

    def sum_later(self, tensor: Tensor, then: Callable[[], object]) -> None:
        """``then`` is called once ``tensor`` holds the node's sum, before it travels between nodes."""
        self._waiting.append(_Waiting(tensor, then))


def _kind(parts: Sequence[_Part]) -> str:
    """What must be alike between workers, in words."""
    tensors = [part.rows if isinstance(part, Exchange) else part for part in parts]
    shapes = ", ".join(f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)
    return f"{'an exchange' if parts and isinstance(parts[0], Exchange) else 'a sum'} of [{shapes}]"


def _sum(tensors: Sequence[Tensor], node_size: int = 1) -> None:
    """In order of rank, one worker a node. With two that is a real all-reduce to the bit, because addition commutes."""
    first, *others = tensors[::node_size]
    for tensor in others:
        first.add_(tensor)
    for tensor in tensors:
        if tensor is not first:
            tensor.copy_(first)


def _exchange(parts: Sequence[Exchange]) -> None:
    for rank, part in enumerate(parts):
        for sender, other in enumerate(parts):
            part.incoming[sender].copy_(other.rows[rank])
    for part in parts:
        part.combine()
    for part in parts:
        for owner, other in enumerate(parts):
            if other is not part:
                part.made[owner].copy_(other.made[owner])


def _gather(node: Sequence[Exchange]) -> None:
    """All workers of a node get what each of them has made of its shard."""
    made = torch.cat([part.made.reshape(-1) for part in node])
    for part in node:
        part.results.view(-1).copy_(made)


@dataclass(eq=False)
class _Letter:
    """A message to a server of this process, and where the answer goes."""

    sent: list[Tensor]
    received: list[Tensor]
    is_answered: bool = False

    def is_completed(self) -> bool:
        return self.is_answered

    def wait(self) -> None:
        if not self.is_answered:
            raise RuntimeError("this waits for a server of its own process; deliver its message first")


class InProcessSpoke:
    """One worker's connection to a server of this process: nothing is taken or arrives before somebody says so.

    Like :class:`~cocod_accel.comm.star.Spoke`, for messages with an answer.
    """

    def __init__(self, rank: int, num_workers: int) -> None:
        self.rank, self.num_workers = rank, num_workers
        #: What has been sent; what the server has read of it, and has not answered; what it has. All in their order.
        self.letters: deque[_Letter] = deque()
        self._unanswered: deque[_Letter] = deque()
        self._answered: deque[_Letter] = deque()
        self._num_delivered = 0

    def exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor], num_bytes: int) -> Handle:
        letter = _Letter(list(sent), list(received))
        self.letters.append(letter)
        return Handle([letter], num_bytes)

    def take(self) -> list[Tensor]:
        """The next message, for the server."""
        letter = self.letters.popleft()
        self._unanswered.append(letter)
        return letter.sent

    def answer(self, tensors: Sequence[Tensor]) -> None:
        """To the first message that is not answered."""
        letter = self._unanswered.popleft()
        for place, tensor in zip(letter.received, tensors, strict=True):
            place.copy_(tensor)
        self._answered.append(letter)

    def deliver(self, number: int | None = None) -> None:
        """The first ``number`` answers of all have come by now; None: all that there are."""
        while self._answered and (number is None or self._num_delivered < number):
            self._answered.popleft().is_answered = True
            self._num_delivered += 1
