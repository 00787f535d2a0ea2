"""``report.html``: the comparison as one self-contained file that works offline.

Tables are rendered here; figures are drawn by the scripts in ``assets/`` from JSON in the page. Everything that comes
from a run, such as its name, is escaped, and a content security policy allows only the page's own scripts and no
loading.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from cocod_accel.config.settings import ACCURACY
from cocod_accel.report.curves import Scaling, coarsest, epochs_of_steps, interpolated, points, sampled, sent_until
from cocod_accel.report.groups import Comparison, Group, cut
from cocod_accel.report.look import SPAN_COLOURS, styles, styles_of
from cocod_accel.report.markup import (
    answer,
    differences_table,
    results_table,
    runs_table,
    scaling_section,
    time_alone_note,
    timeline_section,
    values_table,
)
from cocod_accel.runs.reading import Run, is_number
from cocod_accel.runs.spans import MEANINGS, NAMES, Span, shares, step_seconds, window

_SCRIPTS = ("view.js", "chart.js", "timeline.js", "page.js")
#: Maximum spans of a run in the page; of a longer run, those around its middle. With many runs, each has its share.
MOST_SPANS = 12_000
_MOST_SPANS_OF_ALL = 100_000
#: Maximum points of all curves together, and of one; no screen shows more.
_MOST_POINTS = 150_000
_MOST_POINTS_OF_ONE = 5_000
#: Steps in view when a timeline opens.
_STEPS_SHOWN = 30


def render(comparison: Comparison, scaling: Scaling | None, spans: Mapping[str, Sequence[Span]]) -> str:
    """The whole page."""
    most = min(MOST_SPANS, _MOST_SPANS_OF_ALL // max(len(spans), 1))
    timelines = [timeline(label, rows, most) for label, rows in spans.items() if rows]
    metric = comparison.title[0].upper() + comparison.title[1:]
    style, script = _asset("page.css"), "\n".join(map(_asset, _SCRIPTS))
    algorithms = list(dict.fromkeys(group.first.algorithm for group in comparison.groups))
    values = {
        "title": escape(cut(f"Comparison of {', '.join(algorithms)}", 200)),
        "style": style,
        "style_hash": _hash(style),
        "script": script,
        "script_hash": _hash(script),
        "data": embedded(page_data(comparison, scaling, timelines)),
        "answer": answer(comparison),
        "learnt": "" if comparison.has_learnt else " hidden",
        "time_alone": "" if comparison.has_learnt else time_alone_note(),
        "results": results_table(comparison),
        "runs": runs_table(comparison),
        "metric": escape(metric),
        "accuracy_values": values_table(comparison, "accuracy", metric, comparison.shown),
        "loss_values": values_table(comparison, "train_loss", "Training loss", lambda v: f"{v:.4f}"),
        "scaling": scaling_section(scaling),
        "timeline": timeline_section(timelines),
        "differences": differences_table(comparison),
    }
    # One pass: inserted text is never substituted again, whatever a run is called.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (files("cocod_accel.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def embedded(data: Any) -> str:
    """JSON that cannot close the script element that contains it."""
    text = json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    """JSON has no nan, and six digits are finer than a pixel."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping) and not isinstance(value, _Exact):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


# --------------------------------------------------------------------------------------------------- data


def page_data(comparison: Comparison, scaling: Scaling | None, timelines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The data that the scripts draw."""
    look = styles(comparison.groups)
    num_curves = 3 * sum(len(group.runs) for group in comparison.groups)
    most = max(min(_MOST_POINTS // num_curves, _MOST_POINTS_OF_ONE), 2)
    return {
        "target": comparison.target,
        "metric": comparison.title,
        "is_share": comparison.metric == ACCURACY,
        "by_steps": comparison.by_steps,
        "groups": [
            {
                "label": group.label,
                "clock": group.first.clock,
                "colour": look[group.label].colour,
                "dash": look[group.label].dash,
                "runs": [{"name": run.name, **curves} for run, curves in zip(group.runs, found, strict=True)],
            }
            for group, found in ((group, _curves(group, most, comparison.by_steps)) for group in comparison.groups)
        ],
        "scaling": None if scaling is None else _scaling_data(scaling),
        "timelines": timelines,
        "meanings": MEANINGS,
        "span_colours": SPAN_COLOURS,
    }


def _curves(group: Group, most: int, by_steps: bool) -> list[dict[str, list[list[float]]]]:
    """For each run, about ``most`` points of (epoch or step, seconds, megabytes, value) of every curve."""
    every = {kind: coarsest(group.runs, kind) for kind in ("eval", "train")}
    found = [_curves_of(run, every, by_steps) for run in group.runs]
    for name in found[0]:
        step = -(-max(len(curves[name]) for curves in found) // most)  # the same for all: their mean is drawn, too
        if step > 1:
            for curves in found:
                curves[name] = [*curves[name][:-1:step], *curves[name][-1:]]
    return found


def _curves_of(run: Run, every: Mapping[str, int], by_steps: bool) -> dict[str, list[list[float]]]:
    evaluated = points(run, every["eval"])
    epochs, sent = epochs_of_steps(run), sent_until(run)
    steps = [
        [
            row["step"] if by_steps else interpolated(row["step"], epochs),
            row["train_seconds"],
            interpolated(row["step"], sent) / 1e6,
            row["loss"],
        ]
        for row in sampled(run.training, run, "train", every["train"])
        if all(is_number(row.get(key)) for key in ("step", "train_seconds", "loss"))
    ]
    return {
        "accuracy": [[p.at(by_steps), p.seconds, p.num_bytes / 1e6, p.accuracy] for p in evaluated],
        "loss": [[p.at(by_steps), p.seconds, p.num_bytes / 1e6, p.train_loss] for p in evaluated],
        "step_loss": steps,
    }


def _scaling_data(scaling: Scaling) -> list[dict[str, Any]]:
    def series(label: str, colour: str, dash: Sequence[int], found: Sequence[tuple[int, float]]) -> dict[str, Any]:
        line = [[workers, workers, workers, speedup] for workers, speedup in found]
        return {
            "label": label,
            "clock": "real",
            "colour": colour,
            "dash": dash,
            "runs": [{"name": label, "shown": True, "speedup": line}],
        }

    look = styles_of(list(scaling.series))
    measured = [series(name, look[name].colour, look[name].dash, found) for name, found in scaling.series.items()]
    return [series("linear", "#7f7f7f", (2, 3), scaling.linear), *measured]


def timeline(label: str, rows: Sequence[Span], most: int = MOST_SPANS) -> dict[str, Any]:
    """A run's spans as flat lists (start, length, step, ...) per worker and name, and their totals."""
    kept, is_cut = middle(rows, most)
    seconds = _STEPS_SHOWN * step_seconds(kept) or 1.0
    first, last = min(span.start for span in kept), max(span.end for span in kept)
    low = min(max(window(kept, seconds), first), last)
    workers = []
    for rank in sorted({span.rank for span in kept}):
        lists: dict[str, list[float]] = {}
        for name in sorted({span.name for span in kept if span.rank == rank}, key=NAMES.index):
            own = [span for span in kept if span.rank == rank and span.name == name]
            lists[name] = [n for s in own for n in (round(s.start, 6), round(s.end - s.start, 6), s.step)]
        workers.append({"rank": rank, "spans": _Exact(lists)})
    return {
        "label": label,
        "workers": workers,
        "shares": [vars(share) for share in shares(rows)],
        "first": first,
        "last": last,
        "low": low,
        "high": min(low + seconds, last),
        "cut": [first, last, max(span.end for span in rows)] if is_cut else None,
    }


class _Exact(dict[str, list[float]]):
    """Microseconds in a run of hours, so not rounded to six digits."""


def middle(rows: Sequence[Span], most: int) -> tuple[list[Span], bool]:
    """At most ``most`` spans, around the middle of a run, and whether any were cut."""
    if len(rows) <= most:
        return list(rows), False
    begin = (len(rows) - most) // 2
    return list(rows[begin : begin + most]), True
