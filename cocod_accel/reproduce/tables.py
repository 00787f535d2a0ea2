"""Rows of a grid -> the paper's tables beside ours, and what may be said of them.

Every figure is a mean over seeds with its sample standard deviation and n. All seconds are virtual: the paper's cluster as
``configs/cluster`` has it. Where the paper makes a claim about an order, the order found is printed, whatever it is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from cocod_accel.reproduce.grid import HETEROGENEOUS, HOMOGENEOUS, MODELS, NAMES, REMEDIES, Cell
from cocod_accel.reproduce.running import Row, evaluations
from cocod_accel.tables import aligned

#: Final best test accuracy in per cent, CIFAR-10 columns of the paper's tables 1 and 2.
PAPER = {
    "homogeneous": {
        "resnet18": {"ssgd": 94.00, "pipe": 93.94, "local": 94.35, "cocod": 94.41},
        "vgg16": {"ssgd": 93.25, "pipe": 93.09, "local": 93.30, "cocod": 93.38},
    },
    "heterogeneous": {
        "resnet18": {
            "ssgd": 94.18, "ssgd_ps": 93.73, "pipe": 94.17, "pipe_ps": 94.10, "asynlocal": 94.47, "cocod": 94.33,
        },
        "vgg16": {"ssgd": 93.09, "ssgd_ps": 92.96, "pipe": 92.36, "pipe_ps": 92.71, "asynlocal": 93.24, "cocod": 92.69},
    },
}  # fmt: skip
#: A loss of accuracy that must be excluded, in points.
MARGIN = 1.5
#: Two-sided 95% quantiles of Student's t, by degrees of freedom.
_T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_DIVERGED = "diverged"


@dataclass(frozen=True)
class Grid:
    """Cells that are done, and their rows."""

    cells: Sequence[Cell]
    rows: dict[str, Row]

    def of(self, part: str, model: str, variant: str, setting: str = "", num_workers: int | None = None) -> dict[int, Row]:
        """seed -> row."""
        return {
            cell.seed: self.rows[cell.name]
            for cell in self.cells
            if (cell.part, cell.model, cell.variant, cell.setting) == (part, model, variant, setting)
            and num_workers in (None, cell.num_workers)
            and cell.name in self.rows
        }

    def settings(self, part: str) -> list[str]:
        return list(dict.fromkeys(cell.setting for cell in self.cells if cell.part == part and cell.name in self.rows))


def accuracies(rows: dict[int, Row]) -> dict[int, float]:
    """seed -> best test accuracy in per cent, of the runs that did not diverge."""
    return {seed: 100 * row["best_accuracy"] for seed, row in rows.items() if "failed" not in row}


def spread(values: Sequence[float], digits: int = 2) -> str:
    if not values:
        return "-"
    deviation = f" ±{statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def accuracy_cell(rows: dict[int, Row]) -> str:
    found = list(accuracies(rows).values())
    lost = len(rows) - len(found)
    if lost:
        return _DIVERGED if not found else f"{spread(found)} ({lost} of {len(rows)} {_DIVERGED})"
    return spread(found)


def seconds_of(rows: dict[int, Row]) -> float | None:
    """Mean virtual training seconds; they do not depend on what was learnt."""
    found = [row["train_seconds"] for row in rows.values() if "failed" not in row]
    return statistics.fmean(found) if found else None


@dataclass(frozen=True)
class Interval:
    """A paired difference in points, over seeds, with its 95% confidence interval."""

    mean: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, ours: dict[int, float], theirs: dict[int, float]) -> Interval | None:
        differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
        if len(differences) < 2:
            return None
        n, mean = len(differences), statistics.fmean(differences)
        quantile = _T95[n - 1] if n - 1 < len(_T95) else 1.96
        half = quantile * statistics.stdev(differences) / math.sqrt(n)
        return cls(mean, mean - half, mean + half, n)

    @property
    def verdict(self) -> str:
        if self.low > -MARGIN:
            return f"excludes a loss of more than {MARGIN:g} points"
        return "undecided" if self.high > -MARGIN else f"a loss of more than {MARGIN:g} points"

    def __str__(self) -> str:
        return f"{self.mean:+.2f} points (95% {self.low:+.2f} to {self.high:+.2f}, n={self.n}): {self.verdict}"


def environment_table(grid: Grid, part: str) -> str:
    """Table 1 or 2 beside ours, and virtual training time."""
    variants = HOMOGENEOUS if part == "homogeneous" else HETEROGENEOUS
    header = ["best test accuracy, %", "n"]
    for model in MODELS:
        header += [f"{model}, paper", f"{MODELS[model]}, ours", "virtual s", "S-SGD / it"]
    body, lines = [], []
    for variant in variants:
        found = {model: grid.of(part, model, variant) for model in MODELS}
        cells = [NAMES[variant], str(max(map(len, found.values())))]
        for model, rows in found.items():
            seconds, slowest = seconds_of(rows), seconds_of(grid.of(part, model, "ssgd"))
            cells += [f"{PAPER[part][model][variant]:.2f}", accuracy_cell(rows)]
            cells.append("-" if seconds is None else f"{seconds:.1f}")
            cells.append("-" if seconds is None or slowest is None else f"{slowest / seconds:.2f}x")
        body.append(cells)
    for model in MODELS:
        pair = [accuracies(grid.of(part, model, variant)) for variant in ("cocod", "ssgd")]
        interval = Interval.of(*pair)
        if interval is not None:
            lines.append(f"{MODELS[model]}: CoCoD-SGD minus S-SGD, paired by seed: {interval}")
        lines += time_claims(grid, part, model)
    return (
        "\n".join([aligned([header, *body]), *lines]) if any(grid.of(part, m, v) for m in MODELS for v in variants) else ""
    )


def time_claims(grid: Grid, part: str, model: str) -> list[str]:
    """What the paper says of the order of training times, and what was found."""
    variants = HOMOGENEOUS if part == "homogeneous" else HETEROGENEOUS
    known = {variant: seconds_of(grid.of(part, model, variant)) for variant in variants}
    times = {variant: seconds for variant, seconds in known.items() if seconds is not None}
    lines = []
    if part == "homogeneous" and len(times) == len(variants):
        claimed = ["cocod", "local", "pipe", "ssgd"]
        found = sorted(times, key=lambda variant: times[variant])
        says = "as in the paper" if found == claimed else "NOT the paper's CoCoD-SGD < Local-SGD < Pipe-SGD < S-SGD"
        lines.append(f"{MODELS[model]}: time order {' < '.join(NAMES[v] for v in found)}: {says}")
    if part == "heterogeneous":
        for plain, sampled in (("ssgd", "ssgd_ps"), ("pipe", "pipe_ps")):
            if plain in times and sampled in times:
                helps = "helps" if times[sampled] < times[plain] else "does NOT help"
                gain = times[plain] / times[sampled]
                lines.append(f"{MODELS[model]}: proportional sampling {helps} {NAMES[plain]}: {gain:.2f} times as fast")
    return lines


def skew_table(grid: Grid) -> str:
    """Accuracy against period and label skew."""
    periods = list(dict.fromkeys(s.split(" k=")[1] for s in grid.settings("skew") if " k=" in s))
    alphas = list(dict.fromkeys(s.split()[0] for s in grid.settings("skew")))
    if not periods:
        return ""
    header = ["best test accuracy, %", "n", "S-SGD", *(f"CoCoD-SGD k={k}" for k in periods)]
    body, lines = [], []
    for alpha in alphas:
        base = grid.of("skew", "resnet18", "ssgd", alpha)
        cells = {k: grid.of("skew", "resnet18", "cocod", f"{alpha} k={k}") for k in periods}
        most = max(len(base), *map(len, cells.values()))
        body.append([alpha, str(most), accuracy_cell(base), *map(accuracy_cell, cells.values())])
        for k, rows in cells.items() if alpha == "alpha=inf" else ():
            interval = Interval.of(accuracies(rows), accuracies(base))
            if interval is not None:
                lines.append(f"{alpha}, k={k}: CoCoD-SGD minus S-SGD, paired by seed: {interval}")
    return "\n".join([aligned([header, *body]), *lines])


def remedies_table(grid: Grid) -> str:
    """What the merge options do in the worst of those cells."""
    wheres = list(dict.fromkeys(" ".join(s.split()[:2]) for s in grid.settings("remedies")))
    if not wheres:
        return ""
    header = ["best test accuracy, %", "n", "CoCoD-SGD", *REMEDIES, "Local-SGD"]
    body = []
    for where in wheres:
        plain = grid.of("skew", "resnet18", "cocod", where)
        mended = [grid.of("remedies", "resnet18", "cocod", f"{where} {remedy}") for remedy in REMEDIES]
        local = grid.of("remedies", "resnet18", "local", where)
        most = str(max(map(len, [plain, *mended, local])))
        body.append([where, most, *map(accuracy_cell, [plain, *mended, local])])
    return aligned([header, *body])


# ------------------------------------------------------------------------------------------ iterations


def common_loss(grid: Grid) -> float | None:
    """The lowest training loss that every run of ``iterations`` reaches, rounded up."""
    rows = [grid.rows[c.name] for c in grid.cells if c.part == "iterations" and c.name in grid.rows]
    if not rows or any("failed" in row for row in rows):
        return None
    lowest = [min(float(e["train_loss"]) for e in evaluations(row)) for row in rows]
    return math.ceil(100 * max(lowest)) / 100


def steps_to(row: Row, loss: float) -> int:
    """Steps of a worker until an epoch's mean training loss is at or below; not interpolated."""
    return int(next(e["step"] for e in evaluations(row) if e["train_loss"] <= loss))


def iterations_by_workers(grid: Grid, loss: float, variant: str) -> dict[int, list[float]]:
    """number of workers -> steps to the loss, seed by seed."""
    counts = sorted({c.num_workers for c in grid.cells if c.part == "iterations"})
    found = {n: grid.of("iterations", "resnet18", variant, num_workers=n) for n in counts}
    return {n: [float(steps_to(row, loss)) for row in rows.values()] for n, rows in found.items() if rows}


def iterations_table(grid: Grid) -> str:
    loss = common_loss(grid)
    if loss is None:
        return ""
    found = {variant: iterations_by_workers(grid, loss, variant) for variant in ("ssgd", "cocod")}
    counts = sorted(set().union(*found.values()))
    header = [f"steps to training loss {loss:g}", "n"]
    for variant in found:
        header += [NAMES[variant], "speedup", "of linear"]
    body = []
    for n in counts:
        cells = [f"{n} worker{'s' if n > 1 else ''}", str(max(len(steps.get(n, [])) for steps in found.values()))]
        for steps in found.values():
            alone, mine = steps.get(min(counts)), steps.get(n)
            if not alone or not mine:
                cells += ["-", "-", "-"]
                continue
            speedup = statistics.fmean(alone) / statistics.fmean(mine)
            cells += [spread(mine, 0), f"{speedup:.2f}x", f"{speedup / n * min(counts):.0%}"]
        body.append(cells)
    return aligned([header, *body])


def report(grid: Grid) -> str:
    """Everything that the rows tell."""
    parts = [
        ("Table 1: equal workers", environment_table(grid, "homogeneous")),
        ("Table 2: 8 of 16 workers at half speed", environment_table(grid, "heterogeneous")),
        ("Label-skewed shards (Dirichlet alpha)", skew_table(grid)),
        ("Remedies", remedies_table(grid)),
        ("Linear iteration speedup", iterations_table(grid)),
    ]
    done = sum(cell.name in grid.rows for cell in grid.cells)
    head = f"{done} of {len(grid.cells)} cells; seconds are virtual, of the paper's cluster as configs/cluster has it"
    return "\n\n".join([head, *(f"{title}\n{text}" for title, text in parts if text)])
