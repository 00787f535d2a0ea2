"""Spans as a trace for chrome://tracing and ui.perfetto.dev: one process per run, two or more threads per worker."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cocod_accel.runs.spans import COMMUNICATE, MEANINGS, Span, sublanes

#: Thread ids per worker: computing first, then a lane for each concurrent transfer.
_LANES = 100


def trace(spans: Mapping[str, Sequence[Span]]) -> dict[str, Any]:
    """Complete events, in microseconds. Overlapping transfers get separate lanes: events of a thread must nest."""
    events: list[dict[str, Any]] = []
    for pid, (name, rows) in enumerate(spans.items(), start=1):
        events.append(_named("process_name", pid, 0, name))
        for rank in sorted({span.rank for span in rows}):
            own = [span for span in rows if span.rank == rank]
            sent = [span for span in own if span.name == COMMUNICATE]
            lanes = [(span, 0) for span in own if span.name != COMMUNICATE]
            lanes += [(span, 1 + lane) for span, lane in zip(sent, sublanes(sent), strict=True)]
            for lane in sorted({lane for _, lane in lanes}):
                what = "computing" if lane == 0 else "communication" + (f" {lane}" if lane > 1 else "")
                events.append(_named("thread_name", pid, rank * _LANES + lane, f"worker {rank} {what}"))
                events.append(
                    {
                        "ph": "M",
                        "name": "thread_sort_index",
                        "pid": pid,
                        "tid": rank * _LANES + lane,
                        "args": {"sort_index": rank * _LANES + lane},
                    }
                )
            events += [
                {
                    "ph": "X",
                    "name": MEANINGS[span.name],
                    "cat": span.name,
                    "pid": pid,
                    "tid": rank * _LANES + lane,
                    "ts": round(1e6 * span.start, 3),
                    "dur": round(1e6 * (span.end - span.start), 3),
                    "args": {"step": span.step},
                }
                for span, lane in lanes
            ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def write_trace(spans: Mapping[str, Sequence[Span]], path: Path) -> int:
    """Write the file; returns the number of spans in it."""
    empty = [name for name, rows in spans.items() if not rows]
    if empty:
        raise ValueError(f"{empty[0]}: has no spans; logging.spans=true records them, at the end of each epoch")
    try:
        path.write_text(json.dumps(trace(spans)))
    except OSError as error:
        raise ValueError(f"--out={path}: cannot be written ({error.strerror})") from error
    return sum(len(rows) for rows in spans.values())
