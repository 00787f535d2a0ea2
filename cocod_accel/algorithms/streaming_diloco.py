"""Streaming DiLoCo: DiLoCo part by part, while local steps go on."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from cocod_accel.algorithms.base import Algorithm
from cocod_accel.algorithms.cocod import CoCoDSGD
from cocod_accel.algorithms.diloco import NESTEROV
from cocod_accel.algorithms.rounds import PeriodLike
from cocod_accel.averaging.rules import Outer, check_mix


class StreamingDiLoCo(CoCoDSGD):
    """Streaming DiLoCo with overlapped communication (Douillard et al. 2025). For part p of the model, sent at step t::

        z <- Outer(z, sum_j w_j x_t^j)          x_{t+d}^i <- m x_{t+d}^i + (1 - m) z

    Part p of P is sent floor(p k / P) steps into every round of k and merged d steps later, where ``mix`` m = 1/2 of a
    worker's own parameters stay; ``outer`` is as in DiLoCo. The paper cuts a model into parts of three transformer layers.
    ``delay=None``: the mean is merged when the part is sent again. With one worker this is plain training.
    """

    name: ClassVar[str] = "streaming_diloco"
    options: ClassVar[dict[str, Any]] = {**Algorithm.options, "delay": 1, "mix": 0.5, "outer": NESTEROV}

    def __init__(
        self,
        period: PeriodLike | Literal["auto"],
        fragments: int = 1,
        delay: int | None = 1,
        mix: float = 0.5,
        outer: Outer | None = None,
        *,
        payload: str = "fp32",
        optimizer_state: str = "keep",
    ) -> None:
        super().__init__(
            period,
            delay=delay,
            payload=payload,
            fragments=fragments,
            outer=NESTEROV if outer is None else outer,
            optimizer_state=optimizer_state,
        )
        #: The part of its own parameters that a worker keeps at a merge.
        self.mix = check_mix(mix)
