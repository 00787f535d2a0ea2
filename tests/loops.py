"""The small models, batches and training loop that the tests run, serially and on real workers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import ALGORITHMS, Algorithm, Sync, attach

#: Algorithms that take a period.
PERIODIC = tuple(name for name, kind in ALGORITHMS.items() if "period" in inspect.signature(kind).parameters)
SCHEDULE = [(0, 1), (3, 2), (8, 5)]


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def make_batch(rank: int, step: int, size: int = 4, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return (
        torch.randn(size, 6, generator=generator, dtype=torch.float64).to(dtype),
        torch.randn(size, 3, generator=generator, dtype=torch.float64).to(dtype),
    )


def joined_batch(rank: int, step: int, num_batches: int) -> tuple[Tensor, Tensor]:
    """The batches of one accumulated step as one."""
    parts = [make_batch(rank, num_batches * step + i) for i in range(num_batches)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
}


def make_algorithm(name: str, period: Any) -> Algorithm:
    kind: Any = ALGORITHMS[name]
    return kind(period=period) if name in PERIODIC else kind()  # type: ignore[no-any-return]


def snapshot(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def train(
    rank: int,
    name: str,
    optimizer_name: str,
    weights: list[float],
    periods: list[Any],
    num_steps: list[int],
    after: Callable[[Sync, nn.Module], None] | None = None,
) -> list[list[Tensor]]:
    """Train with ``attach`` on this worker; its parameters after every step."""
    model = DistributedDataParallel(make_model())
    optimizer = OPTIMIZERS[optimizer_name](model)
    sync = attach(model, optimizer, make_algorithm(name, periods[rank]), weight=weights[rank])
    trace = []
    for step in range(num_steps[rank]):
        x, y = make_batch(rank, step)
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        trace.append(snapshot(model))
    if after is not None:
        after(sync, model)
    return trace


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> list[list[Tensor]]:
    """The model after each of so many plain steps."""
    trace = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *make_batch(rank, step)).backward()
        optimizer.step()
        trace.append(snapshot(model))
    return trace
