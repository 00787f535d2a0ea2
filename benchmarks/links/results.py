"""Raw rows of a benchmark -> tables and a figure.

Every block of steps is divided by the adjacent blocks of the limit, because machines drift; a figure is the median of
these ratios over repeats, with quartiles.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.links.contenders import CONTENDERS, OURS
from benchmarks.links.prediction import facts_of, prediction_table
from benchmarks.links.settings import BenchSettings
from cocod_accel.runs.tables import aligned

Row = dict[str, Any]

#: What is recommended, as claims name it.
_RECOMMENDED = "cocod k=1 ternary"


@dataclass(frozen=True)
class Figure:
    """A median, its quartiles, and the number of values."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(middle, low, high, len(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def read_rows(path: Path) -> list[Row]:
    """The rows of a benchmark; a truncated last line is skipped."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    if not rows:
        raise ValueError(f"{path}: contains no rows; run the benchmark again")
    return rows


def over_limit(rows: Sequence[Row], ratio: float, clock: str = "lab") -> dict[str, dict[int, float]]:
    """contender -> repeat -> its step time over the limit's in the blocks just before and after."""
    found: dict[str, dict[int, float]] = {}
    for row, limit in _with_limit([row for row in rows if row["kind"] == "step" and row["ratio"] == ratio]):
        if row["clock"] == clock:
            found.setdefault(row["contender"], {})[row["repeat"]] = row["seconds"] / limit
    return found


def _with_limit(rows: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    """Every block of a link, and the step time without communication just before and after."""
    limits = {(row["repeat"], row["place"]): row["seconds"] for row in rows if row["contender"] == "none"}
    for row in rows:
        beside = [limits[at] for at in ((row["repeat"], row["place"] + way) for way in (-1, 1)) if at in limits]
        if row["contender"] != "none" and beside:
            yield row, statistics.fmean(beside)


def ratio_of(steps: dict[str, dict[int, float]], slower: str, faster: str) -> Figure | None:
    """How many times longer one contender's step is than another's, or than the limit's ("none"), repeat by repeat."""
    if faster == "none":
        values = list(steps.get(slower, {}).values())
    else:
        common = sorted(steps.get(slower, {}).keys() & steps.get(faster, {}).keys())
        values = [steps[slower][repeat] / steps[faster][repeat] for repeat in common]
    return Figure.of(values) if values else None


def links(rows: Sequence[Row], kind: str, clock: str | None = None) -> list[float]:
    found = [row for row in rows if row["kind"] == kind and row.get("contender") != "none"]
    return sorted({row["ratio"] for row in found if clock in (None, row["clock"])})


def clock_of(rows: Sequence[Row]) -> str:
    return "lab" if any(row["clock"] == "lab" for row in rows if row["kind"] != "measured") else "emulated"


# ------------------------------------------------------------------------------------------------- tables


def step_table(rows: Sequence[Row]) -> str:
    """Step time of each contender over the limit's, for each link."""
    clock = clock_of(rows)
    ratios = links(rows, "step", clock)
    by_link = {ratio: over_limit(rows, ratio, clock) for ratio in ratios}
    body = []
    for name in CONTENDERS:
        cells = [ratio_of(by_link[ratio], name, "none") for ratio in ratios]
        if name != "none" and any(cells):
            body.append([CONTENDERS[name].label, *("-" if cell is None else str(cell) for cell in cells)])
    return aligned([["step / step without communication", *(f"r_1 = {ratio:g}" for ratio in ratios)], *body])


def measured_table(rows: Sequence[Row]) -> str:
    """The intended r_1 of each link, the one measured with a payload alone, and the one during the timed blocks."""
    body = []
    for (ratio, kind), found in _by_link(rows).items():
        measured = [row for row in found if row["kind"] == "measured"]
        compute, communicate = measured[-1]["compute_seconds"], measured[-1]["communicate_seconds"]
        cells = [f"r_1 = {ratio:g}", f"{communicate / compute:.2f}", f"{measured[-1]['link']['bandwidth_mbit']:.1f}"]
        cells += [f"{1e3 * compute:.1f}", f"{1e3 * communicate:.1f}"]
        timed = (
            [(row, limit) for row, limit in _with_limit(found[len(measured) :]) if row["clock"] == "lab"]
            if kind == "step"
            else []
        )
        real = str(Figure.of([row["link"]["payload_seconds"] / limit for row, limit in timed])) if timed else "-"
        body.append([*cells, real, "step time" if kind == "step" else "accuracy"])
    header = ["link", "measured", "Mbit/s", "ms/step", "ms/payload", "while timed", "for"]
    return aligned([header, *body]) if body else ""


def _by_link(rows: Sequence[Row]) -> dict[tuple[float, str], list[Row]]:
    """The rows of every measured link, starting with its measurements."""
    found: dict[tuple[float, str], list[Row]] = {}
    begun: list[Row] = []
    for row in rows:
        if row["kind"] == "measured":
            begun.append(row)
        else:
            found.setdefault((row["ratio"], row["kind"]), []).extend([*begun, row])
            begun = []
    return {key: rows for key, rows in found.items() if rows[0]["kind"] == "measured"}


def accuracy_table(rows: Sequence[Row], baseline: str = "ddp") -> str:
    """Training seconds to the target, and the speedup over the baseline with the same seed."""
    ratios = links(rows, "accuracy")
    header = ["to the target accuracy", "reached"]
    for ratio in ratios:
        header += [f"s, r_1 = {ratio:g}", f"{CONTENDERS[baseline].label} / it"]
    body = []
    for name in CONTENDERS:
        mine = [row for row in rows if row["kind"] == "accuracy" and row["contender"] == name]
        if not mine:
            continue
        cells = [CONTENDERS[name].label, f"{sum(row['reached'] is not None for row in mine)} of {len(mine)}"]
        for ratio in ratios:
            times = reached(rows, name, ratio)
            cells.append(f"{statistics.median(times.values()):.1f}" if times else "never")
            speedup = accuracy_speedup(rows, ratio, baseline, name)
            cells.append("-" if speedup is None else str(speedup))
        body.append(cells)
    return aligned([header, *body]) if body else ""


def reached(rows: Sequence[Row], name: str, ratio: float) -> dict[int, float]:
    """seed -> seconds to the target, for seeds that reached it."""
    return {
        row["seed"]: row["reached"]
        for row in rows
        if row["kind"] == "accuracy" and row["contender"] == name and row["ratio"] == ratio and row["reached"] is not None
    }


def accuracy_speedup(rows: Sequence[Row], ratio: float, slower: str, faster: str) -> Figure | None:
    before, after = reached(rows, slower, ratio), reached(rows, faster, ratio)
    common = sorted(before.keys() & after.keys())
    return Figure.of([before[seed] / after[seed] for seed in common]) if common else None


def agreement_table(rows: Sequence[Row]) -> str:
    """Step time on the emulated link over that on the real link of the same bandwidth, each relative to its limit."""
    ratios = sorted(set(links(rows, "step", "emulated")) & set(links(rows, "step", "lab")))
    body = []
    for name in CONTENDERS:
        cells = []
        for ratio in ratios:
            pair = [ratio_of(over_limit(rows, ratio, clock), name, "none") for clock in ("emulated", "lab")]
            cells.append("-" if pair[0] is None or pair[1] is None else f"{pair[0].median / pair[1].median:.3f}")
        if name != "none" and any(cell != "-" for cell in cells):
            body.append([CONTENDERS[name].label, *cells])
    return aligned([["emulated / real link", *(f"r_1 = {ratio:g}" for ratio in ratios)], *body]) if body else ""


def predictions(rows: Sequence[Row], period: int, block: int, num_workers: int) -> str:
    """What the simulator predicts for the same links."""
    clock = clock_of(rows)
    facts, steps = {}, {}
    for (ratio, kind), found in _by_link(rows).items():
        measured = [row for row in found if row["kind"] == "measured"]
        known = facts_of(num_workers, measured, ratio)
        if kind == "step" and known is not None:
            facts[ratio], steps[ratio] = known, over_limit(rows, ratio, clock)
    names = [name for name in OURS if any(name in found for found in steps.values())]
    medians = {
        name: {ratio: Figure.of(list(found[name].values())).median for ratio, found in steps.items() if name in found}
        for name in names
    }
    return prediction_table(medians, facts, period, block) if facts else ""


def claims(rows: Sequence[Row], period: int) -> str:
    """The project's claims, as measured by this benchmark."""
    clock = clock_of(rows)
    ratios = links(rows, "step", clock)
    by_link = {ratio: over_limit(rows, ratio, clock) for ratio in ratios}
    body: list[list[str]] = []

    def say(what: str, figure: Figure | None) -> None:
        if figure is not None:
            body.append([what, f"{figure.median:.3f}", f"{figure.low:.3f} to {figure.high:.3f}", str(figure.n)])

    for ratio in ratios:
        if ratio <= 0.9 * period:
            say(f"cocod's step / the limit, r_1 = {ratio:g}", ratio_of(by_link[ratio], "cocod", "none"))
    for ratio in ratios:
        say(f"{_RECOMMENDED}'s step / the limit, r_1 = {ratio:g}", ratio_of(by_link[ratio], "cocod_ternary", "none"))
    for name, label in (("cocod", "cocod"), ("cocod_ternary", _RECOMMENDED)):
        for ratio in ratios:
            say(f"torch DDP's step / {label}'s, r_1 = {ratio:g}", ratio_of(by_link[ratio], "ddp", name))
    # Where the paper's rule just hides its average, and those that wait for it lose most.
    just_hidden = max((ratio for ratio in ratios if ratio <= period), default=None)
    if just_hidden is not None:
        for name in ("accelerate_local", "post_local", "local"):
            figure = ratio_of(by_link[just_hidden], name, "cocod")
            say(f"{CONTENDERS[name].label}'s step / cocod's, r_1 = {just_hidden:g}", figure)
    for ratio in links(rows, "accuracy"):
        for name, label in (("cocod", "cocod"), ("cocod_ternary", _RECOMMENDED)):
            speedup = accuracy_speedup(rows, ratio, "ddp", name)
            say(f"torch DDP's time to accuracy / {label}'s, r_1 = {ratio:g}", speedup)
    return aligned([["claim", "median", "quartiles", "n"], *body]) if body else ""


def summary(rows: Sequence[Row], settings: BenchSettings) -> str:
    """All tables, for a terminal."""
    period = settings.period
    parts = [measured_table(rows), step_table(rows), accuracy_table(rows), agreement_table(rows)]
    parts += [predictions(rows, period, settings.steps.steps, settings.num_workers), claims(rows, period)]
    label = "" if clock_of(rows) == "lab" else "emulated link: no network lab was used"
    return "\n\n".join(part for part in [label, *parts] if part)


# ------------------------------------------------------------------------------------------------ picture


def draw(rows: Sequence[Row], path: Path) -> None:
    """Step time over r_1, one line per contender."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    from cocod_accel.report.look import styles_of

    clock = clock_of(rows)
    ratios = links(rows, "step", clock)
    by_link = {ratio: over_limit(rows, ratio, clock) for ratio in ratios}
    names = [name for name in CONTENDERS if name != "none" and any(name in seconds for seconds in by_link.values())]
    styles = styles_of([CONTENDERS[name].label for name in names])
    picture = Picture(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.add_subplot()
    for name in names:
        style = styles[CONTENDERS[name].label]
        figures = [(ratio, ratio_of(by_link[ratio], name, "none")) for ratio in ratios]
        points = [(ratio, figure) for ratio, figure in figures if figure is not None]
        middle = [figure.median for _, figure in points]
        spread = [[f.median - f.low for _, f in points], [f.high - f.median for _, f in points]]
        axes.errorbar(
            [ratio for ratio, _ in points], middle, yerr=spread, color=style.colour, marker=style.marker, markersize=5,
            linestyle=(0, style.dash) if style.dash else "-", capsize=2, label=CONTENDERS[name].label,
            linewidth=2.2 if name == "cocod" else 1.3,
        )  # fmt: skip
    axes.axhline(1, color="#555555", linewidth=0.8, linestyle=":")
    axes.set_xlabel("r_1: time of one payload / time of one step without communication")
    axes.set_ylabel("step time / step time without communication")
    where = "a link limited by the kernel" if clock == "lab" else "an emulated link"
    axes.set_title(f"Two workers on {where}, median and quartiles", loc="left")
    axes.set_ylim(bottom=0.8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    picture.savefig(path, dpi=150)
