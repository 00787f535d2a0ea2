"""Local-SGD: k local steps, then everybody waits for the mean."""

from __future__ import annotations

from typing import ClassVar

from cocod_accel.algorithms.base import Algorithm


class LocalSGD(Algorithm):
    """Local SGD (Stich 2018): after every k local steps, blocking, floating buffers included::

        x_i <- sum_j w_j x_j

    With ``optimizer_state="average"`` momentum and other optimizer state of a parameter's shape is averaged with it. With
    ``outer_momentum=beta`` workers take x_i <- z, which follows the means with that momentum (:mod:`cocod_accel.averaging.rules`).
    """

    name: ClassVar[str] = "local"
    sends_buffers: ClassVar[bool] = True
    optimizer_policies: ClassVar[tuple[str, ...]] = ("keep", "reset", "average")

    def launch(self) -> None:
        self.replica.launch(with_buffers=True)

    def land(self) -> None:
        self.replica.adopt()
