"""The contenders: our five algorithms, their peers, and no communication at all."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from benchmarks.links.peers import (
    AccelerateLocal,
    Contender,
    TorchDDP,
    TorchDDPHalf,
    TorchDDPPower,
    TorchftDiLoCo,
    TorchftLocal,
    TorchPostLocal,
)
from cocod_accel.algorithms import ALGORITHMS
from cocod_accel.comm.emulated import Link
from cocod_accel.sync.attach import attach
from cocod_accel.sync.sync import Sync


class Ours(Contender):
    """One of our five algorithms."""

    algorithm: str
    options: dict[str, Any] = {}  # noqa: RUF012 - replaced, never changed
    sync: Sync

    def set_up(self) -> None:
        kind: Any = ALGORITHMS[self.algorithm]
        reduces = kind.reduces_gradients
        algorithm = kind(**self.options) if reduces else kind(**{"period": self.period, **self.options})
        self.model = DistributedDataParallel(self.module, forward_sync_buffers=False)
        self.sync = attach(self.model, self.optimizer, algorithm)

    def averaged(self) -> AbstractContextManager[None]:
        return self.sync.averaged()

    def drain(self) -> None:
        self.sync.state_dict()

    def close(self) -> None:
        self.sync.state_dict()
        self.sync.detach()

    def emulate(self, link: Link) -> None:
        self.sync.control.emulate_link(link)


def _ours(name: str, **options: Any) -> type[Ours]:
    shown = [f"k={value}" if key == "period" else str(value) for key, value in options.items()]
    label = ", ".join([name, *shown])
    return type(f"Ours_{label}", (Ours,), {"algorithm": name, "label": label, "options": options})


CONTENDERS: dict[str, type[Contender]] = {
    "none": Contender,
    "ddp": TorchDDP,
    "ddp_fp16": TorchDDPHalf,
    "ddp_powersgd": TorchDDPPower,
    "post_local": TorchPostLocal,
    "accelerate_local": AccelerateLocal,
    "torchft_local": TorchftLocal,
    "torchft_diloco": TorchftDiLoCo,
    **{name: _ours(name) for name in ALGORITHMS},
    "cocod_int8": _ours("cocod", payload="int8"),
    # What is recommended for slow links.
    "cocod_ternary": _ours("cocod", period=1, payload="ternary"),
}
OURS = tuple(ALGORITHMS)


def available(names: list[str]) -> list[str]:
    """The contenders whose packages are installed."""
    needs = {"accelerate_local": "accelerate", "torchft_local": "torchft", "torchft_diloco": "torchft"}
    return [name for name in names if name not in needs or importlib.util.find_spec(needs[name]) is not None]
