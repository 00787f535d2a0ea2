"""Communication between N workers that live in one process: a sum is formed when the last of them has joined it.

A communicator like those of :mod:`cocod_accel.comm.groups`. As on a process group, the n-th thing that one worker starts
belongs to the n-th thing that every other starts. Nobody can wait here for a worker that has not joined, because nobody
else is running: a driver must let all workers launch before it lets any of them land.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cocod_accel.comm.handles import Exchange, Handle, ring_bytes, ring_total

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


class InProcessGroup:
    """Workers 0 to ``size`` - 1 of this process; :meth:`member` is what each of them communicates through."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._meetings: dict[int, _Meeting] = {}
        self._num_joined = [0] * size

    def member(self, rank: int) -> InProcessComm:
        return InProcessComm(self, rank)

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
            _complete([meeting.joined[rank] for rank in range(self.size)])
            meeting.is_over = True
            meeting.joined = {}  # the tensors belong to their workers again
        return _Work(meeting, rank)


class InProcessComm:
    """One worker's end of an :class:`InProcessGroup`."""

    def __init__(self, group: InProcessGroup, rank: int) -> None:
        self._group = group
        self.rank, self.size = rank, group.size
        self.shard_index, self.num_shards = 0, 1

    def launch(self, tensors: Sequence[Tensor]) -> Handle:
        return Handle([self._group.join(self.rank, list(tensors))], self.sent_bytes(tensors))

    def sent_bytes(self, tensors: Sequence[Tensor]) -> int:
        """What this worker would send if it had a machine of its own."""
        return ring_bytes(tensors, self.size)

    def let_go(self, seconds: float) -> None:
        """Whatever all workers have joined is complete."""

    def exchange(self, parts: Sequence[Exchange]) -> Handle:
        return Handle(
            [self._group.join(self.rank, list(parts))], ring_total(sum(part.num_bytes for part in parts), self.size)
        )


def _kind(parts: Sequence[_Part]) -> str:
    """What must be alike between workers, in words."""
    tensors = [part.rows if isinstance(part, Exchange) else part for part in parts]
    shapes = ", ".join(f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)
    return f"{'an exchange' if parts and isinstance(parts[0], Exchange) else 'a sum'} of [{shapes}]"


@torch.no_grad()
def _complete(everybodys: list[Sequence[_Part]]) -> None:
    for parts in zip(*everybodys, strict=True):
        if isinstance(parts[0], Exchange):
            _exchange([part for part in parts if isinstance(part, Exchange)])
        else:
            _sum([part for part in parts if isinstance(part, Tensor)])


def _sum(tensors: list[Tensor]) -> None:
    """In order of rank. With two workers that is a real all-reduce to the bit, because addition commutes."""
    first, *others = tensors
    for tensor in others:
        first.add_(tensor)
    for tensor in others:
        tensor.copy_(first)


def _exchange(parts: list[Exchange]) -> None:
    for rank, part in enumerate(parts):
        for sender, other in enumerate(parts):
            part.incoming[sender].copy_(other.rows[rank])
    for part in parts:
        part.combine()
    for part in parts:
        for owner, other in enumerate(parts):
            if other is not part:
                part.made[owner].copy_(other.made[owner])
