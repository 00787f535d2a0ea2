"""Local-SGD: k local steps, then everybody waits for the mean."""

from __future__ import annotations

from typing import ClassVar

from cocod_accel.algorithms.base import Algorithm


class LocalSGD(Algorithm):
    """Local SGD (Stich 2018): after every k local steps, blocking, floating buffers included::

        x_i <- sum_j w_j x_j

    With ``optimizer_state="average"``, momentum and other optimizer state of a parameter's shape is averaged too. With
    ``outer=Outer(...)`` workers take x_i <- z, which follows the means (:mod:`cocod_accel.averaging.rules`);
    ``Outer(0.7, 0.9, nesterov=True)`` is DiLoCo. With ``fragments=P``, part p is averaged floor(p k / P) steps into every
    round; buffers travel with part 0, averaged optimizer state with its own part.
    """

    name: ClassVar[str] = "local"
    sends_buffers: ClassVar[bool] = True
    optimizer_policies: ClassVar[tuple[str, ...]] = ("keep", "reset", "average")

    def launch(self, part: int = 0) -> None:
        self.replica.launch(part, with_buffers=True)

    def land(self, part: int = 0) -> None:
        self.replica.adopt(part)
