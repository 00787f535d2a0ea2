"""The only caller of collectives: start a sum over all workers, wait for it later.

Whoever averages sees ``launch(tensors) -> Handle`` and ``handle.wait()``, never ``torch.distributed``, so the
same code runs on gloo, on NCCL and alone. Start and end times are kept, because time spent blocked and
time hidden behind computation is what this project is about.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def ring_bytes(tensors: Sequence[Tensor], num_workers: int) -> int:
    """What one worker sends when these tensors are all-reduced in a ring: 2 (N - 1) / N of the payload."""
    payload = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return round(2 * (num_workers - 1) * payload / num_workers)


class Handle:
    """A sum under way over tensors that belong to it until :meth:`wait` returns.

    Its end is noticed by :meth:`poll`, which the main thread calls in passing. A callback of the communication thread
    would be more precise, but a Python callback that runs while the interpreter exits aborts the process.
    """

    def __init__(self, works: Sequence[Any], num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.start_seconds = time.perf_counter()
        self._end_seconds = None if works else self.start_seconds
        self._works = works

    def poll(self) -> None:
        """Note the time if the sum is complete by now."""
        if self._end_seconds is None and all(work.is_completed() for work in self._works):
            self._end_seconds = time.perf_counter()

    def wait(self) -> None:
        """Block until every tensor holds the sum; a failed collective raises here."""
        self.poll()
        for work in self._works:
            work.wait()
        if self._end_seconds is None:
            self._end_seconds = time.perf_counter()

    @property
    def is_complete(self) -> bool:
        """Whether the sum has been seen to be complete."""
        return self._end_seconds is not None

    @property
    def end_seconds(self) -> float:
        """When the sum was first seen to be complete; after :meth:`wait`."""
        assert self._end_seconds is not None, "not waited for"
        return self._end_seconds


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

    rows: Tensor  # row j goes to worker j; in the end it is what worker j has made
    incoming: Tensor  # row j comes from worker j
    combine: Callable[[], None]  # all of incoming -> this worker's of rows; runs on the main thread


class Communicator(Protocol):
    """What averaging needs of a group of workers."""

    rank: int
    size: int

    def launch(self, tensors: Sequence[Tensor]) -> Handle:
        """Start summing ``tensors`` in place over all workers, in the background."""
        ...

    def sent_bytes(self, tensors: Sequence[Tensor]) -> int:
        """What this worker sends for such a sum."""
        ...

    def exchange(self, parts: Sequence[Exchange]) -> Handle:
        """Start both stages of all ``parts`` in the background; the second begins in passing, at a poll or at the wait."""
        ...


class SoloComm:
    """A group of one: every sum is complete at once."""

    rank = 0
    size = 1

    def launch(self, tensors: Sequence[Tensor]) -> Handle:
        return Handle((), 0)

    def sent_bytes(self, tensors: Sequence[Tensor]) -> int:
        return 0

    def exchange(self, parts: Sequence[Exchange]) -> Handle:
        raise AssertionError("a worker alone has nobody to exchange with")


class TorchComm:
    """``torch.distributed`` on a process group that nobody else uses, so that no other order can mix in."""

    def __init__(self, group: Any, gathers: Any = None) -> None:
        self.group = group
        #: Where second stages are sent: workers begin them at different moments, between whatever else they send.
        self._gathers = gathers
        self._last: _GatheredHandle | None = None
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def launch(self, tensors: Sequence[Tensor]) -> Handle:
        works = [dist.all_reduce(tensor, group=self.group, async_op=True) for tensor in tensors]
        return Handle(works, self.sent_bytes(tensors))

    def sent_bytes(self, tensors: Sequence[Tensor]) -> int:
        return ring_bytes(tensors, self.size)

    def exchange(self, parts: Sequence[Exchange]) -> Handle:
        assert self._gathers is not None, "opened without exchanges"
        works = [dist.all_to_all_single(part.incoming, part.rows, group=self.group, async_op=True) for part in parts]
        # N - 1 of N rows in either stage, as in a ring.
        scattered = Handle(works, self.sent_bytes([part.rows for part in parts]))
        in_passing = _may_gather_in_passing([part.rows for part in parts])
        self._last = _GatheredHandle(scattered, lambda: self._gather(parts, scattered), self._last, in_passing)
        return self._last

    def _gather(self, parts: Sequence[Exchange], scattered: Handle) -> list[Any]:
        scattered.wait()  # complete, but it may have failed
        works = []
        for part in parts:
            part.combine()
            whole, mine = part.rows.view(-1), part.rows[self.rank]
            works.append(dist.all_gather_into_tensor(whole, mine, group=self._gathers, async_op=True))
        return works


class TwoLevelComm:
    """Sums between nodes over a slow link that carries every model once a node.

    The workers of a node hold equal tensors. Each sums only its share of them with its peers on the other nodes; then
    the node gathers the shares. Rank and size are those of nodes.
    """

    def __init__(self, outer: Communicator, node: Any) -> None:
        #: Between this worker and its peers.
        self.outer = outer
        self.rank, self.size = outer.rank, outer.size
        self._node = node
        self._place, self._num_mates = dist.get_rank(node), dist.get_world_size(node)
        self._last: _GatheredHandle | None = None

    def with_outer(self, outer: Communicator) -> TwoLevelComm:
        """The same node, and another way between nodes; this one stays as it is."""
        changed = TwoLevelComm(outer, self._node)
        changed._last = self._last
        return changed

    def launch(self, tensors: Sequence[Tensor]) -> Handle:
        inner = self.outer.launch([part for tensor in tensors for part in self._parts(tensor)])
        in_passing = _may_gather_in_passing(tensors)
        self._last = _GatheredHandle(inner, lambda: self._gather(tensors), self._last, in_passing)
        return self._last

    def sent_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Between nodes. Inside its node the worker sends the rest of every tensor's share to its mates."""
        return self.outer.sent_bytes([part for tensor in tensors for part in self._parts(tensor)])

    def exchange(self, parts: Sequence[Exchange]) -> Handle:
        raise AssertionError("refused at attach")

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        """What this worker sums: its share, and the few elements that cannot be shared out, which all of them sum."""
        share = tensor.numel() // self._num_mates
        left = tensor[share * self._num_mates :]
        parts = [tensor[share * self._place : share * (self._place + 1)], left]
        return [part for part in parts if part.numel()]

    def _gather(self, tensors: Sequence[Tensor]) -> list[Any]:
        works = []
        for tensor in tensors:
            share = tensor.numel() // self._num_mates
            if share:
                mine = tensor[share * self._place : share * (self._place + 1)]
                whole = tensor[: share * self._num_mates]
                works.append(dist.all_gather_into_tensor(whole, mine, group=self._node, async_op=True))
        return works


def _may_gather_in_passing(tensors: Sequence[Tensor]) -> bool:
    """Not on devices, where kernels of two groups that start in another order elsewhere may wait for each other for ever.

    There a second stage begins where it is waited for.
    """
    return all(tensor.device.type == "cpu" for tensor in tensors)


class _GatheredHandle(Handle):
    """Complete when shares have been gathered, which begins when this worker's own has been summed."""

    def __init__(
        self, inner: Handle, gather: Callable[[], list[Any]], before: _GatheredHandle | None, in_passing: bool
    ) -> None:
        super().__init__((), inner.num_bytes)
        self.start_seconds, self._end_seconds = inner.start_seconds, None
        self._inner, self._before, self._in_passing = inner, before, in_passing
        self._gather: Callable[[], list[Any]] | None = gather
        self._has_begun = False

    def poll(self) -> None:
        if not self._in_passing and not self._has_begun:
            return
        self._inner.poll()
        # Workers must gather in the same order, whichever sum each of them sees complete first.
        if self._before is not None and not self._before._has_begun:
            self._before.poll()
        if self._inner.is_complete and (self._before is None or self._before._has_begun):
            self._begin()
        if self._has_begun:
            super().poll()

    def wait(self) -> None:
        self.poll()
        self._begin_in_order()
        super().wait()
        self._works = ()

    def _begin_in_order(self) -> None:
        if not self._has_begun:
            if self._before is not None:
                self._before._begin_in_order()
            self._inner.wait()
            self._begin()

    def _begin(self) -> None:
        if self._gather is not None:
            self._has_begun = True
            self._works = self._gather()
            # Or every sum of a run would be kept, and the tensors of the last one.
            self._before = self._gather = None


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
    """

    def __init__(self, comm: Communicator, link: Link) -> None:
        #: What really communicates.
        self.inner = comm
        self._link = link
        self.rank, self.size = comm.rank, comm.size
        self._last: _StretchedHandle | None = None

    def sent_bytes(self, tensors: Sequence[Tensor]) -> int:
        return self.inner.sent_bytes(tensors)

    def launch(self, tensors: Sequence[Tensor]) -> Handle:
        begin, joined = self._joining(tensors[0].device)
        return self._stretched([self.inner.launch([*tensors, joined])], self.sent_bytes(tensors), begin, joined)

    def exchange(self, parts: Sequence[Exchange]) -> Handle:
        begin, joined = self._joining(parts[0].rows.device)
        inner = [self.inner.launch([joined]), self.inner.exchange(parts)]
        return self._stretched(inner, inner[1].num_bytes, begin, joined)

    def _joining(self, device: torch.device) -> tuple[float, Tensor]:
        joined = torch.zeros(self.size, dtype=torch.float64)
        begin = time.perf_counter()
        joined[self.rank] = begin
        return begin, joined.to(device)

    def _stretched(self, inner: Sequence[Handle], num_bytes: int, begin: float, joined: Tensor) -> Handle:
        self._last = _StretchedHandle(inner, num_bytes, self._link.seconds(num_bytes, self.size), joined, self._last)
        self._last.start_seconds = begin
        return self._last


class _StretchedHandle(Handle):
    """Complete when the real sum is, and not before its emulated transfer."""

    def __init__(
        self, inner: Sequence[Handle], num_bytes: int, seconds: float, joined: Tensor, before: _StretchedHandle | None
    ) -> None:
        super().__init__((), num_bytes)
        self._end_seconds = None
        self._inner, self._seconds, self._joined, self._before = inner, seconds, joined, before
        self._due: float | None = None

    def poll(self) -> None:
        # The real sum may have been seen late, but it was there in time: it is not noted here unless it is complete.
        if self._end_seconds is None and self._arrived() and time.perf_counter() >= self._due_seconds():
            self._end_seconds = self._due_seconds()

    def wait(self) -> None:
        self.poll()
        if self._end_seconds is not None:
            return
        was_there = self._arrived()
        due = self._due_seconds()
        self._end_seconds = due if was_there else max(due, time.perf_counter())
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
            begin = float(self._joined.max())
            if self._before is not None:
                begin = max(begin, self._before._due_seconds())
                self._before = None  # or every transfer of a run would be kept
            self._due = begin + self._seconds
        return self._due


@dataclass(frozen=True)
class Channels:
    """Who a worker communicates with, each on process groups that nobody else uses, so that no other order can mix in."""

    #: Models, between nodes.
    between: Communicator
    #: Gradients, inside this node; None: every worker is a node.
    inside: Communicator | None
    #: Questions to all workers.
    everyone: Communicator

    @classmethod
    def open(cls, group: Any, mates: Sequence[int], peers: Sequence[int], *, exchanges: bool = False) -> Channels:
        """For a worker with these ranks on its node and in its place on all nodes. Every worker of ``group`` calls this."""
        everyone = TorchComm(private_group(group), private_group(group) if exchanges else None)
        if len(mates) == 1:
            return cls(everyone, None, everyone)
        inside, gathers = (private_group(group, mates) for _ in range(2))
        outer: Communicator = TorchComm(private_group(group, peers)) if len(peers) > 1 else SoloComm()
        return cls(TwoLevelComm(outer, gathers), TorchComm(inside), everyone)

    @classmethod
    def alone(cls) -> Channels:
        return cls(SoloComm(), None, SoloComm())


def private_group(group: Any, ranks: Sequence[int] | None = None) -> Any:
    """A new process group with the members of ``group``, or with some of them; every one of those must call this."""
    ranks = dist.get_process_group_ranks(group) if ranks is None else list(ranks)
    return dist.new_group(ranks, timeout=_timeout_of(group), use_local_synchronization=len(ranks) < dist.get_world_size())


def node_group(size: int) -> Any:
    """The group of the ``size`` workers next to each other in rank that this worker is among; None if it is alone."""
    if size == 1 or default_group() is None:
        return None
    group, _ = dist.new_subgroups(size, timeout=_timeout_of(dist.group.WORLD))
    return group


def _timeout_of(group: Any) -> timedelta | None:
    """The timeout the user gave ``group``; a new group would take torch's default."""
    for device in ("cuda", "cpu"):
        try:
            timeout: timedelta = group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):  # another backend, or a torch that keeps it elsewhere
            continue
        return timeout
    return None


def exchange_reports(report: Any, group: Any) -> list[Any]:
    """Every worker's report, in rank order; a group of None is this worker alone."""
    if group is None:
        return [report]
    reports: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, report, group=group)
    return reports


def try_together(call: Callable[[], T], group: Any) -> tuple[list[T], str | None]:
    """Call something that may fail on every worker; what it returned on each, or the first worker's error in words.

    Whatever goes wrong on one worker, the others hear of it before anybody waits.
    """
    value: T | None = None
    error: str | None = None
    try:
        value = call()
    except Exception as problem:
        lines = str(problem).splitlines() or [type(problem).__name__]
        error = lines[0] if isinstance(problem, ValueError | OSError) else f"{type(problem).__name__}: {lines[0]}"
    reports: list[tuple[T, str | None]] = exchange_reports((value, error), group)
    for rank, (_, message) in enumerate(reports):
        if message is not None:
            return [], f"rank {rank}: {message}"
    return [result for result, _ in reports], None


def launch_like_ddp(buffer: Tensor, group: Any) -> Handle:
    """Start the stock DDP reduction, to the bit: the mean over ``group``, formed by multiplying with 1 / N."""
    buffer.mul_(1 / dist.get_world_size(group))
    return TorchComm(group).launch([buffer])


def default_group() -> Any:
    """The default process group if several processes are connected, else None."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return dist.group.WORLD
    return None


def wait_for_device() -> None:
    """Until a device that works ahead of the host has caught up; its collectives, too."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def bytes_of(tensor: Tensor) -> Any:
    """The raw bytes of a tensor's values as a buffer object, for checksums."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
