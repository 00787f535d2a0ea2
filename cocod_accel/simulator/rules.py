"""When each algorithm sends and when it waits: the timing of ``algorithms/``, for all workers at once.

A rule sees what the method itself sees: steps, the turn of a part, the end of the run. A model that is sent whole is one
part, and part 0 has its turn where a round ends.
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
        """Every worker has come to the turn of a part."""

    def merge_due(self, part: int) -> None:
        """Every worker has come to where the mean of a part is merged inside its round."""

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
    """Everybody waits for the mean of a part where it has its turn."""

    def part_due(self, part: int) -> None:
        self.fleet.wait(self.fleet.join(self.parcels.parts[part]))


class CoCoDRule(Rule):
    """A part's mean travels while the next round computes; it is waited for at the part's next turn, or where it is due."""

    def __init__(self, fleet: Fleet, parcels: Parcels, gradient_overlap: float = 0.0) -> None:
        super().__init__(fleet, parcels, gradient_overlap)
        # With equal starts nothing is in flight before a part's first turn.
        self._pending: dict[int, Flight] = {}

    def part_due(self, part: int) -> None:
        self.merge_due(part)
        self._pending[part] = self.fleet.join(self.parcels.parts[part])

    def merge_due(self, part: int) -> None:
        if part in self._pending:
            self.fleet.wait(self._pending.pop(part))

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
    "diloco": LocalRule,
    "streaming_diloco": CoCoDRule,
}
