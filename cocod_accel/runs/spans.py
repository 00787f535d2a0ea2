"""Who computed, communicated and waited when: a run's spans, and what they add up to.

A compute span is a whole step as its worker saw it, so waits lie inside compute spans: what is left of a step without
them is computing.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from cocod_accel.runs.files import rows_of
from cocod_accel.runs.reading import is_number

COMPUTE, COMMUNICATE, WAIT, STRETCH, CHECKPOINT = "compute", "communicate", "wait", "stretch", "checkpoint"
NAMES = (COMPUTE, COMMUNICATE, WAIT, STRETCH, CHECKPOINT)
#: What the names mean to a reader.
MEANINGS = {
    COMPUTE: "computing",
    COMMUNICATE: "communicating",
    WAIT: "waiting for communication",
    STRETCH: "emulated slowdown",
    CHECKPOINT: "saving a checkpoint",
}


Interval = tuple[float, float]

#: No run has more workers or steps, or lasts longer, than this.
_MOST_RANKS, _MOST_STEPS, _LATEST = 1e6, 1e12, 1e9


class Span(NamedTuple):
    rank: int
    step: int
    name: str
    #: Seconds since the worker began.
    start: float
    end: float


@dataclass(frozen=True)
class Shares:
    """Where one worker's seconds went."""

    rank: int
    compute_seconds: float
    wait_seconds: float
    communicate_seconds: float
    hidden_seconds: float


def read_spans(folder: Path) -> list[Span]:
    """All workers' spans in the order of their beginning; none if the run kept none."""
    return first_spans(folder, sys.maxsize)[0]


def first_spans(folder: Path, most: int) -> tuple[list[Span], bool]:
    """About the first ``most`` spans of all workers together, up to one time for all of them, and whether there are more."""
    spans: list[Span] = []
    files = sorted((folder / "spans").glob("rank_*.jsonl"))
    until = math.inf
    for file in files:
        own: list[Span] = []
        for row in rows_of(file):
            if row is None or not _is_span(row):
                continue
            if len(own) >= max(most // len(files), 1):
                until = min(until, own[-1].end)
                break
            where, when = (int(row["rank"]), int(row["step"])), (float(row["start"]), float(row["end"]))
            own.append(Span(*where, sys.intern(row["name"]), *when))
        spans += own
    spans.sort(key=lambda span: (span.start, span.rank))
    return [span for span in spans if span.end <= until], until < math.inf


def _is_span(row: Mapping[str, Any]) -> bool:
    """Whether a row is what a worker may have written."""
    if row.get("name") not in NAMES or not all(is_number(row.get(key)) for key in ("rank", "step", "start", "end")):
        return False
    rank, step, start, end = (float(row[key]) for key in ("rank", "step", "start", "end"))
    return 0 <= rank < _MOST_RANKS and 0 <= step < _MOST_STEPS and 0 <= start <= end < _LATEST


def shares(spans: Sequence[Span]) -> list[Shares]:
    """Every worker's seconds of computing, waiting and communicating; hidden: communicating while not waiting."""
    result = []
    by_rank: dict[int, dict[str, list[Interval]]] = {}
    for span in spans:
        by_rank.setdefault(span.rank, {name: [] for name in NAMES})[span.name].append((span.start, span.end))
    for rank, found in sorted(by_rank.items()):
        by_name = {name: merged(intervals) for name, intervals in found.items()}
        waits, sent = by_name[WAIT], by_name[COMMUNICATE]
        result.append(
            Shares(
                rank,
                compute_seconds=length(by_name[COMPUTE]) - overlap(by_name[COMPUTE], waits),
                wait_seconds=length(waits),
                communicate_seconds=length(sent),
                hidden_seconds=length(sent) - overlap(sent, waits),
            )
        )
    return result


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def length(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """How long both of two merged lists hold."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


def step_seconds(spans: Sequence[Span]) -> float:
    """The median step of worker 0."""
    steps = sorted(span.end - span.start for span in spans if span.name == COMPUTE and span.rank == 0)
    return steps[len(steps) // 2] if steps else 0.0


def window(spans: Sequence[Span], seconds: float) -> float:
    """Where to begin a window that shows training: around the middle of a run, with the fewest breaks between steps."""
    steps = [(span.start, span.end) for span in spans if span.name == COMPUTE and span.rank == 0]
    if not steps:
        return spans[0].start if spans else 0.0
    starts = [start for start, _ in steps]
    last = max(end for _, end in steps)
    candidates = [start for start in starts if 0.3 * last <= start <= max(0.7 * last - seconds, 0.3 * last)] or starts[:1]

    def idle(begin: float) -> float:
        inside = steps[bisect_left(starts, begin) : bisect_left(starts, begin + seconds)]
        breaks = sum(max(0.0, later[0] - earlier[1]) for earlier, later in pairwise(inside))
        return breaks + max(0.0, begin + seconds - inside[-1][1])

    return min(candidates, key=lambda begin: (round(idle(begin), 3), abs(begin + seconds / 2 - last / 2)))


def sublanes(spans: Sequence[Span]) -> list[int]:
    """A lane for each span so that spans of one lane do not overlap: several transfers may be under way at once."""
    ends: list[float] = []
    lanes = []
    for span in spans:
        lane = next((i for i, end in enumerate(ends) if end <= span.start), len(ends))
        if lane == len(ends):
            ends.append(span.end)
        else:
            ends[lane] = span.end
        lanes.append(lane)
    return lanes
