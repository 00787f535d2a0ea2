"""Rows of a grid -> the paper's tables next to ours, and whether its claims hold.

Every figure is a mean over seeds with its sample standard deviation and n. All seconds are virtual, on the paper's
cluster as in ``configs/cluster``. Where the paper claims an order, the order found is printed, whatever it is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from cocod_accel.reproduce.grid import BEYOND, HETEROGENEOUS, HOMOGENEOUS, MIXED, MODELS, NAMES, REMEDIES, Cell
from cocod_accel.reproduce.intervals import Interval
from cocod_accel.reproduce.running import Row, evaluations
from cocod_accel.runs.tables import aligned

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
_DIVERGED = "diverged"


@dataclass(frozen=True)
class Grid:
    """Cells, and the rows of those that are done."""

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


def mean_of(rows: dict[int, Row], key: str) -> float | None:
    """The mean over seeds; for times, which do not depend on what was learnt."""
    found = [row[key] for row in rows.values() if "failed" not in row]
    return statistics.fmean(found) if found else None


def difference(ours: dict[int, Row], theirs: dict[int, Row]) -> str | None:
    """The difference in words; None: too few seeds. There is no interval if any run diverged."""
    diverged = sum("failed" in row for rows in (ours, theirs) for row in rows.values())
    if diverged:
        return f"no interval, {diverged} of {len(ours) + len(theirs)} runs {_DIVERGED}"
    interval = Interval.of(accuracies(ours), accuracies(theirs))
    return None if interval is None else str(interval)


def environment_table(grid: Grid, part: str) -> str:
    """Table 1 or 2 next to ours, and virtual training time."""
    variants = HOMOGENEOUS if part == "homogeneous" else HETEROGENEOUS
    header = ["best test accuracy, %", "n"]
    for model in MODELS:
        header += [f"{model}, paper", f"{MODELS[model]}, ours", "virtual s", "speed"]
    body, lines = [], []
    for variant in variants:
        found = {model: grid.of(part, model, variant) for model in MODELS}
        cells = [NAMES[variant], str(max(map(len, found.values())))]
        for model, rows in found.items():
            seconds, gain = mean_of(rows, "train_seconds"), speed(grid, part, model).get(variant)
            cells += [f"{PAPER[part][model][variant]:.2f}", accuracy_cell(rows)]
            cells += ["-" if seconds is None else f"{seconds:.1f}", "-" if gain is None else f"{gain:.2f}x"]
        body.append(cells)
    beyond = _beyond(grid, part)
    for model in MODELS:
        apart = difference(grid.of(part, model, "cocod"), grid.of(part, model, "ssgd"))
        if apart is not None:
            lines.append(f"{MODELS[model]}: CoCoD-SGD minus S-SGD, paired by seed: {apart}")
        lines += time_claims(grid, part, model)
    if beyond:
        lines.append(f"{' and '.join(row[0] for row in beyond)}: not in the paper's tables")
    has_any = any(grid.of(part, m, v) for m in MODELS for v in variants)
    return "\n".join([aligned([header, *body, *beyond]), *lines]) if has_any or beyond else ""


def _beyond(grid: Grid, part: str) -> list[list[str]]:
    """Rows of what the paper has no figures of."""
    body = []
    for variant, name in BEYOND.items():
        found = {model: grid.of("asgd", model, variant, part) for model in MODELS}
        if not any(found.values()):
            continue
        cells = [name, str(max(map(len, found.values())))]
        for model, rows in found.items():
            seconds, samples = mean_of(rows, "train_seconds"), mean_of(rows, "samples_per_second")
            base = mean_of(grid.of(part, model, "ssgd"), "samples_per_second")
            gain = None if samples is None or base is None else samples / base
            cells += ["-", accuracy_cell(rows), "-" if seconds is None else f"{seconds:.1f}"]
            cells.append("-" if gain is None else f"{gain:.2f}x")
        body.append(cells)
    return body


def speed(grid: Grid, part: str, model: str) -> dict[str, float]:
    """Samples per virtual second, relative to S-SGD. Not epochs: rounds make them differ in size."""
    variants = HOMOGENEOUS if part == "homogeneous" else HETEROGENEOUS
    found = {variant: mean_of(grid.of(part, model, variant), "samples_per_second") for variant in variants}
    base = found["ssgd"]
    return {} if base is None else {name: value / base for name, value in found.items() if value is not None}


def time_claims(grid: Grid, part: str, model: str) -> list[str]:
    """What the paper claims about the order of training times, and what was found."""
    speeds = speed(grid, part, model)
    found = sorted(speeds, key=lambda variant: -speeds[variant])
    lines = []
    if part == "homogeneous" and len(found) == len(HOMOGENEOUS):
        claimed = ["cocod", "local", "pipe", "ssgd"]
        says = "as in the paper" if found == claimed else "NOT the paper's CoCoD-SGD < Local-SGD < Pipe-SGD < S-SGD"
        lines.append(f"{MODELS[model]}: time order {' < '.join(NAMES[v] for v in found)}: {says}")
    if part == "heterogeneous":
        for plain, sampled in (("ssgd", "ssgd_ps"), ("pipe", "pipe_ps")):
            if plain in speeds and sampled in speeds:
                gain = speeds[sampled] / speeds[plain]
                helps = "helps" if gain > 1 else "does NOT help"
                lines.append(f"{MODELS[model]}: proportional sampling {helps} {NAMES[plain]}: {gain:.2f} times as fast")
        if len(found) == len(HETEROGENEOUS):
            says = "as in the paper" if found[0] == "cocod" else "NOT the paper's CoCoD-SGD"
            lines.append(f"{MODELS[model]}: fastest is {NAMES[found[0]]}, {says}")
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
            apart = difference(rows, base)
            if apart is not None:
                lines.append(f"{alpha}, k={k}: CoCoD-SGD minus S-SGD, paired by seed: {apart}")
    return "\n".join([aligned([header, *body]), *lines])


def remedies_table(grid: Grid) -> str:
    """The effect of the merge options in the worst skewed cells."""
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


def length_table(grid: Grid) -> str:
    """How far CoCoD-SGD is from S-SGD after shorter runs, and after the runs of table 1."""
    lengths = grid.settings("length")
    if not lengths:
        return ""
    body = []
    for model in MODELS:
        for part, setting in [*(("length", setting) for setting in lengths), ("homogeneous", "")]:
            ours, theirs = (grid.of(part, model, variant, setting) for variant in ("cocod", "ssgd"))
            interval = Interval.of(accuracies(ours), accuracies(theirs))
            cells = [
                MODELS[model],
                setting.removeprefix("epochs=") or "table 1's",
                accuracy_cell(theirs),
                accuracy_cell(ours),
            ]
            body.append([*cells, "-" if interval is None else str(interval)])
    header = ["best test accuracy, %", "epochs", NAMES["ssgd"], NAMES["cocod"], "CoCoD-SGD minus S-SGD, paired by seed"]
    return aligned([header, *body])


# ------------------------------------------------------------------------------------------ iterations


#: Factor over the lowest loss that all reach: near its minimum a curve is flat, and when it gets there is chance.
_SLACK = 1.2


def common_loss(grid: Grid) -> float | None:
    """A training loss of the mean model that every run of ``iterations`` reaches; None if there is none."""
    rows = [grid.rows[c.name] for c in grid.cells if c.part == "iterations" and c.name in grid.rows]
    if not rows or any("failed" in row for row in rows):
        return None
    curves = [evaluations(row) for row in rows]
    if any("mean_train_loss" not in e for curve in curves for e in curve):  # switched off by an override
        return None
    lowest = [min(float(e["mean_train_loss"]) for e in curve) for curve in curves]
    return math.ceil(100 * _SLACK * max(lowest)) / 100


def steps_to(row: Row, loss: float) -> int:
    """Steps per worker until the mean model's training loss, checked after every epoch, is at most ``loss``."""
    return int(next(e["step"] for e in evaluations(row) if e["mean_train_loss"] <= loss))


#: What ``iterations`` compares: name -> its variant and setting.
ITERATIONS = {"S-SGD": ("ssgd", ""), "CoCoD-SGD": ("cocod", ""), "CoCoD-SGD, mixed": ("cocod", MIXED)}


def iterations_by_workers(grid: Grid, loss: float, name: str) -> dict[int, list[float]]:
    """Total speed in units of the slowest worker -> steps to the loss, one per seed. A single worker is never mixed."""
    variant, setting = ITERATIONS[name]
    per_worker = 1.5 if setting == MIXED else 1.0
    found = {}
    for n in sorted({c.num_workers for c in grid.cells if c.part == "iterations"}):
        rows = grid.of("iterations", "resnet18", variant, setting if n > 1 else "", num_workers=n)
        if rows:
            found[n if n == 1 else round(per_worker * n)] = [float(steps_to(row, loss)) for row in rows.values()]
    return found


def iterations_table(grid: Grid) -> str:
    """Steps to one loss; linear speedup is the total speed over that of the slowest worker."""
    loss = common_loss(grid)
    if loss is None:
        diverged = any(c.part == "iterations" and "failed" in grid.rows.get(c.name, {}) for c in grid.cells)
        return "no table: a run diverged" if diverged else ""
    body = []
    for name in ITERATIONS:
        found = iterations_by_workers(grid, loss, name)
        for size, steps in found.items():
            speedup = statistics.fmean(found[min(found)]) / statistics.fmean(steps)
            linear = size / min(found)
            body.append([name, str(len(steps)), str(size), spread(steps, 0), f"{speedup:.2f}x", f"{speedup / linear:.0%}"])
    header = [f"steps to the mean model's training loss {loss:g}", "n", "workers' speed", "steps", "speedup", "of linear"]
    return aligned([header, *body])


def report(grid: Grid) -> str:
    """All tables."""
    from cocod_accel.reproduce import language, learning  # they are made of this module's cells

    parts = [
        ("Table 1: equal workers", environment_table(grid, "homogeneous")),
        ("Table 2: 8 of 16 workers at half speed", environment_table(grid, "heterogeneous")),
        ("Label-skewed shards (Dirichlet alpha)", skew_table(grid)),
        ("Remedies", remedies_table(grid)),
        ("Linear iteration speedup", iterations_table(grid)),
        ("Shorter runs", length_table(grid)),
        ("What every method learns in equally many steps, 16 workers", learning.table(grid)),
        ("A language model at equal tokens, 8 workers with AdamW", language.table(grid)),
    ]
    done = sum(cell.name in grid.rows for cell in grid.cells)
    head = f"{done} of {len(grid.cells)} cells; seconds are virtual, on the paper's cluster as in configs/cluster"
    return "\n\n".join([head, *(f"{title}\n{text}" for title, text in parts if text)])
