"""The curves behind the figures: a group's mean over its seeds, and the speedup over the number of workers."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cocod_accel.report.groups import Group, Stat, base_label, setting, telling_keys, told
from cocod_accel.runs.reading import Run, is_number

Row = Mapping[str, Any]

#: Keys that change along with the number of workers.
_BY_WORKERS = frozenset({"cluster.num_workers", "cluster.speeds", "cluster.global_batch", "emulate.slowdown"})


@dataclass(frozen=True)
class Point:
    """One evaluation, or the mean of one evaluation over seeds."""

    epoch: float
    seconds: float
    num_bytes: float
    accuracy: float
    train_loss: float
    accuracy_spread: float = 0.0
    train_loss_spread: float = 0.0
    step: float = math.nan

    def at(self, by_steps: bool) -> float:
        """Where in the run it is: its step or its epoch."""
        return self.step if by_steps else self.epoch


def sampled(rows: Sequence[Row], run: Run, kind: str, every: int) -> Sequence[Row]:
    """A run's rows of a kind, one of ``every``: seeds of which others were kept are compared evaluation by evaluation."""
    return rows[:: max(every // run.every.get(kind, 1), 1)]


def coarsest(runs: Sequence[Run], kind: str) -> int:
    """Of how many rows one was kept, of the run of which fewest were."""
    return max(run.every.get(kind, 1) for run in runs)


def points(run: Run, every: int = 1) -> list[Point]:
    """A run's evaluations; bytes sent so far are interpolated between its training rows."""
    result = []
    sent = sent_until(run)
    for row in sampled(run.evaluations, run, "eval", every):
        if is_number(row.get("train_seconds")):
            result.append(
                Point(
                    epoch=float(row.get("epoch", math.nan)),
                    seconds=float(row["train_seconds"]),
                    num_bytes=interpolated(float(row.get("step", math.nan)), sent),
                    accuracy=float(row["accuracy"]),
                    train_loss=float(row["train_loss"]) if is_number(row.get("train_loss")) else math.nan,
                    step=float(row["step"]) if is_number(row.get("step")) else math.nan,
                )
            )
    return result


def sent_until(run: Run) -> list[tuple[float, float]]:
    """(step, bytes), increasing in step."""
    known: dict[float, float] = {0.0: 0.0}
    for row in run.training:
        if is_number(row.get("comm_bytes")) and is_number(row.get("step")):
            known[float(row["step"])] = float(row["comm_bytes"])
    last = [row for row in run.rows if is_number(row.get("step"))]
    if run.summary is not None and last:
        known[float(last[-1]["step"])] = float(run.summary["comm_bytes"])
    return sorted(known.items())


def epochs_of_steps(run: Run) -> list[tuple[float, float]]:
    """(step, epoch) at evaluations, extrapolated to the last row at the same pace."""
    known = [(0.0, 0.0)]
    known += [
        (float(r["step"]), float(r["epoch"]))
        for r in run.evaluations
        if is_number(r.get("step")) and is_number(r.get("epoch"))
    ]
    last = max((float(row["step"]) for row in run.rows if is_number(row.get("step"))), default=0.0)
    if len(known) > 1 and last > known[-1][0] > 0:
        known.append((last, known[-1][1] * last / known[-1][0]))
    return known


def interpolated(x: float, known: Sequence[tuple[float, float]]) -> float:
    """Linear interpolation between known points; constant beyond them."""
    index = bisect_left(known, x, key=lambda point: point[0])
    if math.isnan(x) or not known:
        return math.nan
    if index == 0 or index == len(known):
        return known[min(index, len(known) - 1)][1]
    (left, low), (right, high) = known[index - 1], known[index]
    return low + (high - low) * (x - left) / (right - left)


def mean_points(group: Group) -> list[Point]:
    """The mean over seeds, evaluation by evaluation, up to the last one that every seed has."""
    result = []
    every = coarsest(group.runs, "eval")
    for same in zip(*(points(run, every) for run in group.runs), strict=False):
        accuracy, loss = Stat.of([p.accuracy for p in same]), Stat.of([p.train_loss for p in same])
        result.append(
            Point(
                epoch=same[0].epoch,
                seconds=Stat.of([p.seconds for p in same]).mean,
                num_bytes=Stat.of([p.num_bytes for p in same]).mean,
                accuracy=accuracy.mean,
                train_loss=loss.mean,
                accuracy_spread=accuracy.spread or 0.0,
                train_loss_spread=loss.spread or 0.0,
                step=same[0].step,
            )
        )
    return result


# ------------------------------------------------------------------------------------- number of workers


@dataclass(frozen=True)
class Scaling:
    """Time speedup over the number of workers, relative to one group (figure 4 of the paper)."""

    #: The group with speedup 1.
    reference: str
    #: Series by name: (workers, speedup).
    series: Mapping[str, Sequence[tuple[int, float]]]
    num_reference_workers: int
    #: What no communication and no waiting would give, where that is not the number of workers.
    ideal: Mapping[int, float] | None = None

    @property
    def linear(self) -> list[tuple[int, float]]:
        counts = sorted({workers for found in self.series.values() for workers, _ in found})
        return [(n, n / self.num_reference_workers if self.ideal is None else self.ideal[n]) for n in counts]


def scaling(groups: Sequence[Group], baseline: str | None = None) -> Scaling | None:
    """The reference's seconds per epoch over each group's; None if all groups have the same number of workers.

    Only groups with the same task, model and emulation are compared: the set with the most worker counts. The reference
    is the group with the fewest workers, with the baseline's algorithm if there are several. On one worker all
    algorithms are the same, so every curve starts there.
    """
    alike: dict[frozenset[tuple[str, str]], list[Group]] = {}
    for group in groups:
        if group.first.is_finished:
            alike.setdefault(setting(group, without=_BY_WORKERS), []).append(group)
    whole = max(alike.values(), key=lambda those: len({group.first.num_workers for group in those}), default=[])
    if len({group.first.num_workers for group in whole}) < 2:
        return None
    fewest = min(group.first.num_workers for group in whole)
    smallest = [group for group in whole if group.first.num_workers == fewest]
    reference = next((group for group in smallest if base_label(group.first) == (baseline or "ssgd")), smallest[0])
    per_epoch = _epoch_seconds(reference)
    series: dict[str, list[tuple[int, float]]] = {}
    for name, group in sorted(zip(_series_names(whole), whole, strict=True), key=lambda pair: pair[1].first.num_workers):
        series.setdefault(name, []).append((group.first.num_workers, per_epoch / _epoch_seconds(group)))
    if fewest == 1:
        series = {name: found if found[0][0] == 1 else [(1, 1.0), *found] for name, found in series.items()}
    where = f"{base_label(reference.first)} on {fewest} worker{'s' if fewest > 1 else ''}"
    return Scaling(where, dict(sorted(series.items())), fewest)


def _epoch_seconds(group: Group) -> float:
    return group.stats["train_seconds"].mean / group.first.epochs


def _series_names(groups: Sequence[Group]) -> list[str]:
    """Labels without the keys that change along with the number of workers."""
    alike: dict[str, list[dict[str, str]]] = {}
    for group in groups:
        kept = {key: value for key, value in group.config.items() if key not in _BY_WORKERS}
        alike.setdefault(base_label(group.first), []).append(kept)
    keys = {base: telling_keys(configs) for base, configs in alike.items()}
    names = []
    for group in groups:
        base = base_label(group.first)
        parts = [told(key, group.config[key]) for key in keys[base] if group.config.get(key, "None") != "None"]
        clock = [] if group.first.clock == "real" else [f"[{group.first.clock}]"]
        names.append(" ".join([base, *parts, *clock]))
    return names
