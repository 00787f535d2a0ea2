"""The memory that averaging takes, counted on a GPU without data, and the table of it in ``docs/gpus.md``."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from cocod_accel import SSGD, CoCoDSGD, LocalSGD, Outer, PipeSGD
from cocod_accel.algorithms import Algorithm
from tests.fake_cuda import CUDA, fake_cuda
from tests.test_host_reads import attached, step
from tests.test_trainer import ROOT

#: A model of 8 GiB, in pieces that are small against it.
WIDTH, LAYERS = 8192, 32
ROWS: dict[str, Algorithm] = {
    "`SSGD()`": SSGD(),
    "`PipeSGD()`": PipeSGD(),
    "`LocalSGD(k)`, `AsynLocalSGD(k)`": LocalSGD(2),
    "`CoCoDSGD(k)`": CoCoDSGD(2),
    '`CoCoDSGD(k, payload="bf16")`': CoCoDSGD(2, payload="bf16"),
    '`CoCoDSGD(k, payload="int8")`': CoCoDSGD(2, payload="int8"),
    '`CoCoDSGD(k, payload="int4")`': CoCoDSGD(2, payload="int4"),
    '`CoCoDSGD(k, payload="ternary")`': CoCoDSGD(2, payload="ternary"),
    "`CoCoDSGD(k, own_share=0.5)`": CoCoDSGD(2, own_share=0.5),
    "`CoCoDSGD(k, outer=Outer(0.7, 0.9))`": CoCoDSGD(2, outer=Outer(0.7, 0.9)),
}


class Meter(TorchDispatchMode):
    """The bytes that live on a device, and the most since :meth:`restart`."""

    def __init__(self, kind: str = "cuda") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = kind
        self._known: dict[int, tuple[Any, int]] = {}
        self.peak = 0

    @property
    def live(self) -> int:
        self._known = {key: held for key, held in self._known.items() if not held[0].expired()}
        return sum(size for _, size in self._known.values())

    def restart(self) -> None:
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tree_map(self._note, found)
        self.peak = max(self.peak, self.live)
        return found

    def _note(self, leaf: Any) -> None:
        if isinstance(leaf, Tensor) and leaf.device.type == self._kind:
            storage = leaf.untyped_storage()
            if storage._cdata not in self._known or self._known[storage._cdata][0].expired():
                self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device=CUDA) for _ in range(LAYERS)))


def copies(algorithm: Algorithm, **options: Any) -> list[float]:
    """In copies of the parameters, beside model, gradients and optimizer: in training; at most in a step, in ``averaged()``
    and in ``state_dict()``; what it returns.
    """
    with fake_cuda() as device, Meter() as meter:
        device.is_done = True
        model, optimizer, sync = attached(algorithm, module=large(), **options)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # it makes its momentum
        size = sum(4 * parameter.numel() for parameter in model.parameters())
        own = 3 * size  # the model, gradients, momentum

        def extra(number: int) -> float:
            return round((number - own) / size, 2)

        for _ in range(6):
            step(model, optimizer, sync, own_gradients=True)
        held = extra(meter.live)
        meter.restart()
        for _ in range(4):
            step(model, optimizer, sync, own_gradients=True)
        in_step = extra(meter.peak)
        meter.restart()
        with sync.averaged():
            inside = extra(meter.live)
        in_averaged = extra(meter.peak)
        meter.restart()
        written = sync.control.state_to_write()
        in_checkpoint = extra(meter.peak)
        del written
        state = sync.state_dict()
        in_state = extra(meter.live)
        assert state
        sync.detach()
    return [held, in_step, inside, in_averaged, in_checkpoint, in_state]


def main() -> None:
    for name, algorithm in ROWS.items():
        print(name, copies(algorithm))


if __name__ == "__main__":
    main()
