"""The page's tables and sections as HTML. Everything that comes from a run is escaped here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from cocod_accel.config.settings import ACCURACY
from cocod_accel.report.curves import Scaling, mean_points
from cocod_accel.report.groups import Comparison, cut, differing_keys
from cocod_accel.report.look import SPAN_COLOURS
from cocod_accel.report.tables import columns, verdicts
from cocod_accel.runs.reading import time_to_target
from cocod_accel.runs.spans import COMMUNICATE, COMPUTE, MEANINGS, NAMES, WAIT

#: The HTML to show and the value to sort by (None: not sortable).
Cell = tuple[str, float | int | str | None]
#: Text and tooltip.
Heading = tuple[str, str]
#: Longer tables are folded.
_LONG_TABLE = 24
#: A setting may be a list of thousands.
_LONGEST_CELL = 200
_MOST_KEYS = 100


def table(caption: str, header: Sequence[Heading], rows: Sequence[Sequence[Cell]], sortable: bool) -> str:
    """A table that scrolls if it is too wide; its first column names the rows."""
    head = "".join(f'<th scope="col">{_heading(*pair, sortable)}</th>' for pair in header)
    body = "\n".join(f"<tr>{''.join(_cell(i, *pair) for i, pair in enumerate(row))}</tr>" for row in rows)
    kind = ' class="sortable"' if sortable else ""
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{escape(caption)}"><table{kind}>'
        f'<caption class="hidden">{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _heading(text: str, meaning: str, sortable: bool) -> str:
    if not sortable:
        return f"<span>{escape(text)}</span>"
    return f'<button type="button" title="{escape(meaning)}">{escape(text)}</button>'


def _cell(index: int, text: str, value: float | int | str | None) -> str:
    data = "" if value is None or value != value else f' data-value="{escape(str(value))}"'
    return f'<th scope="row"{data}>{text}</th>' if index == 0 else f"<td{data}>{text}</td>"


def _badge(clock: str) -> str:
    return "" if clock == "real" else f' <span class="badge">{escape(clock)}</span>'


def _number(value: float, factor: float, digits: int) -> Cell:
    return ("-" if math.isnan(value) else f"{value * factor:.{digits}f}", value)


def _folded(title: str, content: str, name: str = "") -> str:
    return f"<details{name and f' id={name}'}><summary>{escape(title)}</summary>{content}</details>"


def answer(comparison: Comparison) -> str:
    said = [f'<p class="answer">{escape(line)}.</p>' for line in verdicts(comparison)]
    return "\n".join(said + [f'<p class="quiet">{escape(line)}.</p>' for line in comparison.notes])


def results_table(comparison: Comparison) -> str:
    shown = columns(comparison)
    rows = []
    for group in comparison.groups:
        cells: list[Cell] = [(escape(column.text(group)), column.value(group)) for column in shown]
        label = group.label.replace(f" [{group.first.clock}]", "")
        cells[0] = (escape(label) + _badge(group.first.clock), group.label)
        rows.append(cells)
    return table("Results", [(column.header, column.meaning) for column in shown], rows, sortable=True)


def runs_table(comparison: Comparison) -> str:
    """The figures of each run."""
    goal = "target" if comparison.target is None else comparison.goal
    is_share, name = comparison.metric == ACCURACY, comparison.title
    side = "below" if comparison.groups[0].first.is_lower_better else "above"
    header = [
        ("name", "the run"),
        ("of", "the row in the table above"),
        ("seed", "its seed"),
        (f"s to {goal}", f"first evaluation at or {side} it"),
        ("best %" if is_share else f"best {name}", f"best {name}"),
        ("final %" if is_share else f"final {name}", f"{name} at the end"),
        ("training s", "of the slowest worker"),
        ("MB sent", "by one worker"),
        ("exposed s", "blocked by communication"),
        ("hidden s", "communication under computation"),
    ]
    rows: list[list[Cell]] = []
    for group in comparison.groups:
        for run in group.runs:
            found = run.measures()
            seconds = None if comparison.target is None else time_to_target(run, comparison.target)
            rows.append(
                [
                    (escape(run.name) + _badge(run.clock), run.name),
                    (escape(group.label), group.label),
                    (escape(cut(run.seed, _LONGEST_CELL)), cut(run.seed, _LONGEST_CELL)),
                    ("never", None) if seconds is None else _number(seconds, 1, 1),
                    *(
                        _number(found[f"{which}_accuracy"], *((100, 2) if is_share else (1, 4)))
                        for which in ("best", "final")
                    ),
                    _number(found["train_seconds"], 1, 1),
                    _number(found["comm_bytes"], 1e-6, 1),
                    _number(found["comm_exposed_seconds"], 1, 2),
                    _number(found["comm_hidden_seconds"], 1, 2),
                ]
            )
    return _folded("Individual runs", table("Every run", header, rows, sortable=True), "every")


def values_table(comparison: Comparison, key: str, title: str, show: Callable[[float], str]) -> str:
    """The data of a figure as a table, for those who cannot see it; at most twenty evaluations."""
    curves = {group.label: mean_points(group) for group in comparison.groups}
    by_steps = comparison.by_steps
    places = sorted({point.at(by_steps) for curve in curves.values() for point in curve})
    places = [place for place in places if not math.isnan(place)]
    places = places[:: max(1, math.ceil(len(places) / 20))]
    rows: list[list[Cell]] = []
    for label, curve in curves.items():
        said = (f"{show(getattr(point, key))} <span class=quiet>{point.seconds:.1f} s</span>" for point in curve)
        at = dict(zip((point.at(by_steps) for point in curve), said, strict=True))
        rows.append([(escape(label), None), *((at.get(place, "-"), None) for place in places)])
    header = [("after step" if by_steps else "after epoch", ""), *((f"{place:g}", "") for place in places)]
    caption = f"{title} and training time, mean over seeds"
    return _folded(f"{caption}, as a table", table(caption, header, rows, sortable=False))


def time_alone_note() -> str:
    return '<p class="quiet">These runs were simulated without learning, so there are no accuracy and loss curves.</p>'


def scaling_section(scaling: Scaling | None) -> str:
    if scaling is None:
        return '<p class="quiet">All runs have the same number of workers, so there is no speedup over workers to draw.</p>'
    counts = sorted({workers for found in scaling.series.values() for workers, _ in found})
    rows: list[list[Cell]] = []
    for name, found in scaling.series.items():
        at = {workers: f"{speedup:.2f}" for workers, speedup in found}
        rows.append([(escape(name), None), *((at.get(count, "-"), None) for count in counts)])
    header = [("workers", ""), *((str(count), "") for count in counts)]
    return (
        '<figure id="scaling" class="plot"><figcaption><h3>Time speedup over the number of workers</h3>'
        f'<span class="quiet">{escape(scaling.reference)} = 1, by seconds per epoch</span></figcaption></figure>'
        '<div class="legend"><ul id="scaling_legend"></ul></div>'
        + _folded("Time speedup, as a table", table("Time speedup", header, rows, sortable=False))
    )


def timeline_section(timelines: Sequence[Mapping[str, Any]]) -> str:
    if not timelines:
        return '<p class="quiet">These runs kept no spans, so there is no timeline.</p>'
    options = "".join(f'<option value="{i}">{escape(t["label"])}</option>' for i, t in enumerate(timelines))
    seen = [name for name in NAMES if any(name in worker["spans"] for t in timelines for worker in t["workers"])]
    cuts = [
        f'<p class="quiet">{escape(t["label"])}: seconds {t["cut"][0]:.1f} to {t["cut"][1]:.1f} of {t["cut"][2]:.1f}; '
        "cocod trace writes all of them.</p>"
        for t in timelines
        if t["cut"]
    ]
    header = [
        ("run", "the first run of the row above"),
        ("worker", "its rank"),
        ("computing s", "steps, waits excluded"),
        ("waiting s", "blocked by communication"),
        ("communicating s", "transfers in flight"),
        ("hidden s", "transfers in flight while not waiting"),
    ]
    rows: list[list[Cell]] = [
        [
            (escape(t["label"]), t["label"]),
            (str(share["rank"]), share["rank"]),
            *(_number(share[f"{key}_seconds"], 1, 2) for key in (COMPUTE, WAIT, COMMUNICATE, "hidden")),
        ]
        for t in timelines
        for share in t["shares"]
    ]
    found = table("Seconds of each worker", header, rows, sortable=True)
    return (
        '<p class="quiet">What each worker did, from the spans of the first run of each row: a lane for computing and '
        "waiting, and one for communication below it.</p>"
        f'<div class="legend"><ul>{"".join(map(_key, seen))}</ul></div>{"".join(cuts)}'
        '<figure id="timeline" class="plot"><div class="bar">'
        f'<label>run <select data-role="run">{options}</select></label></div></figure>'
        + (_folded("Seconds of each worker", found) if len(rows) > _LONG_TABLE else found)
    )


def _key(name: str) -> str:
    box = f'<rect width="16" height="12" fill="{SPAN_COLOURS[name]}"/>'
    return f'<li><svg width="16" height="12" aria-hidden="true">{box}</svg>{escape(MEANINGS[name])}</li>'


def differences_table(comparison: Comparison) -> str:
    configs = {group.label: group.config for group in comparison.groups}
    keys = sorted(differing_keys(configs.values()))
    if not keys:
        return "<p>All runs have the same configuration but for the seed.</p>"
    rows: list[list[Cell]] = [
        [
            (escape(cut(key, _LONGEST_CELL)), cut(key, _LONGEST_CELL)),
            *((escape(cut(config.get(key, "-"), _LONGEST_CELL)), None) for config in configs.values()),
        ]
        for key in keys[:_MOST_KEYS]
    ]
    header = [("key", ""), *((label, "") for label in configs)]
    more = f" The first {_MOST_KEYS} of {len(keys)}." if len(keys) > _MOST_KEYS else ""
    found = table("Keys in which the configurations differ", header, rows, sortable=False)
    return f'<p class="quiet">Keys in which the configurations differ; all others but the seed are equal.{more}</p>{found}'
