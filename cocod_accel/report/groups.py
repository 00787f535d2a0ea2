"""Compares runs: groups the seeds of one configuration, with mean, spread and count, against a baseline.

Runs form a group only if they differ in nothing that affects what they measure, except the seed. Two configurations are
never mixed, even with the same algorithm: their labels then name the keys in which they differ. An unfinished run forms
its own group, because its figures do not cover a whole run.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from cocod_accel.config.fields import Affects
from cocod_accel.config.settings import ACCURACY, may_differ
from cocod_accel.runs.reading import MEASURES, Run, time_to_target

#: Already part of every label.
_IN_LABEL = frozenset({"algorithm.name", "cluster.proportional"})
#: What must be equal for two groups' times to be comparable.
_SETTING_SECTIONS = ("task", "model", "emulate")
_SETTING_KEYS = frozenset({"cluster.num_workers"})
_LONGEST_VALUE = 24
_LONGEST_NAME = 100
#: Labels or keys that a note names; of more, it says how many.
_MOST_NAMED = 40
#: Preferred among keys that distinguish equally well.
_FIRST_TOLD = frozenset({"algorithm.period", "cluster.num_workers", "task.name", "model.name", "batch_size"})


@dataclass(frozen=True)
class Stat:
    """Mean and sample standard deviation of n values; a single value has no spread."""

    mean: float
    spread: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Stat:
        spread = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None
        return cls(math.fsum(values) / len(values), spread, len(values))


@dataclass
class Group:
    """Runs that differ only in their seed."""

    runs: list[Run]
    label: str = ""
    stats: dict[str, Stat] = field(default_factory=dict)
    #: Each run's seconds to the target; None: never reached.
    times: list[float | None] = field(default_factory=list)
    #: The baseline's mean time to the target over this group's; None if a run of either never reaches it.
    speedup: float | None = None
    #: Samples per second, relative to the baseline.
    throughput: float | None = None
    #: The label of the group it is compared with.
    baseline: str | None = None

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def num_reached(self) -> int:
        return sum(seconds is not None for seconds in self.times)

    @property
    def time(self) -> Stat | None:
        """Seconds to the target, if every run reached it."""
        reached = [seconds for seconds in self.times if seconds is not None]
        return Stat.of(reached) if reached and len(reached) == len(self.times) else None

    @property
    def has_learnt(self) -> bool:
        return self.first.has_learnt

    @cached_property
    def config(self) -> dict[str, str]:
        return compared(self.first)


@dataclass
class Comparison:
    """The result of ``cocod compare``."""

    groups: list[Group]
    #: The target accuracy; None: no run reached any of its targets.
    target: float | None
    #: Notes for the reader: what differs, what is missing.
    notes: list[str]

    def of(self, label: str | None) -> Group | None:
        return next((group for group in self.groups if group.label == label), None)

    @property
    def metric(self) -> str:
        """What ``accuracy`` stands for."""
        return next((group.first.metric for group in self.groups if group.has_learnt), ACCURACY)

    @property
    def title(self) -> str:
        """What is measured, in words."""
        return "test accuracy" if self.metric == ACCURACY else cut(self.metric.replace("_", " "), _LONGEST_NAME)

    def shown(self, value: float) -> str:
        """A value of the metric: an accuracy in percent."""
        return f"{100 * value:.2f}%" if self.metric == ACCURACY else f"{value:.4f}"

    @property
    def goal(self) -> str:
        """The target in words: an accuracy in percent."""
        assert self.target is not None
        return f"{100 * self.target:.4g}%" if self.metric == ACCURACY else f"{self.metric} {self.target:g}"

    @property
    def by_steps(self) -> bool:
        """Whether all runs count steps, of which an epoch may have more than a run takes."""
        return all(run.steps is not None for group in self.groups for run in group.runs)

    @property
    def has_learnt(self) -> bool:
        """Whether any group has an accuracy."""
        return any(group.has_learnt for group in self.groups)


def compare(runs: Sequence[Run], target: float | None = None, baseline: str | None = None) -> Comparison:
    """Group, measure and rank. ``baseline``: an algorithm, or the label of a group; default: ssgd, else the first group."""
    kinds = sorted({run.metric for run in runs if run.has_learnt})
    if len(kinds) > 1:
        raise ValueError(f"RUN: these measure different things ({', '.join(kinds)}); compare runs of one metric")
    if target is not None and kinds in ([], [ACCURACY]) and not 0 < target <= 1:
        raise ValueError(f"--target={target:g}: must be a share in (0, 1], e.g. 0.85")
    groups = grouped(runs)
    if target is None:
        target = common_target(runs)
    for group in groups:
        measures = [run.measures() for run in group.runs]
        group.stats = {key: Stat.of([values[key] for values in measures]) for key in MEASURES}
        group.times = [] if target is None else [time_to_target(run, target) for run in group.runs]
    _measure_against(groups, baseline)
    groups.sort(key=_rank)
    return Comparison(groups, target, _notes(groups, target))


def _rank(group: Group) -> tuple[bool, float, float, float]:
    """By time to the target, then by accuracy, then by speed."""
    time = math.inf if group.time is None or math.isnan(group.time.mean) else group.time.mean
    accuracy = group.first.score(group.stats["best_accuracy"].mean) if group.has_learnt else 0.0
    return (not group.first.is_finished, time, -accuracy, -group.stats["samples_per_second"].mean)


# ----------------------------------------------------------------------------------------------- grouping


def compared(run: Run) -> dict[str, str]:
    """The part of a run's configuration that all runs of a group share."""
    config = {key: value for key, value in run.config.items() if not may_differ(key, Affects.FIGURES)}
    if config.get("checkpoint.resume") in ("auto", "never"):  # anything else is a different starting point
        del config["checkpoint.resume"]
    return config


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Runs grouped by configuration and labelled, in the order given."""
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        alone = None if run.is_finished else str(run.source)
        key = (frozenset(compared(run).items()), run.clock, run.has_learnt, alone)
        groups.setdefault(key, []).append(run)
    result = [Group(members) for members in groups.values()]
    for group, label in zip(result, labels(result), strict=True):
        group.label = label
    return result


def labels(groups: Sequence[Group]) -> list[str]:
    """A unique label per group: algorithm, the keys in which groups of that algorithm differ, and its clock."""
    bases = [base_label(group.first) for group in groups]
    alike: dict[str, list[Mapping[str, str]]] = {}
    for group, base in zip(groups, bases, strict=True):
        alike.setdefault(base, []).append(group.config)
    keys = {base: telling_keys(configs) for base, configs in alike.items()}
    named = []
    for group, base in zip(groups, bases, strict=True):
        parts = [told(key, group.config[key]) for key in keys[base] if group.config.get(key, "None") != "None"]
        clock = [] if group.first.clock == "real" else [f"[{group.first.clock}]"]
        unfinished = [] if group.first.is_finished else ["(unfinished)"]
        named.append(" ".join([base, *parts, *clock, *unfinished]))
    counts = Counter(named)
    for label in [label for label, count in counts.items() if count > 1]:
        # Unfinished runs of one configuration, or values too long to tell apart.
        twins = [i for i, other in enumerate(named) if other == label]
        for number, twin in enumerate(twins, start=1):
            named[twin] = f"{label} {cut(groups[twin].first.name, _LONGEST_NAME)} #{number}"
    return named


def base_label(run: Run) -> str:
    return f"{cut(run.algorithm, _LONGEST_NAME)}{' + PS' if run.config['cluster.proportional'] == 'True' else ''}"


def telling_keys(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """A few keys that tell the configurations apart, chosen greedily."""
    keys = sorted(differing_keys(configs) - _IN_LABEL, key=lambda key: (key not in _FIRST_TOLD, key))
    wanted = len({tuple(config.get(key) for key in keys) for config in configs})
    chosen: list[str] = []
    while len({tuple(config.get(key) for key in chosen) for config in configs}) < wanted:
        chosen.append(max(keys, key=lambda key: len({tuple(c.get(k) for k in [*chosen, key]) for c in configs})))
    return chosen


def differing_keys(configs: Iterable[Mapping[str, str]]) -> set[str]:
    """The keys whose values differ."""
    seen = list(configs)
    return {key for key in {key for config in seen for key in config} if len({config.get(key) for config in seen}) > 1}


def cut(text: str, most: int) -> str:
    """A text as it is shown: whatever a run is called must not fill a page."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def told(key: str, value: str) -> str:
    """A key and its value, abbreviated: ``4 workers``, ``vgg16``, ``period=5``."""
    last = cut(key.split(".")[-1], _LONGEST_VALUE)
    short = cut(value, _LONGEST_VALUE)
    if key == "cluster.num_workers":
        return f"{short} worker{'' if value == '1' else 's'}"
    return short if last == "name" else f"{last}={short}"


# --------------------------------------------------------------------------------- targets and baselines


def common_target(runs: Sequence[Run]) -> float | None:
    """The highest of the runs' targets that all runs with an accuracy reached, else the highest that any did."""
    runs = [run for run in runs if run.has_learnt]
    targets = {target for run in runs for target in run.targets}
    reached = {target: [time_to_target(run, target) is not None for run in runs] for target in targets}
    by_all = [target for target, those in reached.items() if all(those)]
    by_any = [target for target, those in reached.items() if any(those)]
    return max(by_all or by_any, key=runs[0].score if runs else None, default=None)


def setting(group: Group, without: frozenset[str] = frozenset()) -> frozenset[tuple[str, str]]:
    """What two groups must share for their times to be comparable."""
    config = {key: value for key, value in group.config.items() if key not in without}
    kept = {key: value for key, value in config.items() if key.split(".")[0] in _SETTING_SECTIONS or key in _SETTING_KEYS}
    return frozenset({**kept, "clock": group.first.clock}.items())


def _measure_against(groups: Sequence[Group], baseline: str | None) -> None:
    """Set each group's speedup: over the most similar baseline group in its setting, or over one named group."""
    if baseline is None:
        bases = [base_label(group.first) for group in groups]
        baseline = "ssgd" if "ssgd" in bases else bases[0]
    of_algorithm = [group for group in groups if base_label(group.first) == baseline]
    by_label = [group for group in groups if group.label == baseline]
    if not of_algorithm and not by_label:
        known = sorted({base_label(group.first) for group in groups} | {group.label for group in groups})
        raise ValueError(f"--baseline={baseline}: matches no run; choose from {', '.join(known)}")
    settings = {id(group): setting(group) for group in groups}
    for group in groups:
        alike = [other for other in of_algorithm if settings[id(other)] == settings[id(group)]]
        candidates = alike if of_algorithm else by_label
        if not candidates:
            continue
        other = min(candidates, key=lambda o: (not o.first.is_finished, len(differing_keys([o.config, group.config]))))
        group.baseline = other.label
        own, others = (these.stats["samples_per_second"].mean for these in (group, other))
        group.throughput = own / others if others > 0 and math.isfinite(own / others) else None
        if group.time is not None and other.time is not None and group.time.mean > 0:
            ratio = other.time.mean / group.time.mean
            group.speedup = ratio if math.isfinite(ratio) else None


def _listed(names: Sequence[str]) -> str:
    shown = [cut(name, _LONGEST_NAME) for name in names[:_MOST_NAMED]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _notes(groups: Sequence[Group], target: float | None) -> list[str]:
    by_clock: dict[str, list[str]] = {}
    for group in groups:
        run = group.first
        if run.clock != "real":
            by_clock.setdefault(f"{run.clock}{f' ({run.emulated})' if run.emulated else ''}", []).append(group.label)
    notes = [f"{cut(clock, 300)}: {_listed(named)}" for clock, named in by_clock.items()]
    if any(group.first.clock == "simulated" for group in groups):
        notes.append("spans of simulated runs cover only some steps and workers, from the middle of the run")
    for group in groups:
        if not group.first.is_finished:
            epoch = group.first.evaluations[-1].get("epoch", "?")
            notes.append(
                f"{group.label}: {group.first.name} was evaluated after epoch {epoch} of {group.first.epochs}; its figures "
                "stop there, and communication is worker 0's"
            )
        seeds = [run.seed for run in group.runs]
        if len(set(seeds)) < len(seeds):
            notes.append(f"{group.label}: has runs with the same seed ({_listed(seeds)}); they differ only in time")
    notes += [run.note for group in groups for run in group.runs if run.note]
    others = differing_keys([group.config for group in groups]) - _IN_LABEL
    if others:
        notes.append(f"configurations also differ in {_listed(sorted(others))}")
    if len({setting(group) for group in groups}) > 1:
        notes.append("speedups compare only runs with the same task, model, number of workers and emulation")
    if not any(group.has_learnt for group in groups):
        notes.append("simulated without learning, so there is no accuracy; rows are sorted by samples per second")
    elif target is None:
        notes.append("no run reached any of its targets; pass --target to get a time to accuracy")
    return notes
