"""When each algorithm sends and when it waits: the timing of ``algorithms/``, for all workers at once.

A rule sees what the method itself sees: steps, the turn of a part, the end of a round, the end of the run.
"""

from __future__ import annotations

from cocod_accel.simulator.fleet import Array, Fleet, Flight
from cocod_accel.simulator.payloads import Parcels


class Rule:
    """Plain local steps; at the end everybody waits for one exact mean."""

    def __init__(self, fleet: Fleet, parcels: Parcels, gradient_overlap: float = 0.0) -> None:
        self.fleet, self.parcels, self.gradient_overlap = fleet, parcels, gradient_overlap

    def step(self, work: Array) -> None:
        self.fleet.compute(work)

    def part_due(self, part: int) -> None:
        raise AssertionError("sends models whole")

    def round_ends(self) -> None:
        """Every worker has taken its steps of a round."""

    def drain(self) -> None:
        """Wait for what is in flight."""

    def finish(self) -> None:
        self.drain()
        self.fleet.wait(self.fleet.join(self.parcels.final))


class SSGDRule(Rule):
    """A step ends with the sum of its gradients."""

    def step(self, work: Array) -> None:
        self.fleet.wait(self.fleet.compute_and_join(work, self.parcels.gradients, self.gradient_overlap))


class PipeRule(Rule):
    """Backward t starts the sum of its gradients, and ends with that of backward t - 1."""

    _pending: Flight | None = None

    def step(self, work: Array) -> None:
        self.fleet.compute(work)
        flight = self.fleet.join(self.parcels.gradients)
        self.drain()
        self._pending = flight

    def drain(self) -> None:
        if self._pending is not None:
            self.fleet.wait(self._pending)
        self._pending = None


class LocalRule(Rule):
    """A round ends with the mean of its models."""

    def round_ends(self) -> None:
        self.fleet.wait(self.fleet.join(self.parcels.parts[0]))


class CoCoDRule(Rule):
    """A part's mean travels while the next round computes; it is waited for where the part has its next turn."""

    def __init__(self, fleet: Fleet, parcels: Parcels, gradient_overlap: float = 0.0) -> None:
        super().__init__(fleet, parcels, gradient_overlap)
        # With equal starts nothing is in flight before a part's first turn.
        self._pending: dict[int, Flight] = {}

    def part_due(self, part: int) -> None:
        if part in self._pending:
            self.fleet.wait(self._pending[part])
        self._pending[part] = self.fleet.join(self.parcels.parts[part])

    def round_ends(self) -> None:
        self.part_due(0)

    def drain(self) -> None:
        for part in sorted(self._pending):
            self.fleet.wait(self._pending[part])
        self._pending = {}


#: By the names of ``ALGORITHMS``.
RULES: dict[str, type[Rule]] = {
    "ssgd": SSGDRule,
    "pipe": PipeRule,
    "local": LocalRule,
    "cocod": CoCoDRule,
    "asynlocal": LocalRule,
}
