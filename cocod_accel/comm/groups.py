"""The only caller of collectives: start a sum over all workers, wait for it later.

Whoever averages sees ``launch(tensors) -> Handle`` and ``handle.wait()``, never ``torch.distributed``, so the
same code runs on gloo, on NCCL and alone. Start and end times are kept, because time spent blocked and
time hidden behind computation is what this project is about.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from cocod_accel.comm.device import Moment, Reached, beside, order, runs_ahead
from cocod_accel.comm.handles import Communicator, Exchange, Handle, SoloComm, ring_bytes, ring_total, shares
from cocod_accel.comm.meeting import Seat

_HOST = torch.device("cpu")


class TorchComm:
    """``torch.distributed`` on a process group that nobody else uses, so that no other order can mix in."""

    def __init__(self, group: Any, gathers: Any = None, *, is_seated: bool = False) -> None:
        """``is_seated``: whoever waits on the host notices if the others will not come."""
        self.group = group
        self._seat, self._gather_seat = (Seat.of(one) if is_seated else None for one in (group, gathers))
        #: Where second stages are sent: workers begin them at different moments, between whatever else they send.
        self._gathers = gathers
        self._last: _GatheredHandle | None = None
        self._lane = str(id(group))
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.shard_index, self.num_shards = 0, 1

    def launch(self, tensors: Sequence[Tensor]) -> Handle:
        works = [_taken(dist.all_reduce(tensor, group=self.group, async_op=True), self._seat) for tensor in tensors]
        return Handle(works, self.sent_bytes(tensors), _device_of(tensors), lane=self._lane, kept=tensors)

    def sent_bytes(self, tensors: Sequence[Tensor]) -> int:
        return ring_bytes(tensors, self.size)

    def exchange(self, parts: Sequence[Exchange]) -> Handle:
        assert self._gathers is not None, "opened without exchanges"
        works = [
            _taken(dist.all_to_all_single(part.incoming, part.rows, group=self.group, async_op=True), self._seat)
            for part in parts
        ]
        # N - 1 of N rows in either stage, as in a ring.
        num_bytes = ring_total(sum(part.num_bytes for part in parts), self.size)
        device = parts[0].rows.device
        scattered = Handle(works, num_bytes, device, lane=self._lane, kept=parts)
        self._last = _GatheredHandle(scattered, lambda: self._gather(parts), self._last, device, kept=parts)
        return self._last

    def let_go(self, seconds: float) -> None:
        if self._last is not None:
            self._last.let_go(seconds)

    def warm_up(self, device: torch.device) -> None:
        """Connect now what NCCL connects at the first use, which takes seconds; gloo's groups are connected already."""
        if runs_ahead(device):
            rows = torch.zeros(self.size, 1, device=device)
            works: list[Any] = [dist.all_reduce(rows, group=self.group, async_op=True)]
            if self._gathers is not None:
                works.append(dist.all_to_all_single(torch.empty_like(rows), rows, group=self.group, async_op=True))
                works.append(dist.all_gather_into_tensor(rows.clone().view(-1), rows[0], group=self._gathers, async_op=True))
            for work in works:
                work.wait()

    def _gather(self, parts: Sequence[Exchange]) -> list[Any]:
        works = []
        for part in parts:
            part.combine()
            whole, mine = part.made.view(-1), part.made[self.rank]
            work = dist.all_gather_into_tensor(whole, mine, group=self._gathers, async_op=True)
            works.append(_taken(work, self._gather_seat))
        return works

    @property
    def seats(self) -> list[Seat]:
        return [seat for seat in (self._seat, self._gather_seat) if seat is not None]


class TwoLevelComm:
    """Sums between nodes over a slow link that carries every model once a node.

    The workers of a node hold equal tensors. Each sums only its share of them with its peers on the other nodes; then
    the node gathers the shares. Rank and size are those of nodes.
    """

    def __init__(self, outer: Communicator, node: Any, seat: Seat | None = None) -> None:
        #: Between this worker and its peers.
        self.outer = outer
        self.rank, self.size = outer.rank, outer.size
        self._node = node
        self._seat = seat
        self.shard_index, self.num_shards = dist.get_rank(node), dist.get_world_size(node)
        self._last: _GatheredHandle | None = None

    def with_outer(self, outer: Communicator) -> TwoLevelComm:
        """The same node, and another way between nodes; this one stays as it is."""
        changed = TwoLevelComm(outer, self._node, self._seat)
        changed._last = self._last
        return changed

    def launch(self, tensors: Sequence[Tensor]) -> Handle:
        inner = self.outer.launch([part for tensor in tensors for part in self._parts(tensor)])
        device = _device_of(tensors)
        self._last = _GatheredHandle(inner, lambda: self._gather(tensors), self._last, device, kept=tensors)
        return self._last

    def sent_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Between nodes. Inside the node, shares are gathered; that is not counted."""
        return self.outer.sent_bytes([part for tensor in tensors for part in self._parts(tensor)])

    def exchange(self, parts: Sequence[Exchange]) -> Handle:
        """This worker's shard, with its peers; then the node gathers the results of all shards."""
        inner = self.outer.exchange(parts)
        device = parts[0].rows.device
        self._last = _GatheredHandle(inner, lambda: self._gather_results(parts), self._last, device, kept=parts)
        return self._last

    def let_go(self, seconds: float) -> None:
        self.outer.let_go(seconds)
        if self._last is not None:
            self._last.let_go(seconds)

    def _gather_results(self, parts: Sequence[Exchange]) -> list[Any]:
        works = []
        for part in parts:
            whole, mine = part.results.view(-1), part.made.view(-1)
            works.append(_taken(dist.all_gather_into_tensor(whole, mine, group=self._node, async_op=True), self._seat))
        return works

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        return shares(tensor, self.shard_index, self.num_shards)

    def _gather(self, tensors: Sequence[Tensor]) -> list[Any]:
        works = []
        for tensor in tensors:
            share = tensor.numel() // self.num_shards
            if share:
                mine = tensor[share * self.shard_index : share * (self.shard_index + 1)]
                whole = tensor[: share * self.num_shards]
                works.append(_taken(dist.all_gather_into_tensor(whole, mine, group=self._node, async_op=True), self._seat))
        return works

    @property
    def seats(self) -> list[Seat]:
        outer = self.outer.seats if isinstance(self.outer, TorchComm) else []
        return [*outer, *([] if self._seat is None else [self._seat])]


class _GatheredHandle(Handle):
    """Complete when shares have been gathered, which begins when this worker's own has been summed.

    A device comes to the gathering by itself: it is put behind the sum on a stream of its own, in the order of the program,
    which is the same on all workers. (Begun in passing, kernels of two groups might start in different orders on different
    workers, and wait for each other for ever. So where the sum is emulated, and ended by the host, it begins at the wait.)
    """

    def __init__(
        self,
        inner: Handle,
        gather: Callable[[], list[Any]],
        before: _GatheredHandle | None,
        device: torch.device,
        *,
        kept: object,
    ) -> None:
        self._inner, self._before = inner, before
        self._in_passing = not runs_ahead(device)
        self._gather: Callable[[], list[Any]] | None = gather
        self._has_begun = False
        if not runs_ahead(inner.device):
            super().__init__((), inner.num_bytes, start=inner.start)
            self._end = None
            return
        with beside(inner.device, "averages"):
            self._begin()
            for work in self._works:
                order(work)
            end, reached = Moment(inner.device), Reached(inner.device)
        super().__init__([reached], inner.num_bytes, inner.device, start=inner.start, end=end, kept=kept)

    def poll(self) -> None:
        if not self._in_passing:
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

    def let_go(self, seconds: float) -> None:
        """Begin to gather as soon as that can be, without waiting for the end; give up if it takes too long, or fails."""
        deadline = time.monotonic() + seconds
        self._in_passing = True
        with contextlib.suppress(RuntimeError):  # another worker is gone: this one does not need it any more
            while not self._has_begun and time.monotonic() < deadline:
                self.poll()
                time.sleep(0.001)

    def _begin_in_order(self) -> None:
        if not self._has_begun:
            if self._before is not None:
                self._before._begin_in_order()
            self._begin()

    def _begin(self) -> None:
        if self._gather is not None:
            self._inner.wait()  # if it is complete, it may have failed; on a device, the current stream waits
            self._has_begun = True
            self._works = self._gather()
            # Or every sum of a run would be kept, and the tensors of the last one.
            self._before = self._gather = None


def _taken(work: Any, seat: Seat | None) -> Any:
    """To be waited for with patience, if the host waits for it."""
    return work if seat is None else seat.takes(work)


def _device_of(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")


#: The ranks of a node, whether there are exchanges, and the blocks of threads of an average.
ChannelKey: TypeAlias = tuple[tuple[int, ...], bool, int | None]


@dataclass(frozen=True)
class Channels:
    """Who a worker communicates with, each on process groups that nobody else uses, so that no other order can mix in."""

    #: Models, between nodes.
    between: Communicator
    #: Gradients, inside this node; None: every worker is a node.
    inside: Communicator | None
    #: Questions to all workers.
    everyone: Communicator
    #: The server that holds the model; None: every worker holds its own.
    server: Any = None

    @property
    def rounds(self) -> list[Seat]:
        """This worker's places where models travel."""
        comms = {self.between, self.everyone}
        seats = [seat for comm in comms if isinstance(comm, TorchComm | TwoLevelComm) for seat in comm.seats]
        return seats if self.server is None else [*seats, *self.server.seats]

    @property
    def calls(self) -> Seat | None:
        """And where calls that meet all workers are announced; None: this worker is alone."""
        return Seat.for_calls(self.everyone.group) if isinstance(self.everyone, TorchComm) else None

    @property
    def backwards(self) -> list[Seat]:
        """And where gradients do, inside a node."""
        return self.inside.seats if isinstance(self.inside, TorchComm) else []

    @classmethod
    def open(
        cls,
        group: Any,
        node_ranks: Sequence[int],
        peers: Sequence[int],
        *,
        exchanges: bool = False,
        device: torch.device = _HOST,
        ctas: int | None = None,
        sharded: bool = False,
    ) -> Channels:
        """For a worker with these ranks on its node and in its place on all nodes. Every worker of ``group`` calls this.

        ``sharded``: the workers of a node hold different shards of its model, so each sums all that it has.

        ``ctas``: of an NCCL kernel between nodes, beside which something is computed; None: as many as NCCL likes.
        """
        is_flat, is_seated = len(node_ranks) == 1, not runs_ahead(device)

        def between(ranks: Sequence[int] | None = None) -> Any:
            return private_group(group, ranks, device=device, ctas=ctas)

        if is_flat:
            everyone = TorchComm(between(), between() if exchanges else None, is_seated=is_seated)
            everyone.warm_up(device)
            return cls(everyone, None, everyone)
        everyone = TorchComm(private_group(group, device=device), is_seated=is_seated)
        inside, gathers = (private_group(group, node_ranks, device=device) for _ in range(2))
        outer: Communicator = SoloComm()
        if len(peers) > 1:
            outer = TorchComm(between(peers), between(peers) if exchanges else None, is_seated=is_seated)
            outer.warm_up(device)
        for comm in (TorchComm(inside, gathers), everyone):
            comm.warm_up(device)
        within = TorchComm(inside, is_seated=is_seated)
        if sharded:
            return cls(outer, within, everyone)
        return cls(TwoLevelComm(outer, gathers, Seat.of(gathers) if is_seated else None), within, everyone)

    @classmethod
    def alone(cls) -> Channels:
        return cls(SoloComm(), None, SoloComm())


def private_group(
    group: Any, ranks: Sequence[int] | None = None, *, device: torch.device = _HOST, ctas: int | None = None
) -> Any:
    """A new process group with the members of ``group``, or with some of them; every one of those must call this."""
    ranks = dist.get_process_group_ranks(group) if ranks is None else list(ranks)
    is_part = len(ranks) < dist.get_world_size()
    timeout = _timeout_of(group)
    backends = _backends_of(group)
    options = _nccl_options(timeout, ctas) if device.type == "cuda" and "cuda:nccl" in backends else None
    # Options are one backend's, so it is named: the user's own, with what tensors of the host may travel through.
    named: dict[str, Any] = {} if options is None else {"backend": backends, "pg_options": options}
    if is_part and options is not None:  # else NCCL guesses the device from the rank
        named["device_id"] = device
    with _split_from_nothing() if is_part else contextlib.nullcontext():
        return dist.new_group(ranks, timeout=timeout, use_local_synchronization=is_part, **named)


def common_group(group: Any, ranks: Sequence[int]) -> Any:
    """A new group with some of the ranks of ``group``, all of which call this; with those of the host's collectives."""
    return dist.new_group(list(ranks), timeout=_timeout_of(group), backend="gloo")


def _backends_of(group: Any) -> str:
    """Such as "cpu:gloo,cuda:nccl"."""
    return str(dist.get_backend_config(group))


def _nccl_options(timeout: timedelta | None, ctas: int | None) -> Any:
    """A stream whose kernels come first: a transfer that waits for computing ends too late. And few blocks of threads, which
    computing can then not use. Not run on a GPU; what the installed torch does not know is left out."""
    kind = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None:
        return None
    options = kind.Options()
    options.is_high_priority_stream = True
    if timeout is not None:
        options._timeout = timeout
    config: Any = getattr(options, "config", None)
    if ctas is not None and hasattr(config, "max_ctas"):
        config.max_ctas = ctas
        config.min_ctas = min(ctas, 4)
    return options


@contextlib.contextmanager
def _split_from_nothing() -> Iterator[None]:
    """A group of some workers is connected by them alone, and not split off the world's, for which all others must join in.

    Torch splits where the world is bound to a device: by ``init_process_group(device_id=...)``, and, from torch 2.15 on, by
    NCCL in any case. Read in torch's sources, not run.
    """
    world: Any = dist.group.WORLD
    bound = getattr(world, "bound_device_id", None)
    if bound is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def node_group(size: int) -> Any:
    """The group of the ``size`` workers next to each other in rank that this worker is among; None if it is alone."""
    if size == 1 or default_group() is None:
        return None
    group, _ = dist.new_subgroups(size, timeout=_timeout_of(dist.group.WORLD))
    return group


def _timeout_of(group: Any) -> timedelta | None:
    """The timeout the user gave ``group``; a new group would take torch's default."""
    try:
        devices = sorted(group._device_types, key=lambda device: bool(device.type == "cpu"))
    except (AttributeError, RuntimeError):  # a torch that keeps them elsewhere
        return None
    for device in devices:
        try:
            timeout: timedelta = group._get_backend(device).options._timeout
        except (AttributeError, RuntimeError):  # a backend without options
            continue
        return timeout
    return None


def launch_like_ddp(buffer: Tensor, group: Any) -> Handle:
    """Start the stock DDP reduction, to the bit: the mean over ``group``, formed by multiplying with 1 / N."""
    buffer.mul_(1 / dist.get_world_size(group))
    return TorchComm(group).launch([buffer])


#: Of the workers, where not all processes are some; then one group, or None for a single worker.
_workers: tuple[Any, ...] = ()


def set_workers(ranks: Sequence[int] | None) -> None:
    """From now on :func:`default_group` is of these ranks, on each of them; None: of all again. All processes call this."""
    global _workers
    _workers = ()
    world = world_group()
    if ranks is not None and world is not None:
        group = common_group(world, ranks)
        _workers = (group if len(ranks) > 1 else None,)


def default_group() -> Any:
    """The group of all workers if there are several, else None."""
    return _workers[0] if _workers else world_group()


def world_group() -> Any:
    """The default process group if several processes are connected, else None."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return dist.group.WORLD
    return None
