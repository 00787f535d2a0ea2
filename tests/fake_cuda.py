"""A GPU without data: every tensor is fake, every collective does nothing, and every wait of the host is written down.

Inside :func:`fake_cuda` tensors of the device "cuda" have shapes and no numbers (torch's FakeTensorMode), and process groups
are torch's fake ones. So nothing can be computed, but all that our code asks of a device is seen by its name: reading a
value, copying between a device and memory of the host that is not pinned, waiting for an event or a stream.

Autograd's engine and DDP's reducer want a real device, so gradients are put in by hand. What is computed, and in which
order, is the other rig's business (``tests/ahead.py``).
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from cocod_accel.averaging.header import Header
from cocod_accel.comm import device as devices

CUDA = torch.device("cuda", 0)
_READS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero", "aten::masked_select"}


def who_waits() -> str | None:
    """The function of the package, of those that are called now, that has the host wait; None: the clock, which may.

    It waits for an event of a stream with nothing else to do. The seam to streams and events waits for others only.
    """
    stack = [frame for frame in traceback.extract_stack() if "/cocod_accel/" in frame.filename]
    ours = [(frame.filename.rpartition("/cocod_accel/")[2], frame.name) for frame in stack]
    if ("comm/device.py", "_anchor_of") in ours:
        return None
    # A comprehension has a frame of its own in some versions of Python only.
    found = [f"{file}:{name}" for file, name in ours if file != "comm/device.py" and not name.startswith("<")]
    return found[-1] if found else "the test"


class FakeCuda(devices.Torch):
    """Streams and events of a device that gets nowhere, unless a test says so: whoever asks it has to wait."""

    def __init__(self) -> None:
        #: (what, function of the package) of every wait.
        self.waits: list[tuple[str, str]] = []
        #: Whether the device has done by now what it was told.
        self.is_done = False
        self._pinned: list[Tensor] = []

    def note(self, what: str) -> None:
        where = who_waits()
        if where is not None:
            self.waits.append((what, where))

    def in_use(self) -> torch.device:
        return CUDA

    def synchronize(self, device: torch.device) -> None:
        self.note("device")

    def current_stream(self, device: torch.device) -> Any:
        return _Stream(self)

    def new_stream(self, device: torch.device) -> Any:
        return _Stream(self)

    def new_event(self, device: torch.device) -> Any:
        return _Event(self)

    def on_host(self, like: Tensor) -> Tensor:
        return self.pinned(torch.empty(like.shape, dtype=like.dtype, device="cpu"))

    def pinned(self, tensor: Tensor) -> Tensor:
        self._pinned.append(tensor)
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return any(tensor is known for known in self._pinned)


class _Stream:
    def __init__(self, device: FakeCuda) -> None:
        self._device = device

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._device.note("stream")

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class _Event:
    def __init__(self, device: FakeCuda) -> None:
        self._device = device

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        return self._device.is_done

    def synchronize(self) -> None:
        self._device.note("event")

    def elapsed_time(self, later: Any) -> float:
        return 0.0


class _Seen(TorchDispatchMode):
    """Sees every call of an operator before the fake tensors do."""

    def __init__(self, device: FakeCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if name in _READS and first is not None:
            if first.device.type == "cuda":
                self._device.note("value")
            if name == "aten::_local_scalar_dense":
                return 1.0 if first.is_floating_point() else 1
            return True
        if name == "aten::_to_copy" and first is not None and kwargs.get("device") is not None:
            self._check_copy(first, first.device, torch.device(kwargs["device"]), kwargs)
        if name == "aten::copy_" and isinstance(args[1], Tensor):
            self._check_copy(args[1], args[1].device, args[0].device, {"non_blocking": any(args[2:]), **kwargs}, args[0])
        return func(*args, **kwargs)

    def _check_copy(
        self, source: Tensor, here: torch.device, there: torch.device, options: dict[str, Any], target: Tensor | None = None
    ) -> None:
        if here.type == there.type:
            return
        memory = source if here.type == "cpu" else target
        is_pinned = memory is not None and self._device.is_pinned(memory)
        if not (options.get("non_blocking") and is_pinned):
            self._device.note("copy")


@contextlib.contextmanager
def fake_cuda(num_workers: int = 2) -> Iterator[FakeCuda]:
    """Inside, this process is worker 0 of so many, with a GPU."""
    device = FakeCuda()

    def zeros(tensor: Tensor) -> Any:
        if tensor.device.type == "cuda":
            device.note("value")

        def nested(shape: tuple[int, ...]) -> Any:
            return tensor.dtype == torch.bool if not shape else [nested(shape[1:]) for _ in range(shape[0])]

        return nested(tuple(tensor.shape))

    def read(header: Header, slot: Tensor) -> tuple[bool, bool]:
        slot.tolist()
        return False, False

    dist.init_process_group("fake", rank=0, world_size=num_workers, store=FakeStore())
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(devices, "backend", device)
            patch.setattr(devices, "_sides", {})
            patch.setattr(devices, "_anchors", {})
            patch.setattr(devices, "_kept", [])
            patch.setattr(FakeTensor, "tolist", zeros)
            patch.setattr(dist.Work, "block_current_stream", lambda work: None)  # the fake one's would want a stream
            patch.setattr(Tensor, "pin_memory", lambda tensor: device.pinned(tensor.clone()))
            patch.setattr(Header, "read", read)  # there are no numbers to compare
            patch.setattr(Header, "read_rows", read)
            with FakeTensorMode(allow_non_fake_inputs=True), _Seen(device):
                yield device
    finally:
        dist.destroy_process_group()
