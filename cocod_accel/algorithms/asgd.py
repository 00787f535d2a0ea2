"""A-SGD: a server holds the model, and applies every worker's gradients as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from cocod_accel.algorithms.base import Algorithm, check_seed
from cocod_accel.averaging.replica import Replica
from cocod_accel.averaging.route import Route
from cocod_accel.averaging.served import ServedReplica

#: Gradients of a worker that may be unanswered without a bound: each holds memory.
_MOST_UNANSWERED = 16


class ASGD(Algorithm):
    """Asynchronous SGD with a parameter server (Dean et al. 2012), for any gradient g_i that worker i has sent::

        server:     x <- step(x, N w_i g_i, learning rate / N)         as it arrives; momentum is the server's
        worker i:   x_i <- the newest x that has come back

    The last rank calls :func:`~cocod_accel.serve`, all others :func:`~cocod_accel.attach`. ``max_staleness=s``: a worker
    computes a gradient while at most s of its own are unanswered: 0, it waits for every answer; 1, it sends a gradient and
    computes the next one with the model that it has; None, without a bound. Others' gradients come in between, so the
    model that a gradient is applied to is about N - 1 updates (s = 0) to 2 N - 1 (s = 1) ahead of the one that it is of.
    """

    name: ClassVar[str] = "asgd"
    is_served: ClassVar[bool] = True
    optimizer_policies: ClassVar[tuple[str, ...]] = ("keep",)
    refuses_scaler = "ASGD steps its optimizer on the server, which a GradScaler cannot see; use bf16 autocast"
    options: ClassVar[dict[str, Any]] = {**Algorithm.options, "seed": 0, "max_staleness": 1}

    replica: ServedReplica

    def __init__(self, *, max_staleness: int | None = 1, payload: str = "fp32", seed: int = 0) -> None:
        super().__init__(period=1, payload=payload)
        self.seed = check_seed(seed)
        #: Gradients of its own that a worker may be ahead; None: any number.
        self.max_staleness = check_max_staleness(max_staleness)

    def __repr__(self) -> str:
        stated = ", ".join(f"{name}={value!r}" for name, value in self.stated_options().items())
        return f"{type(self).__name__}({stated})"

    @property
    def bound(self) -> int:
        """Of a worker's unanswered gradients, in numbers."""
        return _MOST_UNANSWERED if self.max_staleness is None else self.max_staleness

    def replica_of(
        self,
        parameters: Sequence[Tensor],
        buffers: Callable[[], list[Tensor]],
        route: Route,
        optimizers: Sequence[Optimizer],
    ) -> Replica:
        return ServedReplica(parameters, buffers, route, optimizers, payload=self.payload, seed=self.seed, bound=self.bound)

    def step_begins(self) -> None:
        self.replica.take_gradients()

    def launch(self, part: int = 0) -> None:
        self.replica.send()

    def land(self, part: int = 0) -> None:
        self.replica.receive()

    def wait(self) -> None:
        self.replica.wait()

    def leave(self) -> None:
        self.replica.leave()

    def watch(self, seconds: float) -> None:
        """The server watches as well from now on."""
        self.replica.watch(seconds)

    def own_stats(self) -> dict[str, Any]:
        replica = self.replica
        return {
            "staleness": replica.staleness,
            "largest_staleness": replica.largest_staleness,
            "server_bytes": replica.link_bytes,
        }

    def state(self) -> Any:
        return self.replica.exchange_state()

    def load_state(self, state: Any) -> None:
        self.replica.load_exchanged(state)


def check_max_staleness(value: object) -> int | None:
    """``max_staleness`` as an int from 0, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"max_staleness={value!r} is not an int; use e.g. max_staleness=1, or None for no bound")
    if value < 0:
        raise ValueError(f"max_staleness={value} must be at least 0; use 0 to wait for every answer, or None for no bound")
    return value
