"""A user's own model, data and algorithm, as they would stand in a file of theirs."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from cocod_accel import LocalSGD


class Stripes(Dataset[tuple[Tensor, int]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = index % 3
        image = torch.zeros(1, 6, 6)
        image[0, :, 2 * label : 2 * label + 2] = 1
        return image + 0.1 * torch.randn(1, 6, 6, generator=torch.Generator().manual_seed(index)), label


def make_data(count: int) -> tuple[Stripes, Stripes]:
    return Stripes(count), Stripes(30)


def make_tensors() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    data = Stripes(60)
    inputs, labels = torch.stack([data[i][0] for i in range(60)]), torch.tensor([data[i][1] for i in range(60)])
    return (inputs, labels), (inputs[:30], labels[:30])


class Noisy(Stripes):
    """Draws from everything that a user's data may draw from."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = super().__getitem__(index)
        return image + 0.1 * torch.randn(()) + 0.1 * random.random() + 0.1 * float(np.random.rand()), label


def make_noisy_data() -> tuple[Noisy, Noisy]:
    return Noisy(60), Noisy(31)


class Forgetful(nn.Module):
    """Random in its forward, and in what it is built with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.scale = 1 + random.random()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.scale * x)
        return out


_BUILT = itertools.count()


def with_another_start() -> nn.Module:
    """Whoever builds it twice in a process gets two different models."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))
    with torch.no_grad():
        for tensor in (*model.parameters(), model.get_buffer("2.running_mean")):
            tensor.fill_(0.01 * (1 + next(_BUILT)))
    return model


def make_model(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, width), nn.ReLU(), nn.Linear(width, 3))


class Exploding(nn.Module):
    """Its loss stops being a number on worker 1 at its 7th training step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model(4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        out: Tensor = self.inner(x)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return out * float("nan") if rank == 1 and self.calls == 7 else out


def explode() -> nn.Module:
    return Exploding()


def with_dropout_and_batch_norm() -> nn.Module:
    """Everything that makes resuming hard: random numbers in the forward, statistics in buffers."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(144, 10))


def with_shared_statistics() -> nn.Module:
    return nn.Sequential(nn.SyncBatchNorm(1), nn.Flatten(), nn.Linear(64, 10))


def with_an_idle_parameter() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    model.register_parameter("idle", nn.Parameter(torch.ones(2)))
    return model


class Failing(nn.Module):
    """On worker 1, its 7th training step raises, or ends the process."""

    def __init__(self, exits: bool) -> None:
        super().__init__()
        self.inner = make_model(4)
        self.calls = 0
        self.exits = exits

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if torch.distributed.get_rank() == 1 and self.calls == 7:
            if self.exits:
                os._exit(3)
            raise ArithmeticError("no such kernel")
        out: Tensor = self.inner(x)
        return out


def raises() -> nn.Module:
    return Failing(exits=False)


def exits() -> nn.Module:
    return Failing(exits=True)


class PulledSGD(LocalSGD):
    """An algorithm with an argument of its own."""

    name = "pulled"

    def __init__(self, period: Any, pull: float = 0.5) -> None:
        super().__init__(period)
        if not 0 <= pull <= 1:
            raise ValueError(f"pull={pull} must be in [0, 1]")
        self.pull = pull


def never_ready_on_one(mark: str) -> nn.Module:
    """Worker 1 is not done with building its model, so that the other waits for it where workers connect."""
    if os.environ["RANK"] == "1":
        Path(mark).touch()
        time.sleep(600)
    return make_model(4)


class Crowding(nn.Module):
    """At its last evaluation somebody fills the disk that the run is on, once."""

    def __init__(self, disk: str, mark: str, evaluations: int) -> None:
        super().__init__()
        self.inner = make_model(512)
        self.disk, self.mark, self.left = Path(disk), Path(mark), evaluations

    def train(self, mode: bool = True) -> Any:
        self.left -= not mode
        if not mode and self.left == 0 and not self.mark.exists():
            self.mark.touch()
            with contextlib.suppress(OSError), (self.disk / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def crowding(disk: str, mark: str, evaluations: int) -> nn.Module:
    return Crowding(disk, mark, evaluations)
