"""N workers and their server in one process: gradients arrive in an order that a timeline has found.

Nothing here happens at the same time: a worker computes its gradient when it is its turn to be served, with the model that
it has had since its turn before. So what is learnt follows from the order alone, and is the same every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cocod_accel.algorithms import ASGD
from cocod_accel.averaging.flat import floating
from cocod_accel.averaging.route import Route
from cocod_accel.averaging.server import Server
from cocod_accel.averaging.weights import Weights, mean_
from cocod_accel.comm.handles import SoloComm
from cocod_accel.comm.in_process import InProcessSpoke
from cocod_accel.simulator.lockstep import Loop
from cocod_accel.simulator.served import Turn
from cocod_accel.sync.driver import Driver


@dataclass
class ServedWorker:
    """One of the workers: its model and optimizer, and the driver of its algorithm."""

    model: nn.Module
    optimizer: Optimizer
    driver: Driver

    @property
    def steps(self) -> int:
        return self.driver.clock.attempts

    @property
    def parameters(self) -> list[Tensor]:
        return self.driver.replica.parameters


class ServedLockstep:
    """Workers that begin with equal models, and a server whose ``model`` and ``optimizer`` are like theirs."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        algorithms: Sequence[ASGD],
        weights: Sequence[float],
        model: nn.Module,
        optimizer: Optimizer,
        turns: Sequence[Turn],
    ) -> None:
        self.workers: list[ServedWorker] = []
        self._spokes = [InProcessSpoke(rank, len(models)) for rank in range(len(models))]
        for rank, (own, its, algorithm) in enumerate(zip(models, optimizers, algorithms, strict=True)):
            route = Route(SoloComm(), Weights(tuple(weights), rank), SoloComm(), server=self._spokes[rank])
            driver = Driver(algorithm, _trained(own), lambda model=own: list(model.buffers()), [its], route)  # type: ignore[misc]
            driver.start(equal=True)
            self.workers.append(ServedWorker(own, its, driver))
        first = algorithms[0]
        self.server = Server(_trained(model), [optimizer], len(models), first.payload, first.bound)
        self._turns = iter(turns)

    def advance(self, loop: Loop, limits: Sequence[int]) -> None:
        """The next gradient that arrives."""
        turn = next(self._turns)
        rank, worker = turn.rank, self.workers[turn.rank]
        assert worker.steps < limits[rank], "the order of arrival is that of another run"
        loop.compute(rank)
        loop.guard(rank)
        worker.driver.method.step_begins()
        worker.optimizer.step()
        worker.optimizer.zero_grad()
        worker.driver.attempt()
        worker.driver.launch(0)
        self.server.take_from(self._spokes, rank)
        self._spokes[rank].deliver(turn.answered)
        worker.driver.land(0)
        loop.stepped(rank)

    def averaged(self, look: Callable[[int], None]) -> None:
        """Call ``look`` for every worker while it holds the server's model; afterwards each has its own back."""
        means = self._mean_buffers()
        for rank, worker in enumerate(self.workers):
            with _kept([*worker.parameters, *worker.model.buffers()]):
                self._give(worker, means)
                look(rank)

    def finish(self) -> None:
        """Give every worker the server's model."""
        means = self._mean_buffers()
        for spoke, worker in zip(self._spokes, self.workers, strict=True):
            spoke.deliver()
            worker.driver.replica.settle()
            self._give(worker, means)

    @torch.no_grad()
    def _give(self, worker: ServedWorker, means: Sequence[Tensor]) -> None:
        for own, served in zip(worker.parameters, self.server.parameters, strict=True):
            own.copy_(served)
        for buffer, mean in zip(floating(list(worker.model.buffers())), means, strict=True):
            buffer.copy_(mean)

    @torch.no_grad()
    def _mean_buffers(self) -> list[Tensor]:
        """As if they were summed in the order of ranks."""
        rows = [[buffer.clone() for buffer in floating(list(worker.model.buffers()))] for worker in self.workers]
        for worker, row in zip(self.workers, rows, strict=True):
            for buffer in row:
                buffer.mul_(worker.driver.replica.route.weights.factor)
        total = self.workers[0].driver.replica.route.weights.total
        return [mean_(torch.stack(column).sum(0), total) for column in zip(*rows, strict=True)]


def _trained(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@contextmanager
def _kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Afterwards they are what they were."""
    values = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
