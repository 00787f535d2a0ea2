"""The comparison as a table: one definition of its columns for the terminal, Markdown, CSV and the page."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cocod_accel.config.settings import ACCURACY
from cocod_accel.report.groups import Comparison, Group, Stat, setting
from cocod_accel.runs.reading import MEASURES, is_number, time_to_target
from cocod_accel.runs.tables import aligned


@dataclass(frozen=True)
class Column:
    """A column: its header, what it means, and a group's cell as text and as a number to sort by (nan: none)."""

    header: str
    meaning: str
    text: Callable[[Group], str]
    value: Callable[[Group], float | str]


def columns(comparison: Comparison) -> list[Column]:
    """The columns of a comparison; those about a target only if there is one."""

    def measure(header: str, meaning: str, key: str, show: Callable[[float], str], factor: float = 1.0) -> Column:
        def text(group: Group) -> str:
            return with_spread(group.stats[key], show, factor)

        return Column(header, meaning, text, lambda group: group.stats[key].mean)

    result = [
        Column("run", "algorithm, and the settings in which it differs", lambda g: g.label, lambda g: g.label),
        Column("n", "runs of this configuration, one per seed", lambda g: str(len(g.runs)), lambda g: len(g.runs)),
        Column("workers", "number of workers", lambda g: str(g.first.num_workers), lambda g: g.first.num_workers),
    ]
    if comparison.target is not None and comparison.has_learnt:
        goal = comparison.goal
        side = "below" if comparison.groups[0].first.is_lower_better else "above"
        result += [
            Column(f"s to {goal}", f"training seconds at the first evaluation at or {side} {goal}", time_text, _time_value),
            Column("speedup", f"the baseline's mean seconds to {goal} over this row's", speedup_text, _speedup_value),
        ]
    if comparison.has_learnt and comparison.metric != ACCURACY:
        name = comparison.metric
        result += [
            measure(f"best {name}", f"best {name} of the averaged model on the test set", "best_accuracy", _four),
            measure(f"final {name}", f"{name} at the end", "final_accuracy", _four),
        ]
    elif comparison.has_learnt:
        result += [
            measure("best %", "best test accuracy of the averaged model", "best_accuracy", _two, 100),
            measure("final %", "test accuracy at the end", "final_accuracy", _two, 100),
        ]
    else:
        result += [
            Column("ms/step", "training seconds over worker 0's steps", _step_text, _step_milliseconds),
            Column("faster", "samples per second, relative to the baseline", _throughput_text, _throughput_value),
        ]
    late = [group for group in comparison.groups if not math.isnan(_staleness(group))]
    if late:
        meaning = "updates between the model that a gradient is of and the one that it is applied to, in the mean"
        result.append(Column("staleness", meaning, _staleness_text, _staleness))
    return [
        *result,
        measure("training s", "training seconds of the slowest worker, evaluation excluded", "train_seconds", _one),
        measure("samples/s", "training samples per second, all workers together", "samples_per_second", _none),
        measure("MB sent", "sent by one worker", "comm_bytes", _one, 1e-6),
        measure("exposed s", "time blocked by communication, worst worker", "comm_exposed_seconds", _one),
        measure("hidden s", "time communication overlapped computation, worst worker", "comm_hidden_seconds", _one),
    ]


# --------------------------------------------------------------------------------------------- one cell


def _none(value: float) -> str:
    return f"{value:.0f}"


def _one(value: float) -> str:
    return f"{value:.1f}"


def _two(value: float) -> str:
    return f"{value:.2f}"


def _four(value: float) -> str:
    return f"{value:.4f}"


def with_spread(stat: Stat, show: Callable[[float], str], factor: float = 1.0) -> str:
    """``15.5 ±0.4``; no spread for a single value, or if it rounds to zero; ``-``: unknown."""
    if math.isnan(stat.mean):
        return "-"
    spread = "" if stat.spread is None else show(stat.spread * factor)
    return show(stat.mean * factor) + (f" ±{spread}" if spread.strip("0.") else "")


def time_text(group: Group) -> str:
    """Seconds to the target; ``never``; or how many runs reached it, if not all did."""
    if not group.has_learnt:
        return "-"
    if group.time is not None:
        return "?" if math.isnan(group.time.mean) else with_spread(group.time, _one)
    return "never" if group.num_reached == 0 else f"{group.num_reached} of {len(group.times)}"


def _time_value(group: Group) -> float:
    return math.nan if group.time is None else group.time.mean


def _step_milliseconds(group: Group) -> float:
    steps = (group.first.summary or {}).get("steps")
    return 1e3 * group.stats["train_seconds"].mean / steps if steps else math.nan


def _step_text(group: Group) -> str:
    milliseconds = _step_milliseconds(group)
    return "-" if math.isnan(milliseconds) else _one(milliseconds)


def _staleness(group: Group) -> float:
    """nan: of algorithms without a server, and of runs that have not ended."""
    found = [(run.summary or {}).get("staleness") for run in group.runs]
    known = [float(value) for value in found if value is not None and is_number(value)]
    return math.fsum(known) / len(known) if known else math.nan


def _staleness_text(group: Group) -> str:
    staleness = _staleness(group)
    return "-" if math.isnan(staleness) else _one(staleness)


def _throughput_text(group: Group) -> str:
    return "-" if group.throughput is None else f"{group.throughput:.2f}x"


def _throughput_value(group: Group) -> float:
    return math.nan if group.throughput is None else group.throughput


def speedup_text(group: Group) -> str:
    return "-" if group.speedup is None else f"{group.speedup:.2f}x"


def _speedup_value(group: Group) -> float:
    return math.nan if group.speedup is None else group.speedup


def percent(share: float) -> str:
    return f"{100 * share:.4g}%"


# -------------------------------------------------------------------------------------------- the whole


def cells(comparison: Comparison) -> list[list[str]]:
    """Header and rows as text."""
    shown = columns(comparison)
    return [[column.header for column in shown]] + [[column.text(group) for column in shown] for group in comparison.groups]


def terminal(comparison: Comparison) -> str:
    """For a terminal: the table, the verdicts and the notes."""
    return "\n".join([aligned(cells(comparison)), *verdicts(comparison), *comparison.notes])


def markdown(comparison: Comparison) -> str:
    header, *rows = [[cell.replace("\\", "\\\\").replace("|", "\\|") for cell in row] for row in cells(comparison)]
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    said = [*verdicts(comparison), *comparison.notes]
    return table + "\n" + "".join(f"\n* {line}" for line in said) + ("\n" if said else "")


def results_csv(comparison: Comparison) -> str:
    """One row per group, full precision: every mean and its spread in separate columns."""
    header = [
        "run",
        "n",
        "workers",
        "clock",
        "target",
        "num_reached",
        "seconds_to_target",
        "seconds_to_target_spread",
        "speedup",
    ]
    header += ["baseline", *(name for key in MEASURES for name in (key, f"{key}_spread")), "members"]
    rows: list[list[object]] = []
    for group in comparison.groups:
        time = group.time
        rows.append(
            [
                group.label,
                len(group.runs),
                group.first.num_workers,
                group.first.clock,
                comparison.target,
                group.num_reached,
                None if time is None else time.mean,
                None if time is None else time.spread,
                group.speedup,
                group.baseline,
                *(value for key in MEASURES for value in (group.stats[key].mean, group.stats[key].spread)),
                " ".join(run.name for run in group.runs),
            ]
        )
    return _csv(_named(header, comparison), rows)


def _named(header: Sequence[str], comparison: Comparison) -> list[str]:
    """Columns of an accuracy under the name of what they hold."""
    return [name.replace(ACCURACY, comparison.metric) for name in header]


def runs_csv(comparison: Comparison) -> str:
    """One row per run."""
    header = ["name", "run", "seed", "workers", "clock", "is_finished", "target", "seconds_to_target", *MEASURES]
    rows: list[list[object]] = []
    for label, run in ((group.label, run) for group in comparison.groups for run in group.runs):
        seconds = None if comparison.target is None else time_to_target(run, comparison.target)
        measures = run.measures()
        values = [measures[key] for key in MEASURES]
        identity = [run.name, label, run.seed, run.num_workers, run.clock, run.is_finished]
        rows.append([*identity, comparison.target, seconds, *values])
    return _csv(_named(header, comparison), rows)


def _csv(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow(["" if value is None or value != value else _as_text(value) for value in row])
    return buffer.getvalue()


def _as_text(value: object) -> object:
    """Names as a spreadsheet may open them: what begins like a formula would be computed, so it gets a quote before it."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def verdicts(comparison: Comparison) -> list[str]:
    """Which group reaches the target first, by how much, and why; for several settings, one line each."""
    if comparison.target is None and comparison.has_learnt:
        return []
    settings: dict[frozenset[tuple[str, str]], list[Group]] = {}
    for group in comparison.groups:
        if comparison.has_learnt and not group.has_learnt:
            continue
        settings.setdefault(setting(group), []).append(group)
    said = []
    for groups in settings.values():
        first = groups[0].first
        where = f"{first.config['task.name']}, {first.config['model.name']}, {first.num_workers} workers"
        prefix = f"{where}{'' if first.clock == 'real' else f', {first.clock}'}: "
        verdict = _verdict(comparison, groups) if comparison.has_learnt else _speed_verdict(comparison, groups)
        lines = verdict if len(groups) > 1 else []
        said += lines if len(settings) == 1 else [prefix + line for line in lines[:1]]
    return said


def _verdict(comparison: Comparison, groups: Sequence[Group]) -> list[str]:
    assert comparison.target is not None
    goal, first = comparison.goal, groups[0]  # ranked
    if first.time is None or math.isnan(first.time.mean):
        return [f"no configuration reaches {goal} in all its runs"]
    line = f"{first.label} reaches {goal} first, after {with_spread(first.time, _one)} s"
    baseline = comparison.of(first.baseline)
    if baseline is first:
        others = [group for group in groups[1:] if group.time is not None]
        if not others:
            return [f"{line}; no other reaches it in all its runs"]
        return [f"{line}; next {others[0].label}, {time_text(others[0])} s"]
    lines = [line]
    if baseline is not None and first.speedup is not None:
        lines = [
            f"{line}: {first.speedup:.2f} times as fast as {baseline.label}; final {comparison.metric} {_final(first)}, "
            f"{baseline.label}'s {_final(baseline)}",
            f"waiting for communication: {_share(first)} of its training time, {_share(baseline)} of {baseline.label}'s",
        ]
    close = [group.label for group in groups[1:] if _overlaps(first, group)]
    return lines + ([f"within the spread over seeds: {', '.join(close)}"] if close else [])


def _speed_verdict(comparison: Comparison, groups: Sequence[Group]) -> list[str]:
    """For runs without learning: which trains the most samples per second."""
    first = groups[0]  # ranked
    line = f"{first.label} trains the most samples per second, {first.stats['samples_per_second'].mean:.0f}"
    baseline = comparison.of(first.baseline)
    if baseline is None or baseline is first or first.throughput is None:
        return [line]
    return [
        f"{line}: {first.throughput:.2f} times as many as {baseline.label}",
        f"waiting for communication: {_share(first)} of its training time, {_share(baseline)} of {baseline.label}'s",
    ]


def _final(group: Group) -> str:
    if not group.first.is_share:
        return with_spread(group.stats["final_accuracy"], _four)
    return f"{with_spread(group.stats['final_accuracy'], _two, 100)}%"


def _share(group: Group) -> str:
    return f"{group.stats['comm_exposed_seconds'].mean / group.stats['train_seconds'].mean:.0%}"


def _overlaps(first: Group, other: Group) -> bool:
    """Whether two mean times are no further apart than the larger of their spreads."""
    if first.time is None or other.time is None:
        return False
    return other.time.mean - first.time.mean <= max(first.time.spread or 0.0, other.time.spread or 0.0)
