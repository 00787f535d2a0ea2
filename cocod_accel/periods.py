"""Which period hides an average: the one rule of ``cocod plan``, of ``algorithm.period: auto`` and of ``cocod simulate``."""

from __future__ import annotations

from dataclasses import replace

from cocod_accel.theory import StepTimes, hiding_period

#: What ``algorithm.period`` says to have the rule applied to what is measured.
AUTO = "auto"
#: How much longer than measured an average may take, because steps and transfers jitter.
MARGIN = 0.1


def choose_period(times: StepTimes, *, margin: float = MARGIN, least: int = 1) -> int:
    """The smallest k >= ``least`` with (1 + margin) (1 - a) T_comm <= k T_comp: CoCoD-SGD then waits for no average.

    While an average travels a worker computes at the rate 1 - a, so a round of k steps lasts k T_comp + a T_comm. A longer
    period waits no less; it only spreads a T_comm over more steps, and lets models drift apart.
    """
    if not 0 <= margin <= 10:
        raise ValueError(f"margin={margin} must be a share from 0 to 10; use {MARGIN} for {MARGIN:.0%}")
    return max(least, hiding_period(replace(times, comm_seconds=(1 + margin) * times.comm_seconds)))
