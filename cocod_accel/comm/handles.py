"""A sum under way, and the contract of whoever can start one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cocod_accel.comm.device import Moment, beside, keep_until, order, runs_ahead


def ring_bytes(tensors: Sequence[Tensor], num_workers: int) -> int:
    """What one worker sends when these tensors are all-reduced in a ring: 2 (N - 1) / N of the payload."""
    return ring_total(sum(tensor.numel() * tensor.element_size() for tensor in tensors), num_workers)


def ring_total(num_bytes: int, num_workers: int) -> int:
    """The same for a payload of so many bytes."""
    return round(2 * (num_workers - 1) * num_bytes / num_workers)


def shares(tensor: Tensor, index: int, num_shares: int) -> list[Tensor]:
    """What one of a node's workers sums of a flat tensor: its share, and the few elements that cannot be shared out."""
    share = tensor.numel() // num_shares
    parts = [tensor[share * index : share * (index + 1)], tensor[share * num_shares :]]
    return [part for part in parts if part.numel()]


_HOST = torch.device("cpu")


class Handle:
    """A sum under way over tensors that belong to it until :meth:`wait` returns.

    On a CPU its end is noticed by :meth:`poll`, which the main thread calls in passing. A callback of the communication
    thread would be more precise, but a Python callback that runs while the interpreter exits aborts the process. On a
    device that works ahead a stream of its own waits for the end, and :meth:`wait` blocks no host: what comes next on the
    current stream comes after it.
    """

    def __init__(
        self,
        works: Sequence[Any],
        num_bytes: int,
        device: torch.device = _HOST,
        *,
        start: Moment | None = None,
        end: Moment | None = None,
        lane: str = "",
        kept: object = None,
    ) -> None:
        """``lane``: of whatever ends in the order of its launch; ``kept``: what the device still works on until the end."""
        self.num_bytes = num_bytes
        self.device = device
        self.start = Moment(device) if start is None else start
        self._end = end if works else self.start
        self._works = works
        if self._end is None and runs_ahead(device):
            with beside(device, f"ends {lane}"):
                for work in works:
                    order(work)
                self._end = Moment(device)
        if self._end is not None and works:
            keep_until(self._end, works, kept)

    def approach(self) -> None:
        """Called right before the time is taken from which on somebody waits for it."""

    def poll(self) -> None:
        """Note the time if the sum is complete by now."""
        if self._end is None and all(work.is_completed() for work in self._works):
            self._end = Moment()

    def wait(self) -> None:
        """Block until every tensor holds the sum; a failed collective raises here."""
        self.poll()
        for work in self._works:
            work.wait()
        if self._end is None:
            self._end = Moment()

    @property
    def is_complete(self) -> bool:
        """Whether the sum has been seen to be complete."""
        return self._end is not None and self._end.has_come

    @property
    def end(self) -> Moment:
        """When the sum was first seen to be complete; after :meth:`wait`."""
        assert self._end is not None, "not waited for"
        return self._end


def exposed_and_hidden(spans: Sequence[tuple[float, float]], blocked_from: float) -> tuple[float, float]:
    """Split the time covered by ``spans`` (start, end; sorted by start) at the moment the main thread blocks."""
    exposed = hidden = 0.0
    covered_until = float("-inf")
    for start, end in spans:
        start = max(start, covered_until)
        if end > start:
            hidden += max(0.0, min(end, blocked_from) - start)
            exposed += max(0.0, end - max(start, blocked_from))
            covered_until = end
    return exposed, hidden


@dataclass(frozen=True)
class Exchange:
    """Bytes in two stages: a worker gets its row of everybody's, makes one row of them, and then all get all of those.

    The tensors have a row per worker, and belong to the exchange until it has been waited for.
    """

    rows: Tensor  # row j goes to worker j
    incoming: Tensor  # row j comes from worker j
    combine: Callable[[], None]  # all of incoming -> this worker's of made; called by the main thread
    made: Tensor  # in the end row j is what worker j has made; may be ``rows`` itself
    results: Tensor  # what was made of all shards, one shard after the other; ``made`` itself, where there is one
    num_bytes: int  # of ``rows`` and ``made`` in the mean, without their headers


class Communicator(Protocol):
    """What averaging needs of a group of workers."""

    rank: int
    size: int
    #: Workers that hold the same model share it out: this one exchanges the shard of this number.
    shard_index: int
    num_shards: int

    def launch(self, tensors: Sequence[Tensor]) -> Handle:
        """Start summing ``tensors`` in place over all workers, in the background."""
        ...

    def sent_bytes(self, tensors: Sequence[Tensor]) -> int:
        """What this worker sends for such a sum."""
        ...

    def exchange(self, parts: Sequence[Exchange]) -> Handle:
        """Start both stages of all ``parts`` in the background.

        On a CPU the second begins in passing, at a poll or at the wait; a device comes to it by itself.
        """
        ...

    def let_go(self, seconds: float) -> None:
        """Begin the second stage of what nobody will wait for, or others, who have begun it, could not end theirs.

        Waits no longer than this for the first stage to end.
        """
        ...


class SoloComm:
    """A group of one: every sum is complete at once."""

    rank = 0
    size = 1
    shard_index = 0
    num_shards = 1

    def launch(self, tensors: Sequence[Tensor]) -> Handle:
        return Handle((), 0)

    def sent_bytes(self, tensors: Sequence[Tensor]) -> int:
        return 0

    def exchange(self, parts: Sequence[Exchange]) -> Handle:
        raise AssertionError("cannot exchange with a single worker")

    def let_go(self, seconds: float) -> None:
        """Nothing is ever under way."""
