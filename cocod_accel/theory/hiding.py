"""Which code, period and delay hide an average: the rule shared by ``cocod plan``, ``auto`` settings and ``cocod simulate``.

Only ``cocod plan`` passes a bound, up to which it lengthens the period if transfers slow down steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from cocod_accel.theory import StepTimes, hiding_period

#: The value of ``algorithm.period``, ``payload`` and ``delay`` that applies the rule to measured times.
AUTO = "auto"
#: The codes to choose from, the longest first.
CODES = ("fp32", "bf16", "int8", "int4", "ternary")
#: Allowance for jitter: how much longer than measured an average may take.
MARGIN = 0.1
#: Acceptable slowdown of steps by concurrent transfers, where theory allows longer rounds.
LOSS = 0.03


def choose_period(times: StepTimes, *, margin: float = MARGIN, least: int = 1, bound: float | None = None) -> int:
    """The smallest k >= ``least`` with (1 + margin) (1 - a) T_comm <= k T_comp: CoCoD-SGD then never waits.

    During a transfer a worker computes at the rate 1 - a, so a round of k steps lasts k T_comp + a T_comm. A longer
    period does not reduce waiting; it only spreads a T_comm over more steps, and lets models drift apart. With a
    ``bound``, the period grows, at most to that, until a T_comm <= 3% of k T_comp.
    """
    if not 0 <= margin <= 10:
        raise ValueError(f"margin={margin} must be a share from 0 to 10; use {MARGIN} for {MARGIN:.0%}")
    hiding = max(least, hiding_period(replace(times, comm_seconds=(1 + margin) * times.comm_seconds)))
    if bound is None:
        return hiding
    cheap = math.ceil(lost_share(times, 1) / LOSS * (1 - 1e-12))
    return max(hiding, min(cheap, math.floor(bound)))


@dataclass(frozen=True)
class Choice:
    """How a model travels."""

    payload: str
    period: int
    #: None: as long as the period.
    delay: int | None


def choose(
    times_of: Callable[[str], StepTimes],
    *,
    payload: str = AUTO,
    period: int | None = None,
    delay: int | str | None = AUTO,
    least: int = 1,
) -> Choice:
    """The longest code that hides in the shortest rounds; if none does, the shortest code, and as long rounds as hide it.

    Sending less costs less accuracy than sending less often (docs/reproduction.md). ``times_of``: the times with a code.
    What is given is kept: a ``payload``, a ``period`` (None: free, but at least ``least``), a ``delay``.
    """
    codes = CODES if payload == AUTO else (payload,)
    shortest = max(least, delay) if isinstance(delay, int) else least
    hidden = shortest if period is None else period
    if isinstance(delay, int):  # the time that a transfer has
        hidden = min(hidden, delay)
    chosen, needed = codes[-1], 1
    for name in codes:
        needed = choose_period(times_of(name))
        if needed <= hidden:
            chosen = name
            break
    steps = max(shortest, needed) if period is None else period
    found = delay if not isinstance(delay, str) else min(needed, steps)
    return Choice(chosen, steps, None if found == steps else found)


def lost_share(times: StepTimes, period: int) -> float:
    """The relative slowdown of a step by concurrent transfers, if no worker waits for them."""
    return times.interference * times.comm_seconds / (period * times.compute_seconds)
