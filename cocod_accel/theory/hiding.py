"""Which code, period and delay hide an average: one rule for ``cocod plan``, ``auto`` settings and ``cocod simulate``."""

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
#: How much longer a step may become by coding, and by transfers beside it, before a round or a code counts as too costly.
LOSS = 0.1


def hiding_delay(times: StepTimes, margin: float = MARGIN) -> int:
    """The smallest d with (1 + margin) (1 - a) T_comm <= d T_comp: a mean that is merged after d steps is not waited for.

    During a transfer a worker computes at the rate 1 - a, so d steps beside it last d T_comp + a T_comm.
    """
    if not 0 <= margin <= 10:
        raise ValueError(f"margin={margin} must be a share from 0 to 10; use {MARGIN} for {MARGIN:.0%}")
    return hiding_period(replace(times, comm_seconds=(1 + margin) * times.comm_seconds))


def choose_period(times: StepTimes, *, margin: float = MARGIN, least: int = 1) -> int:
    """The smallest k >= ``least`` that hides an average and spends at most 10% of a round on coding.

    A longer period does not reduce waiting; it lets models drift apart.
    """
    coding = math.ceil(times.coding_seconds / (LOSS * times.compute_seconds) * (1 - 1e-12))
    return max(least, hiding_delay(times, margin), coding)


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
    """The longest code that hides in the shortest rounds; if none does, the shortest of those that need the shortest ones.

    Sending less costs less accuracy than sending less often (docs/reproduction.md). A code that makes steps more than 10%
    longer does not count as hidden. ``times_of``: the times with a code. What is given is kept: a ``payload``, a ``period``
    (None: free, but at least ``least``), a ``delay``.
    """
    times = {code: times_of(code) for code in (CODES if payload == AUTO else (payload,))}
    shortest = max(least, delay) if isinstance(delay, int) else least
    tried = shortest if period is None else period
    hidden = min(tried, delay) if isinstance(delay, int) else tried  # the time that a transfer has

    def hides(code: str) -> bool:
        return hiding_delay(times[code]) <= hidden and lost_share(times[code], tried) <= LOSS * (1 + 1e-9)

    def needed(code: str) -> tuple[int, int]:
        return choose_period(times[code], least=shortest) if period is None else period, hiding_delay(times[code])

    chosen = next((code for code in times if hides(code)), None) or min(reversed(times), key=needed)
    steps, soonest = needed(chosen)
    found = delay if not isinstance(delay, str) else min(soonest, steps)
    return Choice(chosen, steps, None if found == steps else found)


def lost_share(times: StepTimes, period: int) -> float:
    """The relative slowdown of a step by coding, and by transfers beside it, if no worker waits for them."""
    return (times.interference * times.comm_seconds + times.coding_seconds) / (period * times.compute_seconds)
