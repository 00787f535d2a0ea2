"""A serial reference of workers that come and go: who made which mean is given, all else follows. In float64.

It shares no code with the package.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class Life:
    """One worker: the steps that it was there for, and the means it merged: step of the launch -> names and weights."""

    number: int  # of its batches
    first: int
    last: int
    merged: Mapping[int, tuple[Sequence[str], Sequence[float]]]


@dataclass
class _Worker:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    start: dict[int, list[Tensor]] = field(default_factory=dict)  # x_t of what is in flight
    z: list[Tensor] = field(default_factory=list)
    velocity: list[Tensor] = field(default_factory=list)
    num_taken: int = 0  # means that z has followed

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def assign(self, new: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(self.model.parameters(), new, strict=True):
                p.copy_(value)


def run(
    lives: Mapping[str, Life],
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    batch_of: Callable[[int, int], tuple[Tensor, Tensor]],
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor],
    period: int,
    *,
    overlapped: bool,
    delay: int | None = None,
    outer: tuple[float, float] | None = None,
) -> dict[str, dict[int, list[Tensor]]]:
    """Every worker's parameters after each of its steps. ``outer``: rate and Nesterov momentum."""
    workers: dict[str, _Worker] = {}
    trace: dict[str, dict[int, list[Tensor]]] = {name: {} for name in lives}
    late = period if delay is None else delay
    for name, life in lives.items():
        if life.first == 0:
            model = make_model()
            workers[name] = _Worker(model, make_optimizer(model))
            workers[name].z = workers[name].values()
            workers[name].velocity = [torch.zeros_like(z) for z in workers[name].z]

    def take_in(worker: _Worker, mean: Sequence[Tensor]) -> list[Tensor]:
        """The point that all hold from here on."""
        worker.num_taken += 1
        if outer is None:
            worker.z = [value.clone() for value in mean]
        else:
            rate, momentum = outer
            change = [value - z for value, z in zip(mean, worker.z, strict=True)]
            worker.velocity = [momentum * v + c for v, c in zip(worker.velocity, change, strict=True)]
            moved = [c + momentum * v for c, v in zip(change, worker.velocity, strict=True)]
            worker.z = [z + rate * m for z, m in zip(worker.z, moved, strict=True)]
        return worker.z

    means: dict[int, list[Tensor]] = {}
    for step in range(max(life.last for life in lives.values())):
        at = step + 1
        here = [name for name, life in lives.items() if name in workers and life.first <= step < life.last]
        for name in here:
            worker = workers[name]
            worker.optimizer.zero_grad()
            loss_of(worker.model, *batch_of(lives[name].number, step)).backward()
            worker.optimizer.step()
        launched = at - late
        for name in here if overlapped else ():
            if launched in lives[name].merged and launched in workers[name].start:
                worker = workers[name]
                start, z = worker.start.pop(launched), take_in(worker, means[launched])
                worker.assign([x + z_ - s for x, z_, s in zip(worker.values(), z, start, strict=True)])
        if at % period == 0:
            made = next((life.merged[at] for life in lives.values() if at in life.merged), None)
            for name in here:
                workers[name].start[at] = workers[name].values()
            if made is not None:
                names, weights = made
                counted = [(n, w) for n, w in zip(names, weights, strict=True) if w]
                total = sum(w for _, w in counted)
                rows = zip(*(workers[n].start[at] for n, _ in counted), strict=True)
                # Whoever has missed a mean gets the point from one who has not, before this one is made.
                most = max((workers[n] for n, _ in counted), key=lambda worker: worker.num_taken)
                for n, _ in counted:
                    if workers[n].num_taken < most.num_taken:
                        workers[n].z, workers[n].velocity = list(most.z), list(most.velocity)
                        workers[n].num_taken = most.num_taken
                means[at] = [
                    sum((w * x for (_, w), x in zip(counted, row, strict=True)), torch.zeros(())) / total for row in rows
                ]
                donor = workers[counted[0][0]]
                for name in set(names) - {n for n, _ in counted}:
                    model = make_model()
                    workers[name] = _Worker(model, make_optimizer(model))
                    workers[name].optimizer.load_state_dict(copy.deepcopy(donor.optimizer.state_dict()))
                    workers[name].z = [z.clone() for z in donor.z]
                    workers[name].velocity = [v.clone() for v in donor.velocity]
                    workers[name].num_taken = donor.num_taken
                    workers[name].assign(take_in(workers[name], means[at]))
                if not overlapped:
                    for name in here:
                        if at in lives[name].merged:
                            workers[name].assign(take_in(workers[name], means[at]))
        for name in here:
            trace[name][at] = workers[name].values()
    return trace
