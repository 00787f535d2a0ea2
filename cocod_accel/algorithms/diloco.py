"""DiLoCo: Local-SGD whose mean update goes through an outer Nesterov optimizer."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from cocod_accel.algorithms.base import Algorithm
from cocod_accel.algorithms.local import LocalSGD
from cocod_accel.algorithms.rounds import PeriodLike
from cocod_accel.averaging.rules import Outer

#: The outer optimizer of the paper.
NESTEROV = Outer(0.7, 0.9, nesterov=True)


class DiLoCo(LocalSGD):
    """Distributed low-communication training (Douillard et al. 2023), blocking, floating buffers averaged::

        x_i <- z <- Outer(z, sum_j w_j x_j)

    after every k local steps: z is the point that all workers started the round from, and ``outer`` is SGD with Nesterov
    momentum on the gradient z - sum_j w_j x_j, by default with the paper's rate 0.7 and momentum 0.9. The paper takes
    hundreds of AdamW steps a round. With one worker this is plain training.
    """

    name: ClassVar[str] = "diloco"
    options: ClassVar[dict[str, Any]] = {**Algorithm.options, "outer": NESTEROV}

    def __init__(
        self,
        period: PeriodLike | Literal["auto"],
        outer: Outer | None = None,
        *,
        payload: str = "fp32",
        fragments: int = 1,
        optimizer_state: str = "keep",
    ) -> None:
        outer = NESTEROV if outer is None else outer
        super().__init__(period, payload=payload, fragments=fragments, outer=outer, optimizer_state=optimizer_state)
