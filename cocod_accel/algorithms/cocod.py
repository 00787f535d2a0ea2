"""CoCoD-SGD: local steps while the weighted mean of the models travels in the background."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from cocod_accel.algorithms.base import Algorithm
from cocod_accel.algorithms.rounds import PeriodLike, check_fragments
from cocod_accel.averaging.replica import Replica
from cocod_accel.averaging.rules import check_share


class CoCoDSGD(Algorithm):
    """Computation and communication decoupled SGD (Shen et al. 2019, algorithm 1).

    At step t a worker keeps x_t^i and starts mean_t = sum_j w_j x_t^j; after k local steps it keeps its progress and
    adopts the mean::

        x_{t+k}^i <- x_{t+k}^i + (mean_t - x_t^i)

    and the next round starts at once. With equal starting points the first mean is known and is not sent.

    With ``fragments=P`` the parameters are cut into P parts, and for part p all of this happens floor(p k / P) steps later
    in every round, so that a link carries a P-th of the model P times a round.

    Where workers' data differ, or rounds are long (:mod:`cocod_accel.averaging.rules`), ``pull_back=alpha`` and
    ``outer_momentum=beta`` make the merge x_{t+k}^i <- z_t + (1 - alpha) (x_{t+k}^i - x_t^i), with z_t following the means
    with momentum beta.
    """

    name: ClassVar[str] = "cocod"

    _parts: list[Replica]

    def __init__(
        self,
        period: PeriodLike,
        *,
        optimizer_state: str = "keep",
        payload: str = "fp32",
        fragments: int = 1,
        pull_back: float = 0.0,
        outer_momentum: float = 0.0,
    ) -> None:
        super().__init__(period, optimizer_state=optimizer_state, payload=payload, outer_momentum=outer_momentum)
        self.pull_back = check_share("pull_back", pull_back)
        self.refuse_with("pull_back", self.pull_back, payload != "fp32", 'payload="fp32"')
        for name, value in (("pull_back", self.pull_back), ("outer_momentum", self.outer_momentum)):
            self.refuse_with(name, value, fragments != 1, "fragments=1")
        self.fragments = check_fragments(fragments, self.period)
        if fragments > 1 and payload != "fp32":
            raise ValueError(
                f'fragments={fragments} does not go with payload="{payload}"; use fragments=1 or payload="fp32"'
            )

    def bind(self, replica: Replica) -> Self:
        bound = super().bind(replica)
        bound._parts = [replica] if self.fragments == 1 else replica.cut(self.fragments)
        return bound

    def start(self, equal: bool) -> None:
        super().start(equal)
        if not equal:
            self._part(0).launch()

    def launch(self) -> None:
        self.launch_part(0)

    def launch_part(self, part: int) -> None:
        replica = self._part(part)
        replica.merge()
        if self.fragments > 1:
            self.replica.take_drift(self._parts)
        replica.launch()

    def drain(self) -> None:
        for index in range(self.fragments):
            part = self._part(index)
            part.merge()
            part.release()

    def poll(self) -> None:
        for part in self._parts:
            part.poll()

    def state(self) -> Any:
        if self.fragments == 1:
            return super().state()
        parts = [self._part(index) for index in range(self.fragments)]
        return [{"in_flight": part.in_flight_state(), "drift": part.drift_state()} for part in parts]

    def load_state(self, state: Any) -> None:
        saved = len(state) if isinstance(state, list) and state and isinstance(state[0], dict) else 1
        if state is not None and saved != self.fragments:
            raise ValueError(
                f"the state was saved with fragments={saved}, attached is {self.fragments}; attach with the same"
            )
        if self.fragments == 1:
            return super().load_state(state)
        for index in range(self.fragments):
            part = self._part(index)
            part.load_in_flight_state(None if state is None else state[index]["in_flight"])
            if state is not None:
                part.load_drift_state(state[index]["drift"])
        return None

    def _part(self, index: int) -> Replica:
        return self.replica if self.fragments == 1 else self.replica.lead(self._parts[index], with_wishes=index == 0)
