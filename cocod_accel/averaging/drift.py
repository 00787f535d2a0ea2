"""How far a worker is from the mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


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
