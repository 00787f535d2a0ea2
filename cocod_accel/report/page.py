"""``report.html``: the comparison as one file that works from a disk, without a network.

Tables are written here, the figures are drawn by the scripts in ``assets/`` from JSON in the page. Everything that comes
from a run (names above all) is escaped, and a content policy lets no script run but the page's own and nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from cocod_accel.report.curves import Scaling, epochs_of_steps, interpolated, mean_points, points, sent_until
from cocod_accel.report.groups import Comparison, Group, differing_keys
from cocod_accel.report.look import DASHES, PALETTE, SPAN_COLOURS, styles
from cocod_accel.report.runs import Run, is_number, time_to_target
from cocod_accel.report.spans import COMMUNICATE, COMPUTE, MEANINGS, NAMES, Span, shares, step_seconds, window
from cocod_accel.report.tables import columns, percent, verdicts

_SCRIPTS = ("view.js", "chart.js", "timeline.js", "page.js")
#: So many spans of a run are put into the page; of a longer one, those around its middle.
MOST_SPANS = 12_000
#: A timeline opens with so many steps in view.
_STEPS_SHOWN = 30


def render(comparison: Comparison, scaling: Scaling | None, spans: Mapping[str, Sequence[Span]]) -> str:
    """The whole page."""
    timelines = [timeline(label, rows) for label, rows in spans.items() if rows]
    style, script = _asset("page.css"), "\n".join(map(_asset, _SCRIPTS))
    algorithms = list(dict.fromkeys(group.first.algorithm for group in comparison.groups))
    values = {
        "title": escape(f"Comparison of {', '.join(algorithms)}"),
        "style": style,
        "style_hash": _hash(style),
        "script": script,
        "script_hash": _hash(script),
        "data": embedded(page_data(comparison, scaling, timelines)),
        "answer": _answer(comparison),
        "results": _results(comparison),
        "runs": _runs(comparison),
        "accuracy_values": _values(comparison, "accuracy", "Test accuracy", lambda v: f"{100 * v:.2f}%"),
        "loss_values": _values(comparison, "train_loss", "Training loss", lambda v: f"{v:.4f}"),
        "scaling": _scaling(scaling),
        "timeline": _timelines(timelines),
        "differences": _differences(comparison),
    }
    # One pass: what is put in is never looked at again, whatever a run is called.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (files("cocod_accel.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def embedded(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    """JSON has no nan; six digits are more than a pixel shows."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping) and not isinstance(value, _Exact):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


# --------------------------------------------------------------------------------------------------- data


def page_data(comparison: Comparison, scaling: Scaling | None, timelines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the scripts draw."""
    look = styles(comparison.groups)
    return {
        "target": comparison.target,
        "groups": [
            {
                "label": group.label,
                "clock": group.first.clock,
                "colour": look[group.label].colour,
                "dash": look[group.label].dash,
                "runs": [{"name": run.name, **_curves(run)} for run in group.runs],
            }
            for group in comparison.groups
        ],
        "scaling": None if scaling is None else _scaling_data(scaling),
        "timelines": timelines,
        "meanings": MEANINGS,
        "span_colours": SPAN_COLOURS,
    }


def _curves(run: Run) -> dict[str, list[list[float]]]:
    """Points of (epoch, seconds, megabytes, value)."""
    evaluated = points(run)
    epochs, sent = epochs_of_steps(run), sent_until(run)
    steps = [
        [interpolated(row["step"], epochs), row["train_seconds"], interpolated(row["step"], sent) / 1e6, row["loss"]]
        for row in run.training
        if all(is_number(row.get(key)) for key in ("step", "train_seconds", "loss"))
    ]
    return {
        "accuracy": [[p.epoch, p.seconds, p.num_bytes / 1e6, p.accuracy] for p in evaluated],
        "loss": [[p.epoch, p.seconds, p.num_bytes / 1e6, p.train_loss] for p in evaluated],
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

    counts = sorted({workers for found in scaling.series.values() for workers, _ in found})
    linear = [(count, count / scaling.num_reference_workers) for count in counts]
    measured = [
        series(name, PALETTE[index % len(PALETTE)], DASHES[index % len(DASHES)], found)
        for index, (name, found) in enumerate(scaling.series.items())
    ]
    return [series("linear", "#7f7f7f", (2, 3), linear), *measured]


def timeline(label: str, rows: Sequence[Span]) -> dict[str, Any]:
    """A run's spans as flat lists (start, length, step, ...) per worker and name, and what they add up to."""
    kept, is_cut = middle(rows, MOST_SPANS)
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
    """Microseconds within a run of hours: not to be shortened to six digits."""


def middle(rows: Sequence[Span], most: int) -> tuple[list[Span], bool]:
    """At most so many spans, around the middle of a run."""
    if len(rows) <= most:
        return list(rows), False
    begin = (len(rows) - most) // 2
    return list(rows[begin : begin + most]), True


# --------------------------------------------------------------------------------------------------- HTML


def _answer(comparison: Comparison) -> str:
    said = [f'<p class="answer">{escape(line)}.</p>' for line in verdicts(comparison)]
    return "\n".join(said + [f'<p class="quiet">{escape(line)}.</p>' for line in comparison.notes])


def _table(caption: str, header: Sequence[tuple[str, str]], rows: Sequence[Sequence[tuple[str, Any]]], sortable: bool) -> str:
    """A table of (text, value) cells; header: (text, meaning). Text is HTML already, values are what is sorted by."""

    def head(text: str, meaning: str) -> str:
        inner = f'<button type="button" title="{escape(meaning)}">{escape(text)}</button>' if sortable else f"<span>{escape(text)}</span>"
        return f'<th scope="col">{inner}</th>'

    def cell(index: int, text: str, value: Any) -> str:
        known = value is not None and value == value
        data = f' data-value="{escape(str(value))}"' if known else ""
        return f'<th scope="row"{data}>{text}</th>' if index == 0 else f"<td{data}>{text}</td>"

    body = "\n".join(f"<tr>{''.join(cell(i, *pair) for i, pair in enumerate(row))}</tr>" for row in rows)
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{escape(caption)}"><table{" class=sortable" if sortable else ""}>'
        f'<caption class="hidden">{escape(caption)}</caption><thead><tr>{"".join(head(*pair) for pair in header)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _badge(clock: str) -> str:
    return "" if clock == "real" else f' <span class="badge">{escape(clock)}</span>'


def _results(comparison: Comparison) -> str:
    shown = columns(comparison)
    rows = []
    for group in comparison.groups:
        cells = [(escape(column.text(group)), column.value(group)) for column in shown]
        label = group.label.replace(f" [{group.first.clock}]", "")
        cells[0] = (escape(label) + _badge(group.first.clock), group.label)
        rows.append(cells)
    return _table("Results", [(column.header, column.meaning) for column in shown], rows, sortable=True)


def _runs(comparison: Comparison) -> str:
    goal = "target" if comparison.target is None else percent(comparison.target)
    header = [("name", "the run"), ("of", "the row above it belongs to"), ("seed", "its seed"), ("best %", "best test accuracy")]
    header += [("final %", "test accuracy at the end"), ("training s", "of the slowest worker")]
    header += [(f"s to {goal}", "first evaluation at or above it"), ("MB sent", "by one worker")]
    header += [("exposed s", "blocked by communication"), ("hidden s", "communication under computation")]
    rows = []
    for group, run in ((group, run) for group in comparison.groups for run in group.runs):
        found = run.measures()
        seconds = None if comparison.target is None else time_to_target(run, comparison.target)
        rows.append(
            [
                (escape(run.name) + _badge(run.clock), run.name),
                (escape(group.label), group.label),
                (escape(run.seed), run.seed),
                _number(found["best_accuracy"], 100, 2),
                _number(found["final_accuracy"], 100, 2),
                _number(found["train_seconds"], 1, 1),
                ("never", None) if seconds is None else _number(seconds, 1, 1),
                _number(found["comm_bytes"], 1e-6, 1),
                _number(found["comm_exposed_seconds"], 1, 2),
                _number(found["comm_hidden_seconds"], 1, 2),
            ]
        )
    table = _table("Every run", header, rows, sortable=True)
    return f'<details id="every"><summary>Every run by itself</summary>{table}</details>'


def _number(value: float, factor: float, digits: int) -> tuple[str, float]:
    return ("-" if math.isnan(value) else f"{value * factor:.{digits}f}", value)


def _values(comparison: Comparison, key: str, title: str, show: Callable[[float], str]) -> str:
    """The figure once more as a table, for those who cannot see it; at most twenty evaluations."""
    curves = {group.label: mean_points(group) for group in comparison.groups}
    epochs = sorted({point.epoch for curve in curves.values() for point in curve if not math.isnan(point.epoch)})
    epochs = epochs[:: max(1, math.ceil(len(epochs) / 20))]
    rows = []
    for label, curve in curves.items():
        at = {point.epoch: point for point in curve}
        cells = [
            (f"{show(getattr(at[e], key))} <span class=quiet>{at[e].seconds:.1f} s</span>" if e in at else "-", None) for e in epochs
        ]
        rows.append([(escape(label), None), *cells])
    header = [("after epoch", ""), *((f"{epoch:g}", "") for epoch in epochs)]
    caption = f"{title} and training time, mean over seeds"
    return f"<details><summary>{escape(caption)}, as a table</summary>{_table(caption, header, rows, sortable=False)}</details>"


def _scaling(scaling: Scaling | None) -> str:
    if scaling is None:
        return '<p class="quiet">All runs have the same number of workers, so there is no speedup over workers to draw.</p>'
    counts = sorted({workers for found in scaling.series.values() for workers, _ in found})
    rows = [
        [(escape(name), None), *((f"{dict(found)[n]:.2f}" if n in dict(found) else "-", None) for n in counts)]
        for name, found in scaling.series.items()
    ]
    table = _table("Time speedup", [("workers", ""), *((str(n), "") for n in counts)], rows, sortable=False)
    return (
        f'<figure id="scaling" class="plot"><figcaption><h3>Time speedup over the number of workers</h3>'
        f'<span class="quiet">{escape(scaling.reference)} = 1, by seconds an epoch</span></figcaption></figure>'
        f'<div class="legend"><ul id="scaling_legend"></ul></div>'
        f"<details><summary>Time speedup, as a table</summary>{table}</details>"
    )


def _timelines(timelines: Sequence[Mapping[str, Any]]) -> str:
    if not timelines:
        return '<p class="quiet">These runs have no spans (logging.spans=false, or read from wandb), so there is no timeline.</p>'
    options = "".join(f'<option value="{i}">{escape(t["label"])}</option>' for i, t in enumerate(timelines))
    keys = "".join(
        f'<svg width="16" height="12" aria-hidden="true"><rect width="16" height="12" fill="{SPAN_COLOURS[name]}"/></svg> '
        f"{escape(MEANINGS[name])} &nbsp; "
        for name in NAMES
        if any(name in worker["spans"] for t in timelines for worker in t["workers"])
    )
    header = [("run", ""), ("worker", ""), ("computing s", "a step without its waits"), ("waiting s", "blocked by communication")]
    header += [("communicating s", ""), ("of it hidden s", "while not waiting")]
    rows = [
        [
            (escape(t["label"]), t["label"]),
            (str(share["rank"]), share["rank"]),
            *(_number(share[f"{key}_seconds"], 1, 2) for key in (COMPUTE, "wait", COMMUNICATE, "hidden")),
        ]
        for t in timelines
        for share in t["shares"]
    ]
    cuts = [
        f"<p class=quiet>{escape(t['label'])}: seconds {t['cut'][0]:.1f} to {t['cut'][1]:.1f} of {t['cut'][2]:.1f}; "
        "the whole: cocod trace.</p>"
        for t in timelines
        if t["cut"]
    ]
    return (
        f'<p class="quiet">What each worker did, from the spans of the first run of each row; a lane for computing and waiting, one for '
        f'communication below it. {keys}</p>{"".join(cuts)}<figure id="timeline" class="plot"><div class="bar">'
        f'<label>run <select data-role="run">{options}</select></label></div></figure>'
        f"{_table('Seconds of each worker', header, rows, sortable=True)}"
    )


def _differences(comparison: Comparison) -> str:
    groups: Sequence[Group] = comparison.groups
    keys = sorted(differing_keys([group.config for group in groups]))
    if not keys:
        return "<p>All runs have the same configuration, seeds aside.</p>"
    rows = [[(escape(key), key), *((escape(group.config.get(key, "-")), None) for group in groups)] for key in keys]
    table = _table("Keys in which the configurations differ", [("key", ""), *((group.label, "") for group in groups)], rows, False)
    return f'<p class="quiet">Keys in which the configurations differ; all others are equal, seeds aside.</p>{table}'
