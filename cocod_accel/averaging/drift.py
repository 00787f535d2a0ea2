"""How far a worker is from the mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cocod_accel.comm.device import runs_ahead


class Drift:
    """||x_t - mean_t||^2 and ||mean_t||^2 in pieces, kept on their devices: reading them would wait for the device."""

    def __init__(self) -> None:
        self.distances: list[Tensor] = []
        self.norms: list[Tensor] = []

    @classmethod
    def sum_of(cls, drifts: Sequence[Drift]) -> Drift:
        total = cls()
        for drift in drifts:
            total.distances += drift.distances
            total.norms += drift.norms
        return total

    @property
    def ratio(self) -> float:
        distance, norm = (math.fsum(float(piece) for piece in pieces) for pieces in (self.distances, self.norms))
        return math.sqrt(distance / norm) if norm > 0 else 0.0

    def state(self) -> list[list[float]]:
        return [[float(piece) for piece in pieces] for pieces in (self.distances, self.norms)]

    @classmethod
    def of_state(cls, state: Sequence[Sequence[float]]) -> Drift:
        drift = cls()
        drift.distances, drift.norms = ([torch.tensor(p, dtype=torch.float64) for p in pieces] for pieces in state)
        return drift


class DriftHistory:
    """The largest drift of all merges, and their mean; kept where the drifts are, for the same reason."""

    def __init__(self) -> None:
        self._num_merges = 0
        self._sum: Tensor | float = 0.0
        self._largest: Tensor | float = 0.0

    def add(self, drift: Drift) -> None:
        pieces = drift.distances[:1]
        ratio: Tensor | float
        if pieces and runs_ahead(pieces[0].device):
            distance, norm = (torch.stack(list(of)).sum() for of in (drift.distances, drift.norms))
            ratio = torch.where(norm > 0, distance / norm, torch.zeros_like(norm)).sqrt()
            self._largest = torch.maximum(ratio, torch.zeros_like(ratio) + self._largest)
        else:
            ratio = drift.ratio
            self._largest = max(ratio, float(self._largest))
        self._sum = self._sum + ratio
        self._num_merges += 1

    @property
    def largest(self) -> float:
        return float(self._largest)

    @property
    def mean(self) -> float:
        return float(self._sum) / self._num_merges if self._num_merges else 0.0

    def state(self) -> list[float]:
        return [self._num_merges, float(self._sum), self.largest]

    def load(self, state: Sequence[float] | None) -> None:
        """None: of a state that was saved before there was a history."""
        count, self._sum, self._largest = (0, 0.0, 0.0) if state is None else state
        self._num_merges = int(count)
