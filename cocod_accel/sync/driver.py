"""One worker's algorithm at work: the clock of its rounds, and the verbs of the contract in their order.

The real run and the simulator drive the same object. A real worker launches and lands at once; a driver of several workers
launches on all of them before it lands on any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from cocod_accel.algorithms import Algorithm
from cocod_accel.algorithms.rounds import RoundClock
from cocod_accel.averaging.flat import copied
from cocod_accel.averaging.route import Route

#: Options that an average's state depends on.
_STATE_OPTIONS = ("payload", "fragments", "own_share", "outer")


class Driver:
    """Drives one worker's algorithm on its model."""

    def __init__(
        self,
        algorithm: Algorithm,
        parameters: Sequence[Tensor],
        buffers: Callable[[], list[Tensor]],
        optimizers: Sequence[Optimizer],
        route: Route,
        *,
        offload: bool = False,
    ) -> None:
        self.replica = algorithm.replica_of(parameters, buffers, route, optimizers)
        if offload:
            self.replica.offload()
        self.method = algorithm.bind(self.replica)
        self.clock = RoundClock(algorithm.period, algorithm.delay)
        #: Called before this worker's model enters an average; may raise to keep it out.
        self.guard: Callable[[], None] | None = None
        self._optimizers = optimizers

    # ---- steps and rounds

    def start(self, *, equal: bool) -> None:
        """Training begins; ``equal``: all workers hold the same parameters."""
        self.method.start(equal)
        self.clock.launched(0)

    def attempt(self) -> int | None:
        """Count one attempted step; the part of the model whose turn it is then (0: a round has ended), or None.

        Means that are due are merged here, without asking anybody.
        """
        has_ended = self.clock.tick()
        for part in self.clock.take_merges() if self.clock.due else ():
            self.method.merge(part)
            if part == 0:
                self._reset_optimizers()
        if has_ended:
            return 0
        due = self.clock.parts_due(self.method.fragments) if self.method.fragments > 1 else []
        return due[0] if due else None

    def launch(self, part: int) -> None:
        """The first half of a turn: start what must travel."""
        if self.guard is not None:
            self.guard()
        if part == 0:  # an algorithm without fragments takes no argument
            self.method.launch()
        else:
            self.method.launch(part)
        self.clock.launched(part)

    def land(self, part: int) -> None:
        """The second half: complete what must be complete before the next step."""
        if part == 0:
            self.method.land()
            if self.clock.delay is None:
                self._reset_optimizers()
        else:
            self.method.land(part)

    # ---- the exact mean

    def finish(self) -> None:
        """Merge what is in flight, then take the exact mean of all workers."""
        self.drain()
        self.launch_exact()
        self.adopt_exact()

    def drain(self) -> None:
        self.method.drain()

    def launch_exact(self) -> None:
        self.replica.launch_exact()

    def adopt_exact(self) -> None:
        """Training may go on after it: a round begins here."""
        self.replica.adopt_exact()
        self._reset_optimizers()
        self.clock.restart()

    # ---- the state between two steps

    def state(self, *, copies: bool = True) -> dict[str, Any]:
        """What model and optimizers do not hold. Waits for what is in flight; starts no collective.

        Without ``copies`` it holds only until the next step.
        """
        outer, own = self.method.outer, self.method.state()
        return {
            "algorithm": self.method.name,
            "attempts": self.clock.attempts,
            "rounds": self.clock.rounds,
            "round_start": self.clock.start,
            "due": sorted(self.clock.due.items()),
            "options": {
                "payload": self.method.payload,
                "fragments": self.method.fragments,
                "own_share": self.method.own_share,
                "outer": [outer.rate, outer.momentum, outer.nesterov],
            },
            "method": copied(own) if copies else own,
            "averages": self.replica.state(copies=copies),
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse what :meth:`load_state` could not load, before anything is changed."""
        saved, attached = state["algorithm"], self.method.name
        if saved != attached:
            raise ValueError(f"the state was saved with {saved}, but {attached} is attached; attach the same algorithm")
        if state["averages"] is None:
            return
        for name in _STATE_OPTIONS:
            there, here = state["options"][name], getattr(self.method, name)
            if name == "outer":
                there = type(here)(*there)
            if there != here:
                raise ValueError(f"the state was saved with {name}={there}, but attached with {here}; use the same")
        self.replica.check_state(state["averages"])

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state` was taken."""
        self.method.load_state(state["method"])
        self.replica.load_state(state["averages"])
        self.clock.attempts, self.clock.rounds = state["attempts"], state["rounds"]
        self.clock.start = state["round_start"]
        self.clock.due = {part: attempt for part, attempt in state.get("due", []) if state["averages"] is not None}

    def _reset_optimizers(self) -> None:
        """The model has been merged: begin anew, if that is the policy."""
        if self.method.optimizer_state == "reset":
            for optimizer in self._optimizers:
                optimizer.state.clear()
