"""AsynLocal-SGD: Local-SGD in which faster workers take more steps a round."""

from __future__ import annotations

from typing import ClassVar

from cocod_accel.algorithms.local import LocalSGD


class AsynLocalSGD(LocalSGD):
    """Local-SGD with a period k_i per worker (Yu et al. 2018): k_i local steps, then, blocking::

        x_i <- (1/N) sum_j x_j

    Each worker passes its own period, in proportion to its speed. Batches are equal, and so are the weights.
    """

    name: ClassVar[str] = "asynlocal"
    same_period: ClassVar[bool] = False
    needs_equal_weights: ClassVar[bool] = True
