"""The paper's figures as PNG and SVG: loss over epochs, accuracy over time (or what else the runs measure), speedup over
workers, and the timeline.

The only importer of matplotlib, through its object interface: no global state, no display.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from cocod_accel.config.settings import ACCURACY
from cocod_accel.report.curves import Point, Scaling, mean_points, points
from cocod_accel.report.groups import Comparison, Group, cut
from cocod_accel.report.look import SPAN_COLOURS, Style, styles, styles_of
from cocod_accel.report.tables import percent
from cocod_accel.runs.spans import COMMUNICATE, MEANINGS, NAMES, STRETCH, WAIT, Span, step_seconds, window

#: Text stays text, and output is reproducible.
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "cocod",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}
#: What a timeline shows: steps of the slowest run, runs, and workers of all runs together (roughly).
_TIMELINE_STEPS = 12
#: Rows whose curves are drawn, and panels for them: no picture shows more.
_MOST_ROWS, _MOST_PANELS = 40, 12
_TIMELINE_RUNS = 8
_TIMELINE_LANES = 16


def draw_figures(comparison: Comparison, scaling: Scaling | None, spans: Mapping[str, Sequence[Span]]) -> dict[str, Figure]:
    """Every figure that these runs have data for, by file name."""
    with mpl.rc_context(_SETTINGS):
        figures: dict[str, Figure] = {}
        if comparison.has_learnt:
            figures[f"loss_over_{'steps' if comparison.by_steps else 'epochs'}"] = _loss(comparison)
            figures[f"{_file_name(comparison.metric)}_over_time"] = _metric(comparison)
        if scaling is not None:
            figures["speedup_over_workers"] = _speedup(scaling)
        if spans:
            figures["timeline"] = _timeline(spans)
    return figures


def draw_expected(expected: Scaling) -> dict[str, Figure]:
    """What ``cocod plan`` expects of every algorithm, by file name; both axes are log2."""
    with mpl.rc_context(_SETTINGS):
        figure = _speedup(expected, "Expected time speedup over the number of workers (simulated)")
        axes = figure.axes[0]
        counts = axes.get_xticks()
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        values = [speedup for found in expected.series.values() for _, speedup in found]
        axes.set_ylim(
            0.8 * min(values), 1.25 * max(*values, *(ideal for _, ideal in expected.linear))
        )  # a log axis cannot start at zero
        axes.set_xticks(counts)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        return {"expected_speedup": figure}


def save_figures(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    paths = []
    with mpl.rc_context(_SETTINGS):
        for name, figure in figures.items():
            FigureCanvasAgg(figure)
            for kind in ("png", "svg"):
                buffer = io.BytesIO()
                metadata = {"Date": None} if kind == "svg" else None
                with warnings.catch_warnings():  # that there is no room for all labels is to be seen
                    warnings.simplefilter("ignore", UserWarning)
                    figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
                path = folder / f"{name}.{kind}"
                path.write_bytes(buffer.getvalue())
                paths.append(path)
    return paths


def _file_name(metric: str) -> str:
    """A metric as a part of the name of a file, whatever a run calls it."""
    return re.sub(r"[^A-Za-z0-9]+", "_", metric)[:60]


def _loss(comparison: Comparison) -> Figure:
    by_steps = comparison.by_steps

    def draw(axes: Axes, group: Group, style: Style) -> None:
        mean = mean_points(group)
        x, y = [p.at(by_steps) for p in mean], [p.train_loss for p in mean]
        axes.plot(x, y, label=_legend(group), **_line(style))
        low, high = ([p.train_loss + sign * p.train_loss_spread for p in mean] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=style.colour, alpha=0.15, linewidth=0)

    unit = "step" if by_steps else "epoch"
    losses = {group.first.config["task.loss"] for group in comparison.groups}
    label = "training loss" + (" (cross-entropy)" if losses == {"cross_entropy"} else "")
    figure = _panels(comparison, draw, f"Training loss over {unit}s", unit, label)
    for axes in figure.axes:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _metric(comparison: Comparison) -> Figure:
    def draw(axes: Axes, group: Group, style: Style) -> None:
        def line(these: Sequence[Point], **how: Any) -> None:
            axes.plot([p.seconds for p in these], [p.accuracy for p in these], **how)

        if len(group.runs) > 1:
            for run in group.runs:
                line(points(run), color=style.colour, linewidth=0.7, alpha=0.4)
        line(mean_points(group), label=_legend(group), **_line(style))

    name, is_share = comparison.title, comparison.metric == ACCURACY
    title = f"{name[0].upper()}{name[1:]} over training time"
    figure = _panels(comparison, draw, title, "training time (s)", name)
    for axes in figure.axes:
        if is_share:
            axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set_xlim(left=0)
        if comparison.target is not None:
            axes.axhline(comparison.target, color="#555555", linewidth=0.8, linestyle=":")
            axes.annotate(
                f"target {percent(comparison.target) if is_share else f'{comparison.target:g}'}",
                (0, comparison.target),
                xycoords=("axes fraction", "data"),
                xytext=(4, 3),
                textcoords="offset points",
                color="#555555",
                fontsize=9,
                bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.5},
            )
    return figure


def _panels(
    comparison: Comparison, draw: Callable[[Axes, Group, Style], None], title: str, x_label: str, y_label: str
) -> Figure:
    """A panel for each task and model, as in the paper; one shared legend beside them."""
    panels: dict[str, list[Group]] = {}
    for group in comparison.groups[:_MOST_ROWS]:
        config = group.first.config
        panels.setdefault(cut(f"{config['task.name']}, {config['model.name']}", 60), []).append(group)
    panels = dict(list(panels.items())[:_MOST_PANELS])
    num_drawn = sum(map(len, panels.values()))
    if num_drawn < len(comparison.groups):
        title += f" ({num_drawn} of {len(comparison.groups)} rows)"
    figure = Figure(figsize=(3.2 + 4.2 * len(panels), 4.0), layout="constrained")
    look = styles(comparison.groups)
    for index, (name, groups) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), index + 1)
        for group in groups:
            draw(axes, group, look[group.label])
        axes.set_xlabel(x_label)
        if index == 0:
            axes.set_ylabel(y_label)
        workers = sorted({group.first.num_workers for group in groups})
        count = f"{workers[0]}" if len(workers) == 1 else f"{workers[0]} to {workers[-1]}"
        lines = [name, f"{count} workers"]
        axes.set_title((", " if len(panels) == 1 else "\n").join(lines), fontsize=9, loc="left", color="#555555")
    _title(figure, title)
    _legend_beside(figure)
    return figure


def _title(figure: Figure, text: str) -> None:
    figure.suptitle(text, fontsize=12, x=0.01, ha="left")


def _legend_beside(figure: Figure) -> None:
    found = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside right upper", handlelength=3.2)


def _legend(group: Group) -> str:
    return f"{group.label}, n={len(group.runs)}"


def _line(style: Style) -> dict[str, Any]:
    dash = "-" if not style.dash else (0, style.dash)
    return {
        "color": style.colour,
        "linestyle": dash,
        "marker": style.marker,
        "markersize": 4.5,
        "linewidth": 1.6,
        "markeredgecolor": "white",
        "markeredgewidth": 0.5,
    }


def _speedup(scaling: Scaling, title: str = "Time speedup over the number of workers") -> Figure:
    figure = Figure(figsize=(7.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    counts = sorted({workers for found in scaling.series.values() for workers, _ in found})
    axes.plot(counts, [ideal for _, ideal in scaling.linear], color="#999999", linewidth=1, linestyle=":", label="linear")
    look = styles_of(list(scaling.series))
    for name, found in list(scaling.series.items())[:_MOST_ROWS]:
        axes.plot([n for n, _ in found], [s for _, s in found], label=name, **_line(look[name]))
    axes.set_xticks(counts)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("number of workers")
    axes.set_ylabel(f"time speedup, {scaling.reference} = 1")
    _title(figure, title)
    _legend_beside(figure)
    return figure


def _timeline(spans: Mapping[str, Sequence[Span]]) -> Figure:
    """A short window of each run: per worker a lane for computing and waiting, and one for communication below it."""
    shown = dict(list(spans.items())[:_TIMELINE_RUNS])
    seconds = _TIMELINE_STEPS * max(step_seconds(rows) for rows in shown.values()) or 1.0
    ranks = {label: _ranks(rows, len(shown)) for label, rows in shown.items()}
    num_lanes = sum(map(len, ranks.values()))
    figure = Figure(figsize=(9.0, 1.3 + 0.38 * num_lanes + 0.36 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    seen: set[str] = set()
    y, ticks, names = 0.0, [], []
    for label, rows in shown.items():
        begin = window(rows, seconds)
        num_workers = len({span.rank for span in rows})
        some = f", {len(ranks[label])} of {num_workers} workers" if len(ranks[label]) < num_workers else ""
        axes.text(0, y + 0.62, label + some, fontweight="bold", fontsize=9, va="bottom")
        y += 0.7
        for rank in ranks[label]:
            seen |= _draw_worker(axes, [span for span in rows if span.rank == rank], begin, seconds, y)
            ticks.append(y + 0.42)
            names.append(f"worker {rank}")
            y += 1.0
        y += 0.2
    axes.set_yticks(ticks, names)
    axes.set_ylim(y - 0.1, 0)
    axes.set_xlim(0, 1e3 * seconds)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("milliseconds, in the middle of each run")
    kinds = [name for name in NAMES if name in seen]
    patches = [Patch(facecolor=SPAN_COLOURS[n], hatch=_hatch(n), edgecolor="white", label=MEANINGS[n]) for n in kinds]
    left_out = "" if len(shown) == len(spans) else f" (the first {len(shown)} of {len(spans)})"
    _title(figure, f"What the workers did{left_out}")
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches))
    return figure


def _ranks(rows: Sequence[Span], num_runs: int) -> list[int]:
    """The workers to show; the more runs, the fewer workers."""
    most = max(2, _TIMELINE_LANES // num_runs)
    return sorted({span.rank for span in rows})[:most]


def _hatch(name: str) -> str | None:
    return {WAIT: "////", STRETCH: "...."}.get(name)


def _draw_worker(axes: Axes, rows: Sequence[Span], begin: float, seconds: float, y: float) -> set[str]:
    """Draw one worker's lanes; returns the kinds of spans drawn."""
    seen = set()
    for name in (name for name in NAMES if name != COMMUNICATE):
        bars = _bars(rows, name, begin, seconds)
        if bars:
            seen.add(name)
            axes.broken_barh(
                bars, (y, 0.46), facecolor=SPAN_COLOURS[name], hatch=_hatch(name), edgecolor="white", linewidth=0.4
            )
    bars = _bars(rows, COMMUNICATE, begin, seconds)
    if bars:
        seen.add(COMMUNICATE)
        colour = SPAN_COLOURS[COMMUNICATE]
        axes.broken_barh(bars, (y + 0.5, 0.34), facecolor=colour, edgecolor="white", linewidth=0.4)
    return seen


def _bars(rows: Sequence[Span], name: str, begin: float, seconds: float) -> list[tuple[float, float]]:
    """(start, length) in milliseconds, clipped to the window."""
    cut = [
        (max(span.start - begin, 0.0), min(span.end - begin, seconds))
        for span in rows
        if span.name == name and span.end > begin and span.start < begin + seconds
    ]
    return [(1e3 * start, 1e3 * (end - start)) for start, end in cut]
