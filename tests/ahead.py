"""A device that works ahead of its host, on a CPU: what a GPU with NCCL would do to our code, found without one.

Inside :func:`ahead` every kernel is put on a stream, a thread of its own, and the host goes on. A collective begins when its
stream gets there, and ``work.wait()`` orders streams only. Time is virtual: a kernel takes none unless :meth:`Rig.compute`
says so, a collective takes what the rig is given, and events tell a stream's own clock. So nothing here depends on how fast
the machine is, and an order that is missing shows as wrong numbers.

Where the host waits for the device, to read a value, for an event or to copy from its own memory, :attr:`Rig.reads` says
which function did. If asked to, it multiplies by the reciprocal of a divisor that is the host's number, as CUDA does. What a
caching allocator would do is not shown, because everything that a stream still works on is kept.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from cocod_accel.comm import device as devices
from tests.fake_cuda import who_waits

_DEADLINE = 30.0


class Event:
    """Reached by a stream, with that stream's time."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._happened = threading.Event()
        self.milliseconds = 0.0

    def record(self, stream: Stream) -> None:
        def note() -> None:
            self.milliseconds = stream.milliseconds
            self._happened.set()

        stream.put(note)

    def query(self) -> bool:
        return self._happened.is_set()

    def synchronize(self) -> None:
        if threading.current_thread() is threading.main_thread() and not self.query():
            self._rig.note_wait()
        if not self._happened.wait(_DEADLINE):
            raise RuntimeError("a stream did not come by an event in time")
        if threading.current_thread() is threading.main_thread():
            self._rig.host_milliseconds = max(self._rig.host_milliseconds, self.milliseconds)

    def wait_quietly(self) -> None:
        self._happened.wait(_DEADLINE)

    def elapsed_time(self, later: Event) -> float:
        return later.milliseconds - self.milliseconds


class Stream:
    """Calls, one after the other, in a thread."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.milliseconds = 0.0
        self._before: list[Stream] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None] | None) -> None:
        self._calls.put(call)

    def wait_event(self, event: Event) -> None:
        def wait() -> None:
            event.synchronize()
            self.milliseconds = max(self.milliseconds, event.milliseconds)

        self.put(wait)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record())

    def record(self) -> Event:
        event = Event(self._rig)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record().synchronize()
        self._rig.raise_error()

    def is_capturing(self) -> bool:
        return self._rig.is_capturing

    def close(self) -> None:
        self.put(None)
        self._thread.join(_DEADLINE)

    def __enter__(self) -> None:
        self._before.append(self._rig.current)
        self._rig.current = self

    def __exit__(self, *error: object) -> None:
        self._rig.current = self._before.pop()

    def _run(self) -> None:
        # The host has counted this write already, when it put it here.
        counted = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
        with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(counted):
            while (call := self._calls.get()) is not None:
                try:
                    call()
                except BaseException as error:
                    self._rig.errors.append(error)


class Work:
    """A collective under way, as NCCL's: waiting for it blocks the current stream, not the host."""

    def __init__(self, rig: Rig, done: Event) -> None:
        self._rig, self._done = rig, done

    def wait(self, timeout: object = None) -> None:
        if self._rig.orders:
            self._rig.current.wait_event(self._done)

    def is_completed(self) -> bool:
        return self._done.query()


class Rig(devices.Torch):
    """The simulated device of one worker, in the place of torch's streams and events."""

    def __init__(self, transfer_seconds: float = 0.0, *, orders: bool = True, reciprocals: bool = False) -> None:
        #: What a collective takes; of some groups something else.
        self.transfer_seconds = transfer_seconds
        self.seconds_of: dict[Any, float] = {}
        #: A division by the host's number multiplies by its reciprocal, as on CUDA.
        self.reciprocals = reciprocals
        #: False: waiting for a collective does nothing. A control: whatever depends on an order must then go wrong.
        self.orders = orders
        self.streams: list[Stream] = []
        self.errors: list[BaseException] = []
        self.current = self.new_stream()
        self.is_capturing = False
        #: The host's clock: the latest time of a stream that it has waited for.
        self.host_milliseconds = 0.0
        #: Collectives wait for it before they begin.
        self.gate = threading.Event()
        self.gate.set()
        #: The functions of the package in which the host has waited for a value.
        self.reads: list[str] = []
        #: The collectives that were started.
        self.started: list[str] = []
        #: The real one.
        self.all_reduce: Callable[..., Any] = dist.all_reduce
        self._of_group: dict[Any, Stream] = {}
        self._on_host: list[Tensor] = []

    # ---- in the place of torch

    def runs_ahead(self, device: torch.device) -> bool:
        return True

    def in_use(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self, device: torch.device) -> None:
        for stream in list(self.streams):
            stream.synchronize()

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    def new_stream(self, device: torch.device | None = None) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    def new_event(self, device: torch.device) -> Event:
        return Event(self)

    def on_host(self, like: Tensor) -> Tensor:
        self._on_host.append(torch.empty(like.shape, dtype=like.dtype))
        return self._on_host[-1]

    def is_on_host(self, tensor: Tensor) -> bool:
        return any(tensor is known for known in self._on_host)

    # ---- for tests

    def compute(self, seconds: float, busy_until: float = 0.0, interference: float = 0.0) -> None:
        """A kernel that takes this long; what of it falls before ``busy_until`` (milliseconds) takes longer."""
        stream, now = self.current, self.host_milliseconds

        def pass_by() -> None:
            begin, left = max(stream.milliseconds, now), 1e3 * seconds
            beside = min(left, max(0.0, busy_until - begin) * (1 - interference))
            stream.milliseconds = begin + beside / (1 - interference) + left - beside

        stream.put(pass_by)

    def raise_error(self) -> None:
        if self.errors:
            raise self.errors.pop(0)

    def note_wait(self) -> None:
        """The host waits for the device."""
        where = who_waits()
        if where is not None:
            self.reads.append(where)

    def read(self) -> None:
        """The host waits for a value of the current stream."""
        self.note_wait()
        self.current.record().wait_quietly()
        self.raise_error()

    def collective(self, real: Callable[..., Any], group: Any, *tensors: Tensor) -> Work:
        if group not in self._of_group:
            self._of_group[group] = self.new_stream()
        self.started.append(real.__name__)
        stream = self._of_group[group]
        stream.wait_stream(self.current)
        seconds = self.seconds_of.get(group, self.transfer_seconds)

        def communicate() -> None:
            if not self.gate.wait(_DEADLINE):
                raise RuntimeError("the gate was never opened")
            joined = torch.tensor([stream.milliseconds], dtype=torch.float64)
            self.all_reduce(joined, dist.ReduceOp.MAX, group=group)
            real(*tensors, group=group)
            stream.milliseconds = float(joined[0]) + 1e3 * seconds

        stream.put(communicate)
        return Work(self, stream.record())


class _Queued(TorchDispatchMode):
    """Puts every kernel on the rig's current stream. What allocates or only looks at memory another way runs at once."""

    def __init__(self, rig: Rig) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rig = rig

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, schema = func._schema.name, func._schema
        if name in ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero"):
            self._rig.read()
            return func(*args, **kwargs)
        if name.startswith("c10d::"):  # of DDP's own
            self._rig.current.record().wait_quietly()
            return func(*args, **kwargs)
        tensors: list[Tensor] = []
        tree_map(lambda leaf: tensors.append(leaf) if isinstance(leaf, Tensor) else None, (args, kwargs))
        written = [argument for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
        if name == "aten::lift_fresh":  # what torch.tensor has made is the host's
            made = func(*args, **kwargs)
            self._rig._on_host.append(made)
            return made
        if not tensors or func.is_view or name in ("aten::_unsafe_view", "aten::set_", "aten::resize_"):
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:  # where it stands is the host's business
            drawn, place = func(torch.empty_like(args[0]), *args[1:], **kwargs), args[0]
            self._put(lambda: place.copy_(drawn))
            return place
        if name == "aten::copy_" and self._rig.is_on_host(args[1]) and not any(args[2:]) and not kwargs.get("non_blocking"):
            self._rig.note_wait()
        if self._rig.reciprocals and name in ("aten::div_", "aten::div") and not isinstance(args[1], Tensor):
            func, args = getattr(torch.ops.aten, name[6:].replace("div", "mul")).Scalar, (args[0], _reciprocal(*args[:2]))
        if written:
            self._put(lambda: func(*args, **kwargs))
            given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
            returned = [given[written[0].name]] if schema.returns else []
            if len(schema.returns) > 1:
                returned = [given[argument.name] for argument in written]
            return None if not returned else returned[0] if len(returned) == 1 else tuple(returned)
        outputs = func(*tree_map(_on_meta, args), **tree_map(_on_meta, {**kwargs, **_meta_device(kwargs)}))
        outputs = tree_map(_allocated, outputs)

        def run() -> None:
            found = func(*args, **kwargs)
            pairs = zip((outputs,) if isinstance(outputs, Tensor) else outputs, _as_tuple(found), strict=True)
            for place, value in pairs:
                if isinstance(place, Tensor):
                    place.copy_(value)

        self._put(run)
        return outputs

    def _put(self, kernel: Callable[[], Any]) -> None:
        def run() -> None:
            kernel()

        self._rig.current.put(run)


def _reciprocal(like: Tensor, divisor: float) -> float:
    return float(torch.tensor(1.0, dtype=like.dtype) / torch.tensor(divisor, dtype=like.dtype))


def _as_tuple(found: Any) -> Any:
    return (found,) if isinstance(found, Tensor) else found


def _on_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")


def _meta_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("meta")} if kwargs.get("device") is not None else {}


def _allocated(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="cpu")


@contextlib.contextmanager
def ahead(rig: Rig) -> Iterator[Rig]:
    """Inside, this process computes on the rig; everything has been done when it is left."""
    names = ("all_reduce", "all_to_all_single", "all_gather_into_tensor")
    before = {name: getattr(dist, name) for name in names}

    def all_reduce(tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        return _started(rig.collective(before["all_reduce"], group, tensor), async_op)

    def all_to_all_single(output: Tensor, given: Tensor, group: Any = None, async_op: bool = False) -> Any:
        return _started(rig.collective(before["all_to_all_single"], group, output, given), async_op)

    def all_gather_into_tensor(output: Tensor, given: Tensor, group: Any = None, async_op: bool = False) -> Any:
        return _started(rig.collective(before["all_gather_into_tensor"], group, output, given), async_op)

    simulated = {f.__name__: f for f in (all_reduce, all_to_all_single, all_gather_into_tensor)}
    tolist, backend, anchor_seconds = Tensor.tolist, devices.backend, devices._ANCHOR_SECONDS

    def read_list(tensor: Tensor) -> Any:
        if threading.current_thread() is threading.main_thread() and not rig.is_on_host(tensor):
            rig.read()
        return tolist(tensor)

    try:
        for name, function in simulated.items():
            setattr(dist, name, function)
        Tensor.tolist = read_list  # type: ignore[method-assign, assignment]
        devices.backend = rig
        devices._sides.clear()
        devices._anchors.clear()
        devices._ANCHOR_SECONDS = math.inf  # the rig's time is not the host's
        with _Queued(rig):
            yield rig
        rig.gate.set()
        rig.synchronize(torch.device("cpu"))
    finally:
        devices._ANCHOR_SECONDS = anchor_seconds
        rig.gate.set()
        for stream in rig.streams:
            stream.close()
        for name, function in before.items():
            setattr(dist, name, function)
        Tensor.tolist = tolist  # type: ignore[method-assign]
        devices.backend = backend
        devices._sides.clear()
        devices._anchors.clear()


def _started(work: Work, async_op: bool) -> Work | None:
    if async_op:
        return work
    work.wait()
    return None
