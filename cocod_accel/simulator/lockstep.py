"""N workers in one process, each with the driver that a real worker has (:mod:`cocod_accel.sync.driver`).

The same code as on N processes, and the same order of what happens to each model::

    every worker:                       forward, backward
    every worker, if gradients travel:  reduce; then every worker: complete (all workers, or those of a node)
    every worker:                       optimizer step
    at a turn, every worker:            launch; then every worker: land

A turn is a round's end, or a step inside a round after which a part of the model has its turn.

Between two meetings workers do not touch each other, so one, or one node, computes all its steps of a round before the next
one begins: there is never more than one model's activations, and, where gradients stay local, one model's gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cocod_accel.algorithms import SSGD
from cocod_accel.algorithms.base import Algorithm, Bucket, state_tensors
from cocod_accel.averaging.flat import view_like
from cocod_accel.averaging.replica import UNLIKE_STATES, Replica
from cocod_accel.averaging.route import Route
from cocod_accel.averaging.weights import mean_
from cocod_accel.comm.handles import SoloComm
from cocod_accel.comm.in_process import InProcessGroup, InsideNode
from cocod_accel.sync.ddp import unsupported_modules
from cocod_accel.sync.driver import Driver
from cocod_accel.sync.nodes import Nodes
from cocod_accel.sync.preflight import Report, Subject, check_agreement


class NoGradientError(ValueError):
    """A parameter whose gradient all workers are to sum has none."""


class Loop(Protocol):
    """What a worker does of its own."""

    def compute(self, rank: int) -> None:
        """Forward and backward of the worker's next batch: its gradients stand in ``.grad`` then, and nothing else does."""

    def guard(self, rank: int) -> None:
        """The worker's model is about to enter an average; may raise to keep it out."""

    def stepped(self, rank: int) -> None:
        """The worker has taken a step; a round that it ended is over on all workers."""


class _NodeRoute(Route):
    """Inside a node, where nobody can wait for the others before all have launched."""

    def average_(self, flats: Sequence[Tensor]) -> None:
        assert isinstance(self.comm, InsideNode)
        for flat in flats:
            flat.mul_(self.weights.factor)
            self.comm.sum_later(flat, functools.partial(mean_, flat, self.weights.total))


@dataclass
class Worker:
    """One of the workers: its model and optimizer, and the driver of its algorithm."""

    subject: Subject
    optimizer: Optimizer
    driver: Driver
    #: What sums its gradients: its algorithm, or S-SGD inside its node.
    reducer: Algorithm
    #: Its gradients on their way.
    buckets: list[Bucket] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return self.driver.clock.attempts

    @torch.no_grad()
    def take_gradients(self) -> None:
        """From ``.grad`` into buckets: one per dtype and device, because only their order of sums would differ in DDP's."""
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in self.subject.trainable:
            if parameter.grad is not None:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
            elif not self.reducer.replica.route.is_alone:
                names = [name for name, other in self.subject.module.named_parameters() if other is parameter]
                raise NoGradientError(f"parameter {names[0]} has no gradient, which DDP also refuses; freeze or use it")
        self.buckets = []
        for (dtype, device), parameters in kinds.items():
            sizes = [parameter.numel() for parameter in parameters]
            flat = torch.empty(sum(sizes), dtype=dtype, device=device)
            views = [view_like(piece, p) for piece, p in zip(flat.split(sizes), parameters, strict=True)]
            for view, parameter in zip(views, parameters, strict=True):
                assert parameter.grad is not None
                view.copy_(parameter.grad)
                parameter.grad = None
            self.buckets.append(Bucket(flat, views, list(parameters)))

    def give_gradients(self) -> None:
        """From buckets into ``.grad``."""
        buckets, self.buckets = self.buckets, []
        for bucket in buckets:
            for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True):
                parameter.grad = gradient

    def step(self) -> int | None:
        """A step of the optimizer; the part whose turn it is then. Gradients are gone at once: others' take their place."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.driver.attempt()


class Lockstep:
    """Workers that begin with equal models, each with an optimizer, an algorithm and a weight of its own.

    ``node_size``: so many workers next to each other share a node, and sum their gradients in every step.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        algorithms: Sequence[Algorithm],
        weights: Sequence[float],
        node_size: int = 1,
    ) -> None:
        given = list(zip(models, optimizers, algorithms, weights, strict=True))
        subjects = [Subject.examine(*row) for row in given]
        for line in unsupported_modules(subjects[0].module, local=True):
            raise ValueError(line)
        firsts = [rank - rank % node_size for rank in range(len(given))]
        nodes = [tuple(range(first, first + node_size)) if node_size > 1 else () for first in firsts]
        reports = [
            Report.of(replace(subject, node=node), row[2], row[3], None)
            for subject, node, row in zip(subjects, nodes, given, strict=True)
        ]
        check_agreement(reports, algorithms[0])
        if len({report.trainable_digest for report in reports}) > 1:
            raise ValueError("the workers' models differ; give all of them the same parameters")
        values = [report.weight for report in reports]
        group = InProcessGroup(len(given), node_size)
        inside = [InProcessGroup(node_size) for _ in range(0, len(given), node_size)]
        self.workers: list[Worker] = []
        for rank, subject in enumerate(subjects):
            own = Nodes.of(nodes, rank)
            # Whoever drives all workers needs to ask none of them, so there is nobody to ask.
            route = Route(group.member(rank), own.between(values), SoloComm())
            if node_size > 1:
                route.node = _NodeRoute(group.inside(rank), own.inside(values), SoloComm())
            driver = Driver(algorithms[rank], subject.trainable, subject.buffers, subject.optimizers, route)
            reducer = driver.method
            if node_size > 1:
                within = Route(inside[own.index].member(rank % node_size), own.inside(values), SoloComm())
                reducer = SSGD().bind(Replica(subject.trainable, subject.buffers, within))
            self.workers.append(Worker(subject, subject.optimizers[0], driver, reducer))
        self._reduces = algorithms[0].reduces_gradients
        self._node_size = node_size
        for worker in self.workers:
            worker.driver.start(equal=True)

    # ---- training

    def advance(self, loop: Loop, limits: Sequence[int]) -> None:
        """Go on to the next meeting of the workers, or to where worker i has taken ``limits[i]`` steps in all."""
        going = [rank for rank, worker in enumerate(self.workers) if worker.steps < limits[rank]]
        turns: dict[int, int | None] = {}
        if self._reduces:
            turns |= self._step_together(loop, going)
        else:
            for first in range(0, len(self.workers), self._node_size):
                node = [rank for rank in range(first, first + self._node_size) if rank in going]
                turns |= self._step_alone(loop, node, limits)
        parts = {part for part in turns.values() if part is not None}
        if not parts:
            return
        due = [rank for rank, part in turns.items() if part is not None]
        if len(parts) > 1 or len(due) < len(self.workers):
            late = [rank for rank in range(len(self.workers)) if rank not in due]
            raise ValueError(f"workers {due} end a round before step limits {list(limits)}, workers {late} do not")
        self._turn(loop, parts.pop())
        for rank in due:
            loop.stepped(rank)

    def _step_together(self, loop: Loop, ranks: Sequence[int]) -> dict[int, int | None]:
        """One step of workers that sum their gradients; the part whose turn it is then, for each of them."""
        for rank in ranks:
            loop.compute(rank)
            worker = self.workers[rank]
            worker.take_gradients()
            for bucket in worker.buckets:
                worker.reducer.reduce(bucket)
            worker.reducer.send(worker.buckets)
        turns: dict[int, int | None] = {}
        for rank in ranks:
            worker = self.workers[rank]
            worker.reducer.complete(worker.buckets)
            worker.give_gradients()
            turns[rank] = worker.step()
        return turns

    def _step_alone(self, loop: Loop, node: Sequence[int], limits: Sequence[int]) -> dict[int, int | None]:
        """Up to the next turn of a node's workers, or of one worker; None for those whose limit comes first."""
        turns: dict[int, int | None] = {}
        while node and all(self.workers[rank].steps < limits[rank] for rank in node):
            if len(node) > 1:
                turns = self._step_together(loop, node)
            else:
                loop.compute(node[0])
                turns = {node[0]: self.workers[node[0]].step()}
            if any(part is not None for part in turns.values()):
                return turns
            for rank in node:
                loop.stepped(rank)
        return turns

    def _turn(self, loop: Loop, part: int) -> None:
        """All workers launch before any of them lands."""
        for rank in range(len(self.workers)):
            loop.guard(rank)
        self._check_optimizers()
        for worker in self.workers:
            worker.driver.launch(part)
        for worker in self.workers:
            worker.driver.land(part)

    # ---- the mean of all models

    def averaged(self, look: Callable[[int], None]) -> None:
        """Call ``look`` for every worker while its model is the mean of all; afterwards each has its own back."""
        means = [worker.driver.replica.evaluation.launch() for worker in self.workers]
        for rank, (worker, mean) in enumerate(zip(self.workers, means, strict=True)):
            with worker.subject.bound_buffers(), worker.driver.replica.evaluation.with_mean(mean):
                look(rank)

    def finish(self) -> None:
        """Merge what is in flight, then give every worker the exact mean."""
        for worker in self.workers:
            worker.driver.drain()
        self._check_optimizers()
        for worker in self.workers:
            worker.driver.launch_exact()
        for worker in self.workers:
            worker.driver.adopt_exact()

    def _check_optimizers(self) -> None:
        """Refuse to average what is not alike, which workers of a real run ask each other."""
        if self.workers[0].driver.replica.optimizer_tensors is not None:
            states = [state_tensors([worker.optimizer], worker.driver.replica.parameters) for worker in self.workers]
            if len({str([tuple(tensor.shape) for tensor in tensors]) for tensors in states}) > 1:
                raise RuntimeError(UNLIKE_STATES)
