"""What failures cost: the share of an undisturbed run's steps that is kept, if all start again or the others go on.

Failures come at random (a Poisson process), as many an hour of the whole cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_HOUR = 3600.0


@dataclass(frozen=True)
class Failures:
    """How often workers fail, and how long one is away."""

    #: Of the whole cluster.
    per_hour: float
    #: From a failure until the worker, or the whole run, could train again.
    restart_seconds: float
    #: Between two checkpoints of a run that starts again.
    save_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name, value in (("per_hour", self.per_hour), ("restart_seconds", self.restart_seconds)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value:g}: must be at least 0")
        if not 0 < self.save_seconds < math.inf:
            raise ValueError(f"save_seconds={self.save_seconds:g}: must be above 0")


def goodput_of_restarts(failures: Failures) -> float:
    """All end, and start again from the last checkpoint: l c / (e^(l c) - 1) of the work of 1 / (1 + l r) of the time.

    l: failures a second; c: seconds between checkpoints, each of which is kept only if nobody fails meanwhile; r: seconds
    of a restart.
    """
    rate = failures.per_hour / _HOUR
    risk = rate * failures.save_seconds
    kept = 1.0 if risk == 0 else risk / math.expm1(risk) if risk < 700 else 0.0
    return kept / (1 + rate * failures.restart_seconds)


def goodput_of_members(
    failures: Failures, num_workers: int, round_seconds: float, heartbeat_seconds: float = 2.0, overlapped: bool = True
) -> float:
    """The others go on: 1 - l (r + 2 T) / N of the work of 1 / (1 + l b) of the time.

    T: a round, of which the worker that failed loses half on average; it waits for one and a half until it is let in. b:
    how long the others wait until its silence is noticed, which steps of a round that overlaps are hidden behind.
    """
    rate = failures.per_hour / _HOUR
    away = failures.restart_seconds + 2 * round_seconds
    blocked = max(0.0, heartbeat_seconds - (round_seconds if overlapped else 0.0))
    return max(0.0, 1 - rate * away / num_workers) / (1 + rate * blocked)
