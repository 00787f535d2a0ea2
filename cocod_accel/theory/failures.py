"""What failures leave of a run: where everybody restarts from a checkpoint, and where the others go on.

Not of the paper. Workers fail independently and at any moment (a Poisson process), equally often. Goodput is the share of
an undisturbed run's progress.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: How long the others wait for a worker that has died, by default of ``Members``.
HEARTBEAT_SECONDS = 6.0


@dataclass(frozen=True)
class Failures:
    """How often workers fail, and how long one is away."""

    #: Of all workers together.
    per_hour: float
    #: From a failure until its worker could train again, noticing it included.
    restart_seconds: float
    #: How long the others are held up by each; only where they go on.
    heartbeat_seconds: float = HEARTBEAT_SECONDS

    def goodput_of_restarting(self, checkpoint_seconds: float) -> float:
        """Everybody goes back to the last checkpoint, which was written every so many seconds; a restart may fail too.

        >>> round(Failures(per_hour=6, restart_seconds=60).goodput_of_restarting(600), 3)
        0.527
        """
        rate = self.per_hour / 3600
        if rate == 0:
            return 1.0
        if rate * max(checkpoint_seconds, self.restart_seconds) > 500:  # beyond floating point, and any hope
            return 0.0
        # With failures at a rate r, a piece of work of C seconds takes exp(r R) (exp(r C) - 1) / r in the mean.
        return rate * checkpoint_seconds / (math.exp(rate * self.restart_seconds) * math.expm1(rate * checkpoint_seconds))

    def goodput_of_going_on(self, num_workers: int, round_seconds: float) -> float:
        """A worker loses half a round of its steps and waits one and a half to be let in; the others wait for a heartbeat.

        >>> round(Failures(per_hour=6, restart_seconds=60).goodput_of_going_on(4, round_seconds=10), 3)
        0.961
        """
        rate = self.per_hour / 3600 / num_workers
        if rate == 0:
            return 1.0
        up, away = 1 / rate, self.restart_seconds + 1.5 * round_seconds
        failing = up / (up + away) * rate  # a worker that is away does not fail
        blocked = min(1.0, (num_workers - 1) * failing * self.heartbeat_seconds)
        return max(0.0, up * (1 - blocked) - round_seconds / 2) / (up + away)
