"""Messages between workers and a server of theirs, which is the last rank of all.

Torch learns whether a send or receive of gloo has completed only by waiting for it, and a wait that times out closes every
connection. A worker must be able to ask, or nothing could travel while it computes. So a message is sent and received as a
broadcast in a group of two, and each direction of a connection is a group of its own. All of it is started and waited for by
main threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from cocod_accel.comm.groups import Channels, TorchComm, common_group
from cocod_accel.comm.handles import Handle
from cocod_accel.comm.meeting import LEFT, Seat, TransferError


class Lane:
    """One direction of a connection; the other end posts tensors of the same sizes in the same order."""

    def __init__(self, group: Any, source: int) -> None:
        self._group, self._source = group, source
        #: This end's place in it.
        self.seat = Seat.of(group)

    def post(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Start to send or receive these, whichever this end does; they belong to the message until its end."""
        works = [dist.broadcast(tensor, self._source, group=self._group, async_op=True) for tensor in tensors if len(tensor)]
        return works if self.seat is None else [self.seat.takes(work) for work in works]

    def has_left(self) -> str | None:
        """What the other end has said when it left."""
        return None if self.seat is None else self.seat.told()


@dataclass(frozen=True)
class Spoke:
    """A connection between one worker and the server, seen from either end."""

    up: Lane
    down: Lane
    #: Of the worker, and how many there are.
    rank: int
    num_workers: int

    @property
    def seats(self) -> list[Seat]:
        return [lane.seat for lane in (self.up, self.down) if lane.seat is not None]

    def exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor], num_bytes: int) -> Handle:
        """A worker's message, and the answer to it. ``num_bytes``: that count as sent."""
        works = [*self.up.post(sent), *self.down.post(received)]
        return Handle([_Asked(work, self.num_workers) for work in works], num_bytes, kept=(sent, received))


class _Asked:
    """What a worker waits for; if it fails, the server is to blame, or knows who is."""

    __slots__ = ("_num_workers", "_work")

    def __init__(self, work: Any, num_workers: int) -> None:
        self._work, self._num_workers = work, num_workers

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        try:
            self._work.wait()
        except TransferError:
            raise
        except RuntimeError as error:
            raise TransferError(f"the server, rank {self._num_workers}, {LEFT}its connection has closed") from error


def channels_to_server(group: Any) -> Channels:
    """Of a worker: with all other workers, and with the server."""
    workers, (spoke,) = _connected(group)
    everyone = TorchComm(workers, is_seated=True)
    return Channels(everyone, None, everyone, server=spoke)


def lines_to_workers(group: Any) -> list[Spoke]:
    """Of the server: its end of all connections."""
    return _connected(group)[1]


def _connected(group: Any) -> tuple[Any, list[Spoke]]:
    """The group of all workers, and this rank's connections. All ranks make all groups, or their names would differ."""
    ranks = dist.get_process_group_ranks(group)
    own, server = dist.get_rank(group), len(ranks) - 1
    workers = common_group(group, ranks[:-1])
    found = []
    for place, rank in enumerate(ranks[:-1]):
        groups = [common_group(group, [rank, ranks[server]]) for _ in range(2)]
        if own in (place, server):
            up, down = (Lane(one, source) for one, source in zip(groups, (rank, ranks[server]), strict=True))
            found.append(Spoke(up, down, place, server))
    return workers, found
