"""CoCoD-SGD: local steps while the weighted mean of the models travels in the background."""

from __future__ import annotations

from typing import ClassVar

from cocod_accel.algorithms.base import Algorithm


class CoCoDSGD(Algorithm):
    """Computation and communication decoupled SGD (Shen et al. 2019, algorithm 1).

    At step t a worker keeps x_t^i and starts mean_t = sum_j w_j x_t^j; after k local steps it keeps its progress and
    adopts the mean::

        x_{t+k}^i <- x_{t+k}^i + (mean_t - x_t^i)

    and the next round starts at once. With equal starting points the first mean is known and is not sent.
    """

    name: ClassVar[str] = "cocod"

    def start(self, equal: bool) -> None:
        super().start(equal)
        if not equal:
            self.replica.launch()

    def launch(self) -> None:
        self.replica.merge()
        self.replica.launch()

    def drain(self) -> None:
        self.replica.merge()
