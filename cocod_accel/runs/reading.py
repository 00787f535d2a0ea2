"""What a run has left behind, read back: configuration, rows and summary.

Everything that compares runs starts from :class:`Run`. A run that was killed has no summary and may end in half a row;
what it wrote until then still counts, and it says that it is unfinished.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf

from cocod_accel.config.loading import flattened, modernised
from cocod_accel.config.settings import ACCURACY, DEFAULT_EPOCHS, Config
from cocod_accel.config.strict import ConfigError, first_line, printable, tree_of
from cocod_accel.runs.files import read_json, read_text, rows_of

#: Any of these makes a folder a run folder.
_MARKS = ("summary.json", "metrics.jsonl", "config.yaml")
#: How deep below a given folder run folders are looked for.
_DEPTH = 3

#: What is compared, each a number per run.
MEASURES = (
    "best_accuracy",
    "final_accuracy",
    "train_seconds",
    "samples_per_second",
    "comm_bytes",
    "comm_exposed_seconds",
    "comm_hidden_seconds",
)
#: Those that a run without learning has not.
_LEARNT = ("best_accuracy", "final_accuracy")
#: What a row may hold as a number.
_COUNTED = ("step", "epoch", "loss", "accuracy", "train_loss", "train_seconds", *MEASURES)
#: And what else of a row is compared.
_KEPT = frozenset({"kind", "simulated", "emulated", *_COUNTED})
_CLOCKS = ("real", "emulated", "simulated")
#: No run measures more than this of anything, and sums and squares of it stay finite.
_LARGEST = 1e100
#: Of a run's training rows, and of its evaluations, which are drawn; of longer runs they are thinned out.
MOST_ROWS = 100_000
_LARGEST_CONFIG = 1 << 22
_DEEPEST_CONFIG, _MOST_SETTINGS = 100, 2000


@dataclass(frozen=True)
class Run:
    """One run: where it came from, how it was configured, what it measured."""

    name: str
    #: The run folder.
    source: Path
    #: Resolved and flat, values as text, with defaults for settings newer than the run.
    config: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]
    #: ``summary.json``; None: the run has not ended, or was killed.
    summary: Mapping[str, Any] | None
    #: What of it could not be read, for the reader to know.
    note: str | None = None
    #: (score, training seconds) of every evaluation that was better than all before; None: all are in the rows.
    records: Sequence[tuple[float, float]] | None = None
    #: By kind: of how many rows one was kept, a power of two.
    every: Mapping[str, int] = field(default_factory=dict)
    #: What its ``accuracy``, here and in what is made of it, really is: the metric that its targets are of.
    metric: str = ACCURACY
    is_lower_better: bool = False

    @property
    def is_share(self) -> bool:
        """Whether it is an accuracy, shown in percent."""
        return self.metric == ACCURACY

    def score(self, value: float) -> float:
        """A number that is the higher, the better."""
        return -value if self.is_lower_better else value

    @property
    def is_finished(self) -> bool:
        return self.summary is not None

    @property
    def algorithm(self) -> str:
        return self.config["algorithm.name"]

    @property
    def num_workers(self) -> int:
        return int(self.config["cluster.num_workers"])

    @property
    def epochs(self) -> int:
        """Passes over the data; of an unfinished run of ``schedule.steps``, those begun until now."""
        stated, ended = self.config["schedule.epochs"], cast(Any, (self.summary or {}).get("epochs"))
        if stated != "None":
            return int(stated)
        begun = [row["epoch"] for row in self.rows if is_number(row.get("epoch"))]
        return int(ended) if is_number(ended) and ended >= 1 else max(math.ceil(max(begun, default=1)), 1)

    @property
    def steps(self) -> int | None:
        """``schedule.steps``; None: the run counts epochs."""
        stated = self.config["schedule.steps"]
        return int(stated) if stated.isdecimal() else None

    @property
    def seed(self) -> str:
        return self.config["seed"]

    @property
    def clock(self) -> str:
        """real, emulated or simulated: what its seconds are."""
        if self.summary is not None and "clock" in self.summary:
            return printable(self.summary["clock"])
        return next((clock for clock in ("simulated", "emulated") if any(row.get(clock) for row in self.rows)), "real")

    @property
    def emulated(self) -> str | None:
        """What was emulated or simulated, in words."""
        said = (self.summary or {}).get("emulated")
        return printable(said) if said else None

    @property
    def targets(self) -> list[float]:
        """The accuracies whose time was to be measured. ValueError, if they are none."""
        listed = (self.summary or {}).get("time_to_accuracy") or self.config["evaluation.targets"]
        try:
            times = [] if isinstance(listed, str) else listed.values()
            if all(seconds is None or is_number(seconds) for seconds in times):
                return [float(target) for target in (json.loads(listed) if isinstance(listed, str) else listed)]
        except (AttributeError, TypeError, ValueError, RecursionError):
            pass
        raise ValueError(f"its targets are {_cut(listed)}, not a list of accuracies")

    @property
    def has_learnt(self) -> bool:
        """Whether there is, or may be, an accuracy: a simulated run may be of time alone."""
        return self.summary is None or self.summary.get("best_accuracy") is not None

    @property
    def evaluations(self) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if row.get("kind") == "eval" and is_number(row.get("accuracy"))]

    @property
    def training(self) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if row.get("kind") == "train"]

    def measures(self) -> dict[str, float]:
        """:data:`MEASURES` of this run; an unfinished one's are those until now, communication being worker 0's."""
        if self.summary is not None:
            return {key: math.nan if self.summary[key] is None else float(self.summary[key]) for key in MEASURES}
        last: dict[str, Any] = {}
        for row in self.rows:
            last.update({key: value for key, value in row.items() if is_number(value)})
        accuracies = [float(row["accuracy"]) for row in self.evaluations]
        return {
            **{key: float(last.get(key, math.nan)) for key in MEASURES},
            "best_accuracy": max(
                [*accuracies, *(self.score(score) for score, _ in self.records or ())], key=self.score, default=math.nan
            ),
            "final_accuracy": accuracies[-1] if accuracies else math.nan,
        }


def is_number(value: object) -> bool:
    """Whether it is one that can be computed with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST  # nor nan


def _note_record(records: list[tuple[float, float]], evaluation: Mapping[str, Any], sign: int = 1) -> None:
    """Keep an evaluation that is better than all before it."""
    accuracy: Any = evaluation.get("accuracy")
    seconds: Any = evaluation.get("train_seconds")
    if is_number(accuracy) and is_number(seconds) and (not records or sign * accuracy > records[-1][0]):
        records.append((float(sign * accuracy), float(seconds)))


def time_to_target(run: Run, target: float) -> float | None:
    """Training seconds at the first evaluation at or above ``target``; None: never; nan: reached, but nobody knows when."""
    evaluations = run.evaluations
    records = run.records
    if records is None:
        records = []
        for row in evaluations:
            _note_record(records, row, -1 if run.is_lower_better else 1)
    first = bisect_left(records, run.score(target), key=lambda record: record[0])
    if first < len(records):
        return records[first][1]
    if evaluations or run.summary is None:
        return None
    known = run.summary.get("time_to_accuracy") or {}
    if f"{target:g}" in known:
        seconds = known[f"{target:g}"]
        return None if seconds is None else float(seconds)
    return None if not run.has_learnt or run.score(run.summary["best_accuracy"]) < run.score(target) else math.nan


# ------------------------------------------------------------------------------------------------ reading


def find_runs(path: Path) -> list[Path]:
    """The run folder given, or those below a folder of them, in the order of their names."""
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder; give run folders of cocod train, or a folder that contains them")
    found = _below(path, _DEPTH)
    if not found:
        raise ValueError(f"{path}: is not a run folder and contains none; give run folders of cocod train")
    return found


def _below(path: Path, depth: int) -> list[Path]:
    if any((path / mark).is_file() for mark in _MARKS):
        return [path]
    if depth == 0:
        return []
    try:
        children = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    except OSError:  # whoever reads it as a run will say so
        return [path]
    return [found for child in children for found in _below(child, depth - 1)]


def read_run(folder: Path, most_rows: int = MOST_ROWS) -> Run:
    """One run folder, for comparisons. ValueError, of one line, if nothing in it can be compared.

    Of its training rows, and of its evaluations, no more than about ``most_rows`` are kept, evenly spread.
    """
    config, summary = _read_identity(folder)
    metric, is_lower = _metric_of(summary)
    kinds = {kind: _Thinned(most_rows) for kind in ("train", "eval", "")}
    records: list[tuple[float, float]] = []
    num_broken = 0
    with contextlib.suppress(FileNotFoundError):
        for number, row in enumerate(rows_of(folder / "metrics.jsonl")):
            if row is not None and "metric" in row:
                metric, is_lower = _metric_of(row)
                row = {**row, "accuracy": row.get(metric)}
            if row is None or not _is_plain(row):
                num_broken += 1
                continue
            kept = {sys.intern(key): value for key, value in row.items() if key in _KEPT}
            kind = str(kept.get("kind")) if kept.get("kind") in ("train", "eval") else ""
            kinds[kind].add(number, kept)
            if kind == "eval":
                _note_record(records, kept, -1 if is_lower else 1)
    rows = [row for _, row in sorted((pair for found in kinds.values() for pair in found.rows), key=itemgetter(0))]
    every = {kind: found.every for kind, found in kinds.items()}
    summary, note = _as_accuracy(summary, metric), _note(folder, num_broken)
    name = printable(folder.name)
    return checked(Run(name, folder, config, rows, summary, note, records, every, printable(metric), is_lower))


def _metric_of(tree: Mapping[str, Any] | None) -> tuple[str, bool]:
    """The metric that a row or a summary is about, and whether it is better the lower it is."""
    name = (tree or {}).get("metric")
    return (name, (tree or {}).get("better") == "lower") if isinstance(name, str) else (ACCURACY, False)


def _as_accuracy(summary: dict[str, Any] | None, metric: str) -> dict[str, Any] | None:
    """With the names of classification, by which readers know what is compared."""
    if summary is None or metric == ACCURACY:
        return summary
    return {**summary, **{f"{what}_{ACCURACY}": summary.get(f"{what}_{metric}") for what in ("best", "final", "time_to")}}


class _Thinned:
    """Evenly spread rows of a sequence whose length nobody knows, and the last one."""

    def __init__(self, most: int) -> None:
        self._most, self.every, self._count = max(most, 2), 1, 0
        self._kept: list[tuple[int, dict[str, Any]]] = []
        self._last: tuple[int, dict[str, Any]] | None = None

    def add(self, number: int, row: dict[str, Any]) -> None:
        self._last = number, row
        if self._count % self.every == 0:
            self._kept.append(self._last)
        self._count += 1
        if len(self._kept) > self._most:
            self._kept, self.every = self._kept[::2], 2 * self.every

    @property
    def rows(self) -> list[tuple[int, dict[str, Any]]]:
        is_kept = self._last is None or self._kept[-1] is self._last
        return self._kept if is_kept or self._last is None else [*self._kept, self._last]


def _is_plain(row: Mapping[str, Any]) -> bool:
    """Whether what is counted is a number, or none."""
    return all(row.get(key) is None or isinstance(row[key], float) or is_number(row[key]) for key in _COUNTED)


def read_parts(folder: Path) -> Run:
    """Whatever a run folder has until now."""
    config, summary = _read_identity(folder)
    rows, num_broken = read_rows(folder / "metrics.jsonl")
    metric, is_lower = _metric_of(next((row for row in rows if "metric" in row), summary))
    rows = [{**row, "accuracy": row.get(metric)} if "metric" in row else row for row in rows]
    plain = [row for row in rows if _is_plain(row)]
    note = _note(folder, num_broken + len(rows) - len(plain))
    summary, name = _as_accuracy(summary, metric), printable(folder.name)
    return Run(name, folder, config, plain, summary, note, metric=printable(metric), is_lower_better=is_lower)


def _read_identity(folder: Path) -> tuple[dict[str, str], dict[str, Any] | None]:
    """The configuration and, if there is one, the summary."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give the folder of a run")
    if not any((folder / mark).is_file() for mark in _MARKS):
        raise ValueError(f"{folder}: is not a run folder; give one of cocod train")
    summary = read_summary(folder) if (folder / "summary.json").exists() else None
    config = _read_config(folder)
    by_steps = config["schedule.steps"] != "None"
    if not by_steps and config["schedule.epochs"] == "None":
        config["schedule.epochs"] = str(DEFAULT_EPOCHS)
    for key in ("cluster.num_workers", "schedule.steps" if by_steps else "schedule.epochs"):
        given = config[key]
        if not (given.isdecimal() and len(given) < 10 and int(given) > 0):
            raise ValueError(f"{folder}: {key}={_cut(given)} in its configuration is not a number, or is 0")
    return config, summary


def _note(folder: Path, num_broken: int) -> str | None:
    if not num_broken:
        return None
    said = "a row was half-written" if num_broken == 1 else f"{num_broken} rows cannot be read"
    return f"{printable(folder.name)}: {said} and left out"


def read_summary(folder: Path) -> dict[str, Any]:
    """``summary.json`` of a run folder."""
    path = folder / "summary.json"
    if not path.is_file():
        raise ValueError(f"{folder}: has no summary.json; give the folder of a run that has ended")
    summary = read_json(path)
    if not isinstance(summary, dict):
        raise ValueError(f"{path}: must be a JSON object; run it again")
    return summary


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a JSONL file and how many lines are none."""
    try:
        found = list(rows_of(path))
    except OSError:
        return [], 0
    rows = [row for row in found if row is not None]
    return rows, len(found) - len(rows)


def checked(run: Run) -> Run:
    """The run, if it has what is compared, and nothing that no run could have written."""
    where, summary = run.source, run.summary
    if not run.rows and summary is None:
        raise ValueError(f"{where}: is an empty run; it ended, or was killed, before its first row")
    try:
        targets = run.targets
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if run.is_share and not all(0 < target <= 1 for target in targets):
        raise ValueError(f"{where}: its targets are {_cut(targets)}; they must be shares in (0, 1]")
    if summary is None:
        if not run.evaluations:
            raise ValueError(f"{where}: has no evaluation yet, so there is no accuracy to compare; wait, or leave it out")
        return run
    if summary.get("clock", "real") not in _CLOCKS:
        raise ValueError(f"{where}: its clock is {_cut(summary['clock'])}, not one of {', '.join(_CLOCKS)}")
    time_alone = run.clock == "simulated" and all(key in summary and summary[key] is None for key in _LEARNT)
    wanted = [key for key in MEASURES if not (time_alone and key in _LEARNT)]
    missing = [key for key in wanted if not is_number(summary.get(key))]
    if missing:
        raise ValueError(f"{where}: its summary has no {missing[0]}, so it has no metric in common with other runs")
    for key, least in (*((key, 0.0) for key in wanted), ("steps", 1.0)):
        if key in _LEARNT and not run.is_share:
            continue
        if key in summary and not (is_number(summary[key]) and summary[key] >= least):
            raise ValueError(f"{where}: {key} in its summary is {_cut(summary[key])}; it must be at least {least:g}")
    if not summary["train_seconds"] > 0:
        raise ValueError(f"{where}: its summary has no training seconds; run it again")
    return run


def _cut(value: object) -> str:
    """A value as a message shows it."""
    shown = printable(value)
    return shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}..."


_LONGEST_SHOWN = 100


def text_config(tree: Mapping[str, Any]) -> dict[str, str]:
    """Flat, as text, with the defaults of whatever a run does not know yet."""
    return {**_defaults(), **{printable(key): printable(value) for key, value in flattened(dict(tree)).items()}}


@cache
def _defaults() -> dict[str, str]:
    return {key: str(value) for key, value in flattened(dataclasses.asdict(Config())).items()}


def _read_config(folder: Path) -> dict[str, str]:
    path = folder / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{folder}: has no config.yaml to compare with other runs; copy the whole folder")
    text = read_text(path, _LARGEST_CONFIG)
    try:
        _check_yaml(text)
        tree = OmegaConf.to_container(tree_of(text))
    except Exception as error:
        raise ValueError(f"{path}: is not valid YAML ({_cut(first_line(error))})") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: must be a mapping")
    given = {str(key): value for key, value in tree.items()}
    with contextlib.suppress(ConfigError):  # what a run cannot be started with any more can still be read
        given = modernised(given)
    config = text_config(given)
    if len(config) > _MOST_SETTINGS:
        raise ValueError(f"{path}: has {len(config):,} settings, more than {_MOST_SETTINGS:,}")
    return config


def _check_yaml(text: str) -> None:
    """Refuse what takes exponentially long to read, or endlessly deep: no run writes it."""
    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it refers to parts of itself")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST_CONFIG:
            raise ValueError(f"it is nested deeper than {_DEEPEST_CONFIG} levels")
