"""Figures of a grid that ``cocod compare`` does not draw: accuracy against the period, steps against workers, and bits per
byte against bytes sent.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from cocod_accel.report.look import styles_of
from cocod_accel.reproduce.language import METHODS, learnt_for_bytes
from cocod_accel.reproduce.tables import ITERATIONS, Grid, accuracies, common_loss, iterations_by_workers


def _axes() -> tuple[Figure, Any]:
    picture = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.add_subplot()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return picture, axes


def _line(axes: Any, xs: list[float], values: list[list[float]], style: Any, label: str) -> None:
    spread = [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values]
    axes.errorbar(
        xs, [statistics.fmean(v) for v in values], yerr=spread, color=style.colour, marker=style.marker, markersize=5,
        linestyle=(0, style.dash) if style.dash else "-", capsize=2, linewidth=1.6, label=label,
    )  # fmt: skip


def draw_skew(grid: Grid) -> Figure | None:
    """Accuracy against the period: a line for each label skew, and S-SGD as a dotted level of the same colour."""
    settings = [s for s in grid.settings("skew") if " k=" in s]
    if not settings:
        return None
    alphas = list(dict.fromkeys(s.split()[0] for s in settings))
    picture, axes = _axes()
    styles = styles_of(alphas)
    for alpha in alphas:
        points = []
        for setting in [s for s in settings if s.startswith(f"{alpha} ")]:
            found = list(accuracies(grid.of("skew", "resnet18", "cocod", setting)).values())
            if found:
                points.append((float(setting.split("k=")[1]), found))
        label = alpha.replace("alpha=", "alpha ") + (", equal shards" if alpha.endswith("inf") else "")
        _line(axes, [k for k, _ in points], [v for _, v in points], styles[alpha], label)
        base = list(accuracies(grid.of("skew", "resnet18", "ssgd", alpha)).values())
        if base:
            axes.axhline(statistics.fmean(base), color=styles[alpha].colour, linestyle=":", linewidth=1)
    ticks = sorted({int(s.split("k=")[1]) for s in settings})
    axes.set_xscale("log")
    axes.set_xticks(ticks, [str(k) for k in ticks])
    axes.minorticks_off()
    axes.set_xlabel("period k (steps per round)")
    axes.set_ylabel("best test accuracy, %")
    axes.set_title("CoCoD-SGD on label-skewed shards, 16 workers; mean and st. dev.; dotted: S-SGD", loc="left", fontsize=10)
    axes.legend(frameon=False)
    return picture


def draw_iterations(grid: Grid) -> Figure | None:
    """Steps to a loss against the number of workers, with linear speedup for comparison."""
    loss = common_loss(grid)
    if loss is None:
        return None
    picture, axes = _axes()
    styles = styles_of(list(ITERATIONS))
    first: float | None = None
    counts: list[int] = []
    for name in ITERATIONS:
        found = iterations_by_workers(grid, loss, name)
        counts = sorted({*counts, *found})
        if found and first is None:
            first = statistics.fmean(found[min(found)]) * min(found)
        if len(found) > 1:
            _line(axes, [float(n) for n in found], list(found.values()), styles[name], name)
    if first is not None:
        axes.plot(counts, [first / n for n in counts], color="#777777", linestyle=":", linewidth=1, label="linear speedup")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.minorticks_off()
    axes.set_xlabel("total speed of all workers, over that of the slowest")
    axes.set_ylabel(f"steps to the mean model's training loss {loss:g}")
    axes.set_title("Linear iteration speedup (Remarks 1 and 2); mean and st. dev.", loc="left", fontsize=10)
    axes.legend(frameon=False)
    return picture


def draw_language(grid: Grid) -> Figure | None:
    """Bits per byte against bytes sent: a panel for each way of dealing the text, S-SGD as a dotted level."""
    panels = learnt_for_bytes(grid)
    if not panels:
        return None
    picture = Figure(figsize=(1.6 + 4.6 * len(panels), 4.2), layout="constrained")
    FigureCanvasAgg(picture)
    styles = styles_of([method.label for method in METHODS])
    first: Any = None
    for index, (deal, found) in enumerate(panels.items()):
        axes = picture.add_subplot(1, len(panels), index + 1, sharey=first)
        first = first or axes
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        for label, share, values in found:
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            axes.errorbar(
                share, statistics.fmean(values), yerr=spread, color=styles[label].colour, marker=styles[label].marker,
                markersize=7, capsize=3, linestyle="none", label=f"{label}, n={len(values)}",
            )  # fmt: skip
        base = next((values for label, _, values in found if label == METHODS[0].label), None)
        if base:
            axes.axhline(statistics.fmean(base), color="#777777", linestyle=":", linewidth=1)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("bytes sent, S-SGD = 1")
        axes.set_title("shards alike" if deal == "iid" else f"dealt {deal}", loc="left", fontsize=10)
        axes.legend(frameon=False, fontsize=8)
    first.set_ylabel("bits per byte at the end (lower is better)")
    picture.suptitle("A small GPT, 8 workers at equal tokens; mean and st. dev.", fontsize=11, x=0.01, ha="left")
    return picture


def save(grid: Grid, out: Path) -> list[Path]:
    written = []
    drawn = {"skew": draw_skew, "iterations": draw_iterations, "language": draw_language}
    for name, picture in ((name, draw(grid)) for name, draw in drawn.items()):
        if picture is not None:
            for suffix in ("png", "svg"):
                path = out / f"{name}.{suffix}"
                picture.savefig(path, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
                written.append(path)
    return written
