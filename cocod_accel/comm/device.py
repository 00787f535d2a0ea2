"""A device that works ahead of its host: what communication there needs of streams and events.

On a GPU a call returns before its work is done, a collective begins when its stream gets there, and waiting for it orders
streams without blocking the host. So whoever wants to know when something happened must ask the device, later. On a CPU
all of this is trivial, and that is how it is written here: one set of calls for both.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Events count milliseconds in float32, which is exact to a microsecond for some seconds only: a clock is set anew as often.
_ANCHOR_SECONDS = 10.0


class Torch:
    """Streams and events as torch has them. The one thing that a simulated device must replace."""

    def runs_ahead(self, device: torch.device) -> bool:
        return device.type not in ("cpu", "meta")

    def in_use(self) -> torch.device:
        kind = torch.accelerator.current_accelerator(check_available=True)
        if kind is None or not getattr(torch.get_device_module(kind), "is_initialized", lambda: True)():
            return torch.device("cpu")
        return torch.device(kind.type, torch.accelerator.current_device_index())

    def synchronize(self, device: torch.device) -> None:
        torch.accelerator.synchronize(device)

    def current_stream(self, device: torch.device) -> Any:
        return torch.accelerator.current_stream(device)

    def new_stream(self, device: torch.device) -> Any:
        return torch.Stream(device)

    def new_event(self, device: torch.device) -> Any:
        return torch.Event(device, enable_timing=True)

    def on_host(self, like: Tensor) -> Tensor:
        """Room on the host that the device can write into by itself."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


backend = Torch()


def room_on_host(num_elements: int, like: Tensor) -> Tensor:
    """Memory of the host that the device of ``like`` can copy from and to by itself."""
    shape = torch.empty(num_elements, dtype=like.dtype, device="meta")
    return backend.on_host(shape) if runs_ahead(like.device) else torch.empty(num_elements, dtype=like.dtype)


def runs_ahead(device: torch.device) -> bool:
    """Whether the host does not wait for what this device computes."""
    return backend.runs_ahead(device)


def device_in_use() -> torch.device:
    """The current accelerator, if this process has used it. A run on CPUs must not make a context on a machine's GPU."""
    return backend.in_use()


def wait_for_device(device: torch.device | None = None) -> None:
    """Until everything has been done that the device was told to, collectives included."""
    device = device_in_use() if device is None else device
    if runs_ahead(device):
        backend.synchronize(device)


def wait_for_stream(device: torch.device | None = None) -> None:
    """Until what this thread computes has been done; what travels beside it goes on."""
    device = device_in_use() if device is None else device
    if runs_ahead(device):
        backend.current_stream(device).synchronize()


def is_capturing(device: torch.device) -> bool:
    """Whether what is computed now is only recorded, to be replayed without the host."""
    return runs_ahead(device) and bool(backend.current_stream(device).is_capturing())


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Inside, this device is the current one: collectives of objects travel through it, whatever the model is on."""
    if not runs_ahead(device) or device.type == "cpu":
        yield
        return
    # Torch 2.7 has only the second.
    switch = getattr(torch.accelerator, "device_index", None) or torch.get_device_module(device).device
    with switch(device.index):  # unlike setting it twice, this makes no context on the one before
        yield


# --------------------------------------------------------------------------------------------------- side streams

_sides: dict[tuple[torch.device, str], Any] = {}


@contextmanager
def beside(device: torch.device, purpose: str) -> Iterator[None]:
    """Inside, work is put on a stream of its own, after what has been put on the current one so far.

    It runs there beside whatever comes next on the current one. Nested calls stay on one stream. ``purpose`` names it.
    """
    if not runs_ahead(device):
        yield
        return
    here, side = backend.current_stream(device), _side(device, purpose)
    if here == side:
        yield
        return
    side.wait_stream(here)
    with side:
        yield


def _side(device: torch.device, purpose: str) -> Any:
    key = device, purpose
    if key not in _sides:
        _sides[key] = backend.new_stream(device)
    return _sides[key]


def order(work: Any) -> None:
    """What comes next on the current stream comes after ``work``; unlike some waits, the host never does."""
    getattr(work, "block_current_stream", work.wait)()


_kept: list[tuple[Moment, tuple[object, ...]]] = []


def keep_until(moment: Moment, *things: object) -> None:
    """Nobody gets the memory of ``things`` before then, whoever forgets about them: another stream still works on it.

    NCCL keeps the tensors of a collective only until its first wait, which is at once here, on a side stream.
    """
    _kept[:] = [kept for kept in _kept if not kept[0].has_come]
    if not moment.has_come:
        _kept.append((moment, things))


class Reached:
    """That the current stream has come by here; a work like those of ``torch.distributed``."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, _recorded(device)

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        """What comes next on the current stream comes after it; the host does not wait."""
        backend.current_stream(self._device).wait_event(self._event)

    def wait_on_host(self) -> None:
        self._event.synchronize()


class Fetch:
    """A few numbers on their way to the host. Reading them waits for them alone, not for what was put on streams since."""

    def __init__(self, tensor: Tensor) -> None:
        copied = tensor.clone()  # what comes next may write into it
        with beside(tensor.device, "reads"):
            self._host = backend.on_host(copied)
            self._host.copy_(copied, non_blocking=True)
            self._event = _recorded(tensor.device)
        self._copied = copied

    @property
    def has_come(self) -> bool:
        return bool(self._event.query())

    def value(self) -> Tensor:
        """On the host."""
        self._event.synchronize()
        return self._host


# ----------------------------------------------------------------------------------------------------------- time


class Moment:
    """When the host, or the current stream of a device, came by here; or a time that is known."""

    def __init__(self, device: torch.device | None = None, seconds: float | None = None) -> None:
        self._seconds = seconds
        self._event: Any = None
        if device is not None and runs_ahead(device):
            self._anchor = _anchor_of(device)
            self._event = _recorded(device)
        elif seconds is None:
            self._seconds = time.perf_counter()

    @property
    def has_come(self) -> bool:
        """Whether it is known by now; a stream may be behind."""
        return self._event is None or bool(self._event.query())

    @property
    def seconds(self) -> float:
        """On the host's clock, ``time.perf_counter``; waits for the stream to come by."""
        if self._seconds is None:
            self._event.synchronize()
            self._seconds = self._anchor.seconds + self._anchor.event.elapsed_time(self._event) / 1e3
            self._event = None
        return self._seconds


class _Anchor:
    """An event whose time the host knows: that of a stream with nothing else to do."""

    def __init__(self, device: torch.device) -> None:
        with _side(device, "clock"):
            self.event = _recorded(device)
        self.event.synchronize()
        self.seconds = time.perf_counter()


_anchors: dict[torch.device, _Anchor] = {}


def _anchor_of(device: torch.device) -> _Anchor:
    anchor = _anchors.get(device)
    if anchor is None or time.perf_counter() - anchor.seconds > _ANCHOR_SECONDS:
        anchor = _anchors[device] = _Anchor(device)
    return anchor


def _recorded(device: torch.device) -> Any:
    event = backend.new_event(device)
    event.record(backend.current_stream(device))
    return event
