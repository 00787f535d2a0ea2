"""Who a worker's averages travel to, with which weights, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from cocod_accel.averaging.weights import Weights, mean_
from cocod_accel.comm.handles import Communicator
from cocod_accel.comm.in_process import InProcessSpoke
from cocod_accel.comm.star import Spoke
from cocod_accel.comm.traffic import Traffic


class Rounds(Protocol):
    """Who makes averages where workers come and go; what it makes is in the place of the classes of this package."""

    def part(self, *args: Any, **options: Any) -> Any:
        """A ``Part``."""

    def evaluation(self, *args: Any) -> Any:
        """An ``Evaluation``."""


@dataclass
class Route:
    """One worker's way to the others. All parts of its model share it, so a new weight or link reaches all of them.

    Between nodes, ``comm`` sums this worker's share of a model with its peers and then gathers the node's shares. ``node``
    is the route inside the node: the models there are equal, because gradients are summed, but their buffers are not.
    """

    comm: Communicator
    weights: Weights
    #: Who questions go to: all workers, however they share nodes.
    everyone: Communicator
    node: Route | None = None
    traffic: Traffic = field(default_factory=Traffic)
    #: None: the workers are those of the beginning.
    rounds: Rounds | None = None
    #: To the server that holds the model, if there is one.
    server: Spoke | InProcessSpoke | None = None

    @property
    def is_alone(self) -> bool:
        """Whether nobody else holds another model."""
        return self.comm.size == 1 and self.rounds is None

    def average_(self, flats: Sequence[Tensor]) -> None:
        """Every flat tensor <- its weighted mean over all workers, blocking."""
        if flats:
            for flat in flats:
                flat.mul_(self.weights.factor)
            self.comm.launch(flats).wait()
            for flat in flats:
                mean_(flat, self.weights.total)
