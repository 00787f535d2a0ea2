"""How many more steps than S-SGD a way of averaging needs: ``learned.json``, from ``cocod reproduce --only learning``.

Workers that average seldom and merge late walk apart. What that costs grows with period + delay, which is called span
here, and with the number of workers; it shrinks in longer runs. With T the steps of a run, points of accuracy lost are::

    loss(span, code, N, T) = (lost by span + lost by code) * share of N * share of T

each measured by itself and interpolated; outside of what was measured the last figure holds, and beyond the longest span
its line goes on, up to what S-SGD has to lose. S-SGD gains ``gain`` points with every doubling of its steps. So what it
reaches in T steps is reached after 2 ** x times as many, where gain * x = loss(..., T * 2 ** x).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Learned:
    """One grid's result. Losses are points of accuracy behind S-SGD, of ``workers`` workers after ``steps[0]`` steps."""

    workers: int
    #: Of the shorter runs, and of the longer ones.
    steps: tuple[int, int]
    #: Points that S-SGD gains with every doubling of its steps, from the shorter to the longer runs.
    gain: float
    #: (period + delay, loss) in float32.
    spans: Points
    #: What a code loses in addition, in rounds of one step.
    codes: dict[str, float]
    #: The loss of Pipe-SGD.
    pipe: float
    #: The share of a loss that is left in the longer runs.
    left: float
    #: (workers, share of a loss).
    shares: Points
    #: The largest loss that there can be: S-SGD's accuracy less that of guessing.
    most: float

    @classmethod
    def of(cls, tree: dict[str, Any]) -> Learned:
        """From JSON, which knows no tuples."""
        pairs = {key: tuple((float(x), float(y)) for x, y in tree[key]) for key in ("spans", "shares")}
        return cls(**{**tree, **pairs, "steps": tuple(tree["steps"])})

    def loss(self, algorithm: str, span: int, payload: str, num_workers: int, num_steps: float) -> float:
        """Points behind S-SGD after equally many steps."""
        return self._full(algorithm, span, payload, num_workers) * self._left(num_steps)

    def steps_needed(self, algorithm: str, span: int, payload: str, num_workers: int, num_steps: int) -> float:
        """Steps to what S-SGD reaches in ``num_steps``, over ``num_steps``."""
        full = self._full(algorithm, span, payload, num_workers)
        start, low, high = (math.log2(steps) for steps in (max(1, num_steps), *self.steps))
        shrinking = (1 - self.left) / (high - low)  # per doubling, between the shorter and the longer runs
        # One of these is where its piece of the loss is; the loss never grows with the steps.
        doublings = full / self.gain
        if start + doublings > low:
            doublings = full * (1 - shrinking * (start - low)) / (self.gain + full * shrinking)
        if start + doublings > high:
            doublings = full * self.left / self.gain
        return float(2**doublings)

    def _full(self, algorithm: str, span: int, payload: str, num_workers: int) -> float:
        if algorithm == "ssgd":
            return 0.0
        lost = self.pipe if algorithm == "pipe" else _line(self.spans, span, goes_on=True)
        code = 0.0 if payload == "fp32" else self.codes.get(payload, max(self.codes.values()))
        return min(max(0.0, lost + code) * _line(self.shares, num_workers), self.most)

    def _left(self, num_steps: float) -> float:
        short, long = self.steps
        return _line(((math.log(short), 1.0), (math.log(long), self.left)), math.log(max(1, num_steps)))


def span_of(algorithm: str, period: int, delay: int | None) -> int:
    """Steps from a launch to the merge of the next one: how long workers may walk apart."""
    return period + (0 if algorithm != "cocod" else period if delay is None else delay)


def _line(points: Sequence[tuple[float, float]], x: float, *, goes_on: bool = False) -> float:
    """Straight between points, constant outside; ``goes_on``: to the right along the line of the first and the last one."""
    if x <= points[0][0]:
        return points[0][1]
    for (a, low), (b, high) in pairwise(points):
        if x <= b:
            return low + (high - low) * (x - a) / (b - a)
    (a, low), (b, high) = points[0], points[-1]
    return high + (high - low) / (b - a) * (x - b) if goes_on else high


@cache
def learned() -> Learned:
    """What this package was measured with."""
    return Learned.of(json.loads((files(__package__) / "learned.json").read_text()))
