"""Which period hides an average: one rule for ``cocod plan``, ``algorithm.period: auto`` and ``cocod simulate``.

``cocod plan`` alone gives it a bound, up to which periods are made longer for steps that transfers slow down.
"""

from __future__ import annotations

import math
from dataclasses import replace

from cocod_accel.theory import StepTimes, hiding_period

#: What ``algorithm.period`` says to have the rule applied to what is measured.
AUTO = "auto"
#: How much longer than measured an average may take, because steps and transfers jitter.
MARGIN = 0.1
#: How much longer than a step alone one may be for the transfers that it computes beside, where theory allows longer rounds.
LOSS = 0.03


def choose_period(times: StepTimes, *, margin: float = MARGIN, least: int = 1, bound: float | None = None) -> int:
    """The smallest k >= ``least`` with (1 + margin) (1 - a) T_comm <= k T_comp: CoCoD-SGD then waits for no average.

    While an average travels a worker computes at the rate 1 - a, so a round of k steps lasts k T_comp + a T_comm. A longer
    period waits no less; it only spreads a T_comm over more steps, and lets models drift apart. With a ``bound`` it is made
    longer, but not above that, until a T_comm <= 3% of k T_comp.
    """
    if not 0 <= margin <= 10:
        raise ValueError(f"margin={margin} must be a share from 0 to 10; use {MARGIN} for {MARGIN:.0%}")
    hiding = max(least, hiding_period(replace(times, comm_seconds=(1 + margin) * times.comm_seconds)))
    if bound is None:
        return hiding
    cheap = math.ceil(lost_share(times, 1) / LOSS * (1 - 1e-12))
    return max(hiding, min(cheap, math.floor(bound)))


def lost_share(times: StepTimes, period: int) -> float:
    """How much longer a step is for the transfers that it computes beside, where nobody waits for them."""
    return times.interference * times.comm_seconds / (period * times.compute_seconds)
