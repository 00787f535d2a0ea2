"""A slow link, emulated: sums take what a ring on that link would take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cocod_accel.comm.device import Moment, wait_for_stream
from cocod_accel.comm.handles import Communicator, Exchange, Handle


@dataclass(frozen=True)
class Link:
    """A link between neighbours in a ring; no bandwidth means that only its latency counts."""

    bandwidth_mbit: float | None = None
    latency_ms: float = 0.0

    def seconds(self, num_bytes: int, num_workers: int) -> float:
        """A ring all-reduce in which a worker sends ``num_bytes``, in 2 (N - 1) messages one after the other."""
        sending = 0.0 if self.bandwidth_mbit is None else num_bytes * 8 / (self.bandwidth_mbit * 1e6)
        return sending + 2 * (num_workers - 1) * self.latency_ms / 1e3

    def __str__(self) -> str:
        bandwidth = "" if self.bandwidth_mbit is None else f"{self.bandwidth_mbit:g} Mbit/s, "
        return f"{bandwidth}{self.latency_ms:g} ms"


class EmulatedLink:
    """Stretches the sums of another communicator to what a ring on ``link`` would take, in the background.

    Every sum carries each worker's time of launch, so that all agree on when the last one joined: from then on the
    emulated transfer runs, after those before it. Workers share a clock, so they must share a machine.

    It is the host's clock, so a device that works ahead of it is waited for where a transfer begins and where it is waited
    for: its current stream only, or there would be nothing to compute beside.
    """

    def __init__(self, comm: Communicator, link: Link) -> None:
        #: What really communicates.
        self.inner = comm
        self._link = link
        self.rank, self.size = comm.rank, comm.size
        self.shard_index, self.num_shards = comm.shard_index, comm.num_shards
        self._last: _StretchedHandle | None = None

    def sent_bytes(self, tensors: Sequence[Tensor]) -> int:
        return self.inner.sent_bytes(tensors)

    def launch(self, tensors: Sequence[Tensor]) -> Handle:
        begin, joined = self._joining(tensors[0].device)
        return self._stretched([self.inner.launch([*tensors, joined])], self.sent_bytes(tensors), begin, joined)

    def let_go(self, seconds: float) -> None:
        self.inner.let_go(seconds)

    def exchange(self, parts: Sequence[Exchange]) -> Handle:
        begin, joined = self._joining(parts[0].rows.device)
        inner = [self.inner.launch([joined]), self.inner.exchange(parts)]
        return self._stretched(inner, inner[1].num_bytes, begin, joined)

    def _joining(self, device: torch.device) -> tuple[float, Tensor]:
        wait_for_stream(device)
        joined = torch.zeros(self.size, dtype=torch.int64)  # some devices have no float64
        begin = time.perf_counter()
        joined[self.rank] = round(1e9 * begin)
        return begin, joined.to(device)

    def _stretched(self, inner: Sequence[Handle], num_bytes: int, begin: float, joined: Tensor) -> Handle:
        self._last = _StretchedHandle(inner, num_bytes, self._link.seconds(num_bytes, self.size), joined, self._last)
        self._last.start = Moment(seconds=begin)
        return self._last


class _StretchedHandle(Handle):
    """Complete when the real sum is, and not before its emulated transfer."""

    def __init__(
        self, inner: Sequence[Handle], num_bytes: int, seconds: float, joined: Tensor, before: _StretchedHandle | None
    ) -> None:
        super().__init__((), num_bytes)
        self._end = None
        self._inner, self._seconds, self._joined, self._before = inner, seconds, joined, before
        self._due: float | None = None

    def approach(self) -> None:
        wait_for_stream(self._joined.device)

    def poll(self) -> None:
        # The real sum may have been seen late, but it was there in time: it is not noted here unless it is complete.
        if self._end is None and self._arrived() and time.perf_counter() >= self._due_seconds():
            self._end = Moment(seconds=self._due_seconds())

    def wait(self) -> None:
        self.poll()
        if self._end is not None:
            return
        was_there = self._arrived()
        due = self._due_seconds()
        self._end = Moment(seconds=due if was_there else max(due, time.perf_counter()))
        time.sleep(max(0.0, due - time.perf_counter()))

    def _arrived(self) -> bool:
        for handle in self._inner:
            handle.poll()
        is_complete = all(handle.is_complete for handle in self._inner)
        return is_complete and (self._before is None or self._before._arrived())

    def _due_seconds(self) -> float:
        """When the emulated transfer ends; the same on every worker."""
        if self._due is None:
            for handle in self._inner:
                handle.wait()
            begin = int(self._joined.max()) / 1e9
            if self._before is not None:
                begin = max(begin, self._before._due_seconds())
                self._before = None  # or every transfer of a run would be kept
            self._due = begin + self._seconds
        return self._due
