"""Clock, rows and the run folder: what a run leaves behind.

``metrics.jsonl`` has a row per logging step and per evaluation, ``spans/rank_N.jsonl`` a row per computation and
communication, ``summary.json`` what users compare. Training time is what the paper counts: without evaluation and set-up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cocod_accel.checkpoint.files import MANIFEST, checkpoints_in
from cocod_accel.checkpoint.safetree import flush
from cocod_accel.config.loading import flattened, load_config, save_config
from cocod_accel.config.settings import Config
from cocod_accel.config.strict import ConfigError

logger = logging.getLogger(__name__)


#: What may differ between a run and its continuation.
_FREE_TO_CHANGE = ("name", "output", "loader_workers", "schedule.epochs", "task.data_dir", "task.download")
_FREE_SECTIONS = ("cluster", "evaluation", "checkpoint", "logging")


_LAUNCHER = ".launcher"


@dataclass(frozen=True)
class Place:
    """Where a run writes, and from where it goes on."""

    path: Path
    #: Go on in a folder that an earlier process has left.
    is_continued: bool = False
    #: A checkpoint of another run to begin from.
    start: Path | None = None
    #: The run has ended, and this process was only started again.
    is_finished: bool = False


class RunFolder:
    """Where a run writes. Made new, or gone on with if it is not finished: an ended run is never touched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "spans").mkdir(exist_ok=True)
        self._metrics: Any = None
        self._has_warned = False

    @staticmethod
    def find(config: Config, launcher: str, is_restart: bool) -> Place:
        """The folder of an unfinished run to go on with, or a new one: ``output/name``, ``output/name-2`` and so on.

        ``launcher``: who has started this process. If it is started again after its run had ended (a worker was lost
        at the very end), there is nothing left to do.
        """
        resume = config.checkpoint.resume
        start = None if resume in ("auto", "never") else _start_of(resume)
        try:
            last = _last(config)
            if is_restart and last is not None and (last / "summary.json").exists() and _launcher_of(last) == launcher:
                return Place(last, is_finished=True)
            if resume == "auto" or (is_restart and last is not None and _launcher_of(last) == launcher):
                unfinished = _unfinished(config)
                if unfinished is not None:
                    (unfinished / _LAUNCHER).write_text(launcher)
                    begun = bool(checkpoints_in(unfinished / "checkpoints"))
                    return Place(unfinished, is_continued=True, start=None if begun else start)
            path = RunFolder.create(config)
            (path / _LAUNCHER).write_text(launcher)
            return Place(path, start=start)
        except OSError as error:
            raise ConfigError(f"output={config.output}: a run folder cannot be made there ({error.strerror})") from error

    @staticmethod
    def create(config: Config) -> Path:
        """A new folder with the configuration in it, in use until this process ends."""
        root = Path(config.output)
        root.mkdir(parents=True, exist_ok=True)
        for number in range(1, 10_000):
            path = _numbered(config, number)
            try:
                path.mkdir()
            except FileExistsError:
                continue
            _lock(path)
            save_config(config, path / "config.yaml")
            return path
        raise ConfigError(f"output={config.output}: holds 10,000 runs called {config.run_name}; choose another name")

    def sizes(self, rank: int) -> dict[str, int]:
        """How much this worker has written, in bytes; it is on disk then."""
        for path in (self._spans_file(rank), *([self._metrics_file] if rank == 0 else [])):
            if path.is_file():
                flush(path)
        return {
            name: path.stat().st_size if path.is_file() else 0
            for name, path in (("metrics", self._metrics_file), ("spans", self._spans_file(rank)))
            if name == "spans" or rank == 0
        }

    def cut(self, rank: int, sizes: dict[str, int]) -> None:
        """Forget what was written after a checkpoint; the metrics are worker 0's."""
        for name, path in (("metrics", self._metrics_file), ("spans", self._spans_file(rank))):
            if name in sizes and path.is_file() and (name == "spans" or rank == 0):
                with path.open("r+b") as file:
                    kept = file.read(sizes[name])
                    file.truncate(kept.rfind(b"\n") + 1)

    @property
    def _metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    def _spans_file(self, rank: int) -> Path:
        return self.path / "spans" / f"rank_{rank}.jsonl"

    def row(self, values: dict[str, Any]) -> None:
        """Append one row of metrics."""
        line = json.dumps({key: _finite(value) for key, value in values.items()}) + "\n"
        with self._survives():
            if self._metrics is None:
                self._metrics = self._metrics_file.open("a")
            self._metrics.write(line)
            self._metrics.flush()

    def spans(self, rank: int, rows: list[dict[str, Any]]) -> None:
        """Append what this worker did, as rows {rank, step, name, start, end}."""
        if rows:
            with self._survives(), self._spans_file(rank).open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)

    @contextlib.contextmanager
    def _survives(self) -> Iterator[None]:
        """Rows that cannot be written (a full disk) are no reason to lose a training; said once."""
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("rows cannot be written in %s (%s); training goes on without", self.path, error.strerror)

    def summary(self, values: dict[str, Any]) -> None:
        """Write ``summary.json``, whole or not at all."""
        temporary = self.path / "summary.json.tmp"
        temporary.write_text(json.dumps(values, indent=2) + "\n")
        flush(temporary)
        temporary.replace(self.path / "summary.json")

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()


def _numbered(config: Config, number: int) -> Path:
    return Path(config.output) / (config.run_name if number == 1 else f"{config.run_name}-{number}")


def _lock(path: Path) -> bool:
    """Mark a run folder as in use until this process ends, however it ends; False if it is in use already."""
    handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return False
    # The handle stays open. A process forked from this one (to load data) must not hold it when this one is gone.
    os.register_at_fork(after_in_child=lambda: os.close(handle))
    return True


def _last(config: Config) -> Path | None:
    """The last folder of this name."""
    last = None
    for number in range(1, 10_000):
        if not _numbered(config, number).is_dir():
            break
        last = _numbered(config, number)
    return last


def _launcher_of(path: Path) -> str | None:
    file = path / _LAUNCHER
    return file.read_text() if file.is_file() else None


def _unfinished(config: Config) -> Path | None:
    """The last folder of this name, if its run can be gone on with."""
    last = _last(config)
    if last is None or (last / "summary.json").exists() or not (last / "config.yaml").is_file():
        return None
    different = differences(config, last / "config.yaml")
    if different:
        logger.warning("%s is not finished, but is another run (%s); beginning anew", last, different[0])
        return None
    if not checkpoints_in(last / "checkpoints") and (last / "metrics.jsonl").exists():
        return None
    if not _lock(last):
        logger.warning("%s is not finished, but another process works on it; beginning anew", last)
        return None
    return last


def differences(config: Config, path: Path) -> list[str]:
    """What makes the run of another configuration file a different one."""
    try:
        other = flattened(dataclasses.asdict(load_config([str(path)])))
    except ConfigError as error:
        return [str(error)]
    own = flattened(dataclasses.asdict(config))
    free = {key for key in own if key in _FREE_TO_CHANGE or key.split(".")[0] in _FREE_SECTIONS}
    return [f"{key} is {own[key]}, was {other.get(key)}" for key in own if key not in free and own[key] != other.get(key)]


def _start_of(given: str) -> Path:
    """What ``checkpoint.resume`` names: a checkpoint, or a run folder that holds some."""
    path = Path(given)
    if (path / MANIFEST).is_file():
        return path
    if not (checkpoints_in(path / "checkpoints") or checkpoints_in(path)):
        raise ConfigError(f"checkpoint.resume={given}: holds no checkpoint; give auto, never, a run folder or a checkpoint")
    return path


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
