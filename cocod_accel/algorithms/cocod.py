"""CoCoD-SGD: local steps while the weighted mean of the models travels in the background."""

from __future__ import annotations

from typing import ClassVar, Literal

from cocod_accel.algorithms.base import Algorithm
from cocod_accel.algorithms.rounds import Period, PeriodLike, check_delay
from cocod_accel.averaging.rules import Outer, check_own_share


class CoCoDSGD(Algorithm):
    """Computation and communication decoupled SGD (Shen et al. 2019, algorithm 1).

    At step t a worker keeps x_t^i and starts mean_t = sum_j w_j x_t^j; after k local steps it keeps its progress and
    adopts the mean::

        x_{t+k}^i <- x_{t+k}^i + (mean_t - x_t^i)

    and the next round starts at once. With equal starting points the first mean is known and is not sent.
    ``period="auto"``: the shortest that hides an average, measured in the first steps (``sync.plan()`` says why).

    ``delay=d``: the mean is merged after d steps instead of k, so that workers drift apart for d + k steps instead of 2 k.
    ``payload``: a shorter code than fp32 (:mod:`cocod_accel.averaging.codecs`). ``fragments=P``: the parameters are cut
    into P parts, and for part p all of this happens floor(p k / P) steps later in every round, so that a link carries 1/P
    of the model P times a round. ``own_share=a`` and ``outer=Outer(...)`` change the merge to
    x_{t+d}^i <- z + a (x_{t+d}^i - x_t^i), where z follows the means (:mod:`cocod_accel.averaging.rules`).
    """

    name: ClassVar[str] = "cocod"

    def __init__(
        self,
        period: PeriodLike | Literal["auto"],
        *,
        delay: int | None = None,
        payload: str = "fp32",
        fragments: int = 1,
        own_share: float = 1.0,
        outer: Outer | None = None,
        optimizer_state: str = "keep",
    ) -> None:
        super().__init__(period, payload=payload, fragments=fragments, outer=outer, optimizer_state=optimizer_state)
        if self.auto_period and isinstance(delay, int) and delay >= 1:  # rounds are at least as long
            self.period = Period.parse(max(int(delay), self.period.at(0)))
        self.delay = check_delay(delay, self.period)
        self.own_share = check_own_share(own_share)

    def start(self, equal: bool) -> None:
        super().start(equal)
        if not equal:
            self.replica.launch()

    def launch(self, part: int = 0) -> None:
        self.replica.merge(part)
        self.replica.launch(part)
