"""What a run has left behind, read back: configuration, rows and summary.

Everything that compares runs starts from :class:`Run`. A run that was killed has no summary and may end in half a row;
what it wrote until then still counts, and it says that it is unfinished.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from cocod_accel.config.loading import flattened, modernised
from cocod_accel.config.settings import Config
from cocod_accel.config.strict import ConfigError, printable

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
        return int(self.config["schedule.epochs"])

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
            "best_accuracy": max(accuracies, default=math.nan),
            "final_accuracy": accuracies[-1] if accuracies else math.nan,
        }


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def time_to_target(run: Run, target: float) -> float | None:
    """Training seconds at the first evaluation at or above ``target``; None: never; nan: reached, but nobody knows when."""
    evaluations = run.evaluations
    for row in evaluations:
        if row["accuracy"] >= target and is_number(row.get("train_seconds")):
            return float(row["train_seconds"])
    if evaluations or run.summary is None:
        return None
    known = run.summary.get("time_to_accuracy", {})
    if f"{target:g}" in known:
        seconds = known[f"{target:g}"]
        return None if seconds is None else float(seconds)
    return None if not run.has_learnt or run.summary["best_accuracy"] < target else math.nan


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
    children = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    return [found for child in children for found in _below(child, depth - 1)]


def read_run(folder: Path) -> Run:
    """One run folder. ValueError, of one line, if nothing in it can be compared."""
    return checked(read_parts(folder))


def read_parts(folder: Path) -> Run:
    """Whatever a run folder has until now."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give the folder of a run")
    if not any((folder / mark).is_file() for mark in _MARKS):
        raise ValueError(f"{folder}: is not a run folder; give one of cocod train")
    summary = read_summary(folder) if (folder / "summary.json").exists() else None
    config = _read_config(folder)
    rows, num_broken = read_rows(folder / "metrics.jsonl")
    note = None
    if num_broken:
        rows_broken = "a row was half-written" if num_broken == 1 else f"{num_broken} rows cannot be read"
        note = f"{printable(folder.name)}: {rows_broken} and left out"
    return Run(printable(folder.name), folder, config, rows, summary, note)


def read_summary(folder: Path) -> dict[str, Any]:
    """``summary.json`` of a run folder."""
    path = folder / "summary.json"
    if not path.is_file():
        raise ValueError(f"{folder}: has no summary.json; give the folder of a run that has ended")
    try:
        summary = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: is not valid JSON ({error}); run it again") from error
    if not isinstance(summary, dict):
        raise ValueError(f"{path}: must be a JSON object; run it again")
    return summary


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a JSONL file and how many lines are none: a killed process may leave half a line."""
    rows, num_broken = [], 0
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return [], 0
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            num_broken += 1
    return rows, num_broken


def checked(run: Run) -> Run:
    """The run, if it has what is compared."""
    where = run.source
    if not run.rows and run.summary is None:
        raise ValueError(f"{where}: is an empty run; it ended, or was killed, before its first row")
    for key in ("cluster.num_workers", "schedule.epochs"):
        if not run.config[key].isdecimal():
            raise ValueError(f"{where}: {key}={run.config[key]} in its configuration is not a number")
    if run.summary is None:
        if not run.evaluations:
            raise ValueError(f"{where}: has no evaluation yet, so there is no accuracy to compare; wait, or leave it out")
        return run
    time_alone = run.clock == "simulated" and all(key in run.summary and run.summary[key] is None for key in _LEARNT)
    wanted = [key for key in MEASURES if not (time_alone and key in _LEARNT)]
    missing = [key for key in wanted if not is_number(run.summary.get(key))]
    if missing:
        raise ValueError(f"{where}: its summary has no {missing[0]}, so it has no metric in common with other runs")
    return run


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
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:
        raise ValueError(f"{path}: is not valid YAML ({str(error).splitlines()[0]})") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: must be a mapping")
    given = {str(key): value for key, value in tree.items()}
    with contextlib.suppress(ConfigError):  # what a run cannot be started with any more can still be read
        given = modernised(given)
    return text_config(given)
