"""Where a round ends: the one definition that every driver uses.

A round is a number of *attempted* optimizer steps, its period. Hooks, trainer and simulator all ask
the :class:`RoundClock`, so that they cannot disagree by one step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

PeriodLike = int | Sequence[tuple[int, int]]

_EXAMPLE = "use an int >= 1 such as period=5, or pairs such as period=[[0, 1], [200, 5]]"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Period:
    """Steps per round as (first step, period) pairs; a round uses the pair in force at its first step."""

    schedule: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, value: PeriodLike) -> Period:
        """Check and normalise what a user passes as ``period=``."""
        if _is_int(value):
            pairs: list[tuple[int, int]] = [(0, value)]  # type: ignore[list-item]
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            pairs = []
            for pair in value:
                if not isinstance(pair, Sequence) or len(pair) != 2 or not all(_is_int(item) for item in pair):
                    raise TypeError(f"period={value!r}: {pair!r} is not a pair of ints; {_EXAMPLE}")
                pairs.append((pair[0], pair[1]))
        else:
            raise TypeError(f"period={value!r} is not an int; {_EXAMPLE}")
        if not pairs or pairs[0][0] != 0:
            raise ValueError(f"period={value!r}: the first pair must start at step 0; {_EXAMPLE}")
        if any(later[0] <= earlier[0] for earlier, later in pairwise(pairs)):
            raise ValueError(f"period={value!r}: first steps must increase; {_EXAMPLE}")
        if any(period < 1 for _, period in pairs):
            raise ValueError(f"period={value!r}: a period must be at least 1; {_EXAMPLE}")
        return cls(tuple(pairs))

    def at(self, step: int) -> int:
        """The period in force at ``step`` (counted from 0)."""
        return self.schedule[bisect_right(self.schedule, step, key=lambda pair: pair[0]) - 1][1]

    def __str__(self) -> str:
        if len(self.schedule) == 1:
            return str(self.schedule[0][1])
        return str([list(pair) for pair in self.schedule])


def check_fragments(fragments: object, period: Period) -> int:
    """How many parts a model is sent in: at most one a step, in the shortest round too."""
    if not _is_int(fragments):
        raise TypeError(f"fragments={fragments!r} is not an int; use fragments=1 to send a model at once")
    assert isinstance(fragments, int)
    shortest = min(steps for _, steps in period.schedule)
    if not 1 <= fragments <= shortest:
        raise ValueError(f"fragments={fragments} must be from 1 to {shortest}, the shortest period; use {shortest} at most")
    return fragments


def fragment_offsets(period: int, fragments: int) -> list[int]:
    """After how many steps of a round each part of a model has its turn: part p after floor(p * period / fragments)."""
    return [part * period // fragments for part in range(fragments)]


def check_delay(delay: object, period: Period) -> int | None:
    """After how many steps a mean is merged, at most; None: at the end of its round."""
    if delay is None:
        return None
    longest = max(steps for _, steps in period.schedule)
    if not _is_int(delay):
        raise TypeError(f"delay={delay!r} is not an int; use delay=None to merge at the end of a round")
    assert isinstance(delay, int)
    if not 1 <= delay <= longest:
        raise ValueError(f"delay={delay} must be from 1 to {longest}, the longest period; use {min(max(1, delay), longest)}")
    return delay


class RoundClock:
    """Counts attempted steps and says which of them ends a round, and where a mean under way is merged.

    ``delay``: a mean is merged this many steps after its launch, at most a round; None: when its part is launched again.
    """

    def __init__(self, period: Period, delay: int | None = None) -> None:
        self.period = period
        self.delay = delay
        #: part -> the attempt after which its mean is merged; only what is under way, and only if there is a delay.
        self.due: dict[int, int] = {}
        self.attempts = 0
        self.rounds = 0
        self.start = 0
        self._end = (-1, 0)  # (start, end) of the round that was last asked about

    def tick(self) -> bool:
        """Count one attempted step; True if it ended a round, and the next round then starts after it."""
        self.attempts += 1
        if self._end[0] != self.start:
            self._end = self.start, self.start + self.period.at(self.start)
        # "<" and not "!=": a resumed run may have been given a shorter period in the middle of a round.
        if self.attempts < self._end[1]:
            return False
        self.rounds += 1
        self.start = self.attempts
        return True

    def parts_due(self, fragments: int) -> list[int]:
        """The parts of a model whose turn is after the step that was last counted; never more than one."""
        offsets = fragment_offsets(self.period.at(self.start), fragments)
        return [part for part, offset in enumerate(offsets) if offset == self.attempts - self.start]

    def launched(self, part: int) -> None:
        """The mean of a part has been started."""
        if self.delay is not None:
            self.due[part] = self.attempts + min(self.delay, self.period.at(self.start))

    def take_merges(self) -> list[int]:
        """The parts whose mean is to be merged after the step that was last counted."""
        merges = [part for part, attempt in self.due.items() if attempt <= self.attempts]
        for part in merges:
            del self.due[part]
        return merges

    def restart(self) -> None:
        """Start a round here, whatever is left of the one under way. Nothing travels any more."""
        self.start = self.attempts
        self.due = {}
        self.launched(0)  # the mean that all workers hold is known, and is merged like any other: without effect
