"""The part ``learning``: how much accuracy each method gives up after equally many steps, and what it sends for that.

All images of CIFAR-10 at 16x16, no warm-up of the period, a cosine: nothing but the method differs. Three methods are run
for longer, on both models, with more seeds and on skewed shards: S-SGD, the paper's rule, and what is recommended.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from cocod_accel.plan.learned import Learned
from cocod_accel.reproduce.grid import CONFIGS, MODELS, Cell, Scale, cluster_of
from cocod_accel.reproduce.intervals import Interval
from cocod_accel.reproduce.tables import Grid, accuracies, accuracy_cell, mean_of
from cocod_accel.runs.tables import aligned

PART = "learning"


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    label: str
    variant: str
    options: tuple[str, ...] = ()


def _cocod(label: str, period: int, *more: str) -> Method:
    return Method(f"CoCoD-SGD {label}", "cocod", (f"algorithm.period={period}", *more))


def _ssgd(payload: str) -> Method:
    return Method(f"S-SGD {payload}", "ssgd", (f"algorithm.payload={payload}",))


S_SGD = Method("S-SGD", "ssgd")
PAPER = _cocod("k=5", 5)
RECOMMENDED = _cocod("k=1 ternary", 1, "algorithm.payload=ternary")
#: Run for longer, on both models, with more seeds and on skewed shards.
MAIN = (S_SGD, PAPER, RECOMMENDED)
METHODS = (
    S_SGD,
    PAPER,
    *(_cocod(f"k=5 d={d}", 5, f"algorithm.delay={d}") for d in (1, 2, 3, 4)),
    Method("Local-SGD k=5", "local", ("algorithm.period=5",)),
    *(_cocod(f"k={k}", k) for k in (3, 2, 1)),
    *(_cocod(f"k=1 {payload}", 1, f"algorithm.payload={payload}") for payload in ("int8", "int4")),
    RECOMMENDED,
    _cocod("k=1 topk:0.02", 1, "algorithm.payload=topk:0.02"),
    _cocod("k=5 ternary", 5, "algorithm.payload=ternary"),
    Method("Pipe-SGD", "pipe"),
    *(_ssgd(payload) for payload in ("int4", "ternary", "topk:0.02", "qsgd:4", "terngrad")),
)
#: With 64 workers, once.
MANY = (S_SGD, _cocod("k=1", 1), _cocod("k=1 int4", 1, "algorithm.payload=int4"), RECOMMENDED, Method("Pipe-SGD", "pipe"))
#: With 4 workers, once: whether fewer lose less.
FEW = MAIN
#: Factors of the learning rate.
RATES = (0.5, 2.0)
ALPHAS = (1.0, 0.1)
#: Epochs of the longer runs.
LONG = 8
_SEEDS, _MORE_SEEDS = 3, 5


def cells(scale: Scale) -> Iterator[Cell]:
    """Nothing at full scale: there the paper's own settings are run."""
    if scale.name == "full":
        return
    is_smoke = scale.name == "smoke"
    most, few = (2, 1) if is_smoke else (_MORE_SEEDS, _SEEDS)
    for method in (*METHODS[:3], RECOMMENDED) if is_smoke else METHODS:
        for seed in range(most if method in MAIN else few):
            yield _cell(scale, "vgg16", method, "", seed)
    for method in MAIN:
        for seed in range(most):
            if not is_smoke:
                yield _cell(scale, "resnet18", method, "", seed)
                for model in MODELS:
                    yield _cell(scale, model, method, f"epochs={LONG}", seed, f"schedule.epochs={LONG}")
        for alpha in ALPHAS:
            for seed in range(few):
                yield _cell(scale, "vgg16", method, f"alpha={alpha:g}", seed, f"task.label_skew={alpha:g}")
        for factor in RATES:
            yield _cell(scale, "vgg16", method, f"rate x{factor:g}", 0, _rate(scale, factor))
    if not is_smoke:
        for method in FEW:
            yield _cell(scale, "vgg16", method, "4 workers", 0, "schedule.epochs=1", workers=4)
        # 48 steps an epoch; twice the rate of 16 workers, or the same.
        many = "schedule.epochs=4"
        for method in MANY:
            yield _cell(scale, "vgg16", method, "64 workers", 0, many, _rate(scale, 0.5), workers=64)
        yield _cell(scale, "vgg16", RECOMMENDED, "64 workers, rate x0.5", 0, many, _rate(scale, 0.25), workers=64)


def _rate(scale: Scale, factor: float) -> str:
    return f"optimizer.learning_rate={factor * (0.01 if scale.name == 'smoke' else 0.005):g}"


def _cell(scale: Scale, model: str, method: Method, setting: str, seed: int, *more: str, workers: int = 16) -> Cell:
    epochs = [f"evaluation.every_epochs={more[0].split('=')[1]}"] if more and more[0].startswith("schedule.epochs=") else []
    file = "smoke" if scale.name == "smoke" else "learning"
    given = (
        str(CONFIGS / "homogeneous_16gpu.yaml"), str(CONFIGS / "reproduce" / f"{file}.yaml"), f"model.name={MODELS[model]}",
        f"algorithm.name={method.variant}", "algorithm.period=5", *method.options, f"cluster.num_workers={workers}",
        f"seed={seed}", *more, *epochs,
    )  # fmt: skip
    named = f"{method.label.partition(' ')[2]} {setting}".strip()
    return Cell(PART, model, method.variant, named, workers, seed, given, cluster_of(model))


# ------------------------------------------------------------------------------------------------------------ tables


def _rows(grid: Grid, model: str, method: Method, setting: str = "") -> dict[int, dict[str, object]]:
    return grid.of(PART, model, method.variant, f"{method.label.partition(' ')[2]} {setting}".strip())


def table(grid: Grid) -> str:
    """What each method reaches and sends, and the difference to S-SGD, paired by seed."""
    if not any(cell.part == PART and cell.name in grid.rows for cell in grid.cells):
        return ""
    header = ["test accuracy, %", "", "n", "reached", "minus S-SGD, paired by seed (95%)", "bytes a step"]
    body: list[list[str]] = []
    for model in reversed(MODELS):
        for setting in ("", f"epochs={LONG}", *(f"alpha={a:g}" for a in ALPHAS), *(f"rate x{f:g}" for f in RATES)):
            body += _block(grid, model, setting, METHODS)
    body += _block(grid, "vgg16", "4 workers", FEW)
    body += _block(grid, "vgg16", "64 workers", MANY)
    body += _block(grid, "vgg16", "64 workers, rate x0.5", (RECOMMENDED,), base="64 workers")
    return aligned([header, *body])


def _block(grid: Grid, model: str, setting: str, methods: tuple[Method, ...], base: str | None = None) -> list[list[str]]:
    theirs = _rows(grid, model, S_SGD, setting if base is None else base)
    full = mean_of(theirs, "comm_bytes")
    steps = mean_of(theirs, "steps")
    lines = []
    for method in methods:
        ours = _rows(grid, model, method, setting)
        if not ours:
            continue
        sent = mean_of(ours, "comm_bytes")
        share = "-" if full is None or sent is None else f"{sent / full:.3f}"
        where = MODELS[model] if not setting else f"{MODELS[model]}, {setting}"
        apart = "" if ours is theirs else difference(accuracies(ours), accuracies(theirs))
        lines.append([where, method.label, str(len(ours)), accuracy_cell(ours), apart, share])
    if lines and steps is not None:
        lines[0][0] += f", {steps:.0f} steps"
    return lines


def difference(found: dict[int, float], base: dict[int, float], digits: int = 2) -> str:
    """The paired difference of values by seed and its interval, of one seed without; nothing of what is the baseline."""
    interval = Interval.of(found, base)
    if found == base:
        return ""
    if interval is not None:
        mean, low, high = (f"{value:+.{digits}f}" for value in (interval.mean, interval.low, interval.high))
        return f"{mean} ({low} to {high})"
    shared = sorted(found.keys() & base.keys())
    return f"{statistics.fmean(found[s] - base[s] for s in shared):+.{digits}f}" if shared else "-"


# ------------------------------------------------------------------------------------------------ for ``cocod plan``

#: The label of a row -> its period + delay.
_SPANS = {
    "CoCoD-SGD k=1": 2, "CoCoD-SGD k=2": 4, "Local-SGD k=5": 5, "CoCoD-SGD k=3": 6,
    **{f"CoCoD-SGD k=5 d={d}": 5 + d for d in (1, 2, 3, 4)}, "CoCoD-SGD k=5": 10,
}  # fmt: skip
_CODES = ("int8", "int4", "ternary")
#: Per cent of ten classes.
_GUESSED = 10


def learned(grid: Grid) -> Learned | None:
    """What ``cocod plan`` expects of every method; None if a run that it needs is missing."""
    try:
        return _learned(grid)
    except statistics.StatisticsError:  # the mean of no runs
        return None


def _learned(grid: Grid) -> Learned:
    def rows(label: str, setting: str = "") -> dict[int, dict[str, object]]:
        return _rows(grid, "vgg16", next(method for method in METHODS if method.label == label), setting)

    def lost(label: str, setting: str = "") -> float:
        ours, theirs = accuracies(rows(label, setting)), accuracies(rows("S-SGD", setting))
        return statistics.fmean(theirs[seed] - ours[seed] for seed in ours.keys() & theirs.keys())

    def of_ssgd(setting: str) -> tuple[float, float]:
        """Steps, and the accuracy after them."""
        found = rows("S-SGD", setting)
        return statistics.fmean(int(str(row["steps"])) for row in found.values()), statistics.fmean(
            accuracies(found).values()
        )

    (short, reached), (long, more) = of_ssgd(""), of_ssgd(f"epochs={LONG}")
    losses: dict[int, list[float]] = {0: [0.0]}
    for label, span in _SPANS.items():
        losses.setdefault(span, []).append(lost(label))
    spans = sorted(losses)
    paper, least = lost("CoCoD-SGD k=5"), lost("CoCoD-SGD k=1")
    left = max(0.0, lost("CoCoD-SGD k=5", f"epochs={LONG}") / paper)
    # Four workers' run is longer: its loss is compared with what sixteen would lose after as many steps.
    of_few = 1 + (left - 1) * math.log(of_ssgd("4 workers")[0] / short) / math.log(long / short)
    shares = {1: 0.0, 4: lost("CoCoD-SGD k=5", "4 workers") / (paper * of_few), 16: 1.0}
    shares[64] = lost("CoCoD-SGD k=1", "64 workers") / least
    return Learned(
        workers=16,
        steps=(round(short), round(long)),
        gain=round((more - reached) / math.log2(long / short), 3),
        # Never less for longer: what says otherwise is noise.
        spans=tuple(zip(spans, accumulate((round(statistics.fmean(losses[span]), 3) for span in spans), max), strict=True)),
        # bf16 was not run: it is finer than int8.
        codes={code: round(max(0.0, lost(f"CoCoD-SGD k=1 {code}") - least), 3) for code in _CODES} | {"bf16": 0.0},
        pipe=round(lost("Pipe-SGD"), 3),
        left=round(left, 3),
        most=round(reached - _GUESSED, 3),
        shares=tuple((workers, round(max(0.0, share), 3)) for workers, share in shares.items()),
    )
