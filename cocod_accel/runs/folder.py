"""The run folder: what a run writes.

``metrics.jsonl`` has a row per logging step and per evaluation, ``spans/rank_N.jsonl`` a row per computation and
communication, ``summary.json`` what users compare. A folder is in use by one process at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cocod_accel.checkpoint.safetree import flush
from cocod_accel.config.loading import save_config
from cocod_accel.config.settings import Config
from cocod_accel.config.strict import ConfigError

logger = logging.getLogger(__name__)

#: No more runs than this may have the same name.
_MOST_RUNS = 10_000


class RunFolder:
    """Writes the files of one run; every worker has its own object for the same folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "spans").mkdir(exist_ok=True)
        self._metrics: Any = None
        self._has_warned = False

    @staticmethod
    def create(config: Config) -> Path:
        """A new folder ``output/name``, ``output/name-2`` and so on, with the configuration, locked by this process."""
        root = Path(config.output)
        root.mkdir(parents=True, exist_ok=True)
        for path in numbered_folders(config):
            try:
                path.mkdir()
            except FileExistsError:
                continue
            lock(path)
            save_config(config, path / "config.yaml")
            return path
        raise ConfigError(f"output={config.output}: holds {_MOST_RUNS:,} runs named {config.run_name}; choose another name")

    def sizes(self, rank: int) -> dict[str, int]:
        """How many bytes this worker has written; they are on disk when this returns."""
        for path in (self._spans_file(rank), *([self._metrics_file] if rank == 0 else [])):
            if path.is_file():
                flush(path)
        return {
            name: path.stat().st_size if path.is_file() else 0
            for name, path in (("metrics", self._metrics_file), ("spans", self._spans_file(rank)))
            if name == "spans" or rank == 0
        }

    def cut(self, rank: int, sizes: dict[str, int]) -> None:
        """Discard what was written after a checkpoint; only worker 0 writes metrics."""
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
        with self._tolerating_errors():
            if self._metrics is None:
                self._metrics = self._metrics_file.open("a")
            self._metrics.write(line)
            self._metrics.flush()

    def spans(self, rank: int, rows: list[dict[str, Any]]) -> None:
        """Append what this worker did, as rows {rank, step, name, start, end}."""
        if rows:
            with self._tolerating_errors(), self._spans_file(rank).open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)

    @contextlib.contextmanager
    def _tolerating_errors(self) -> Iterator[None]:
        """Rows that cannot be written (a full disk) are no reason to lose a training run; warns once."""
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("cannot write rows in %s (%s); training continues without them", self.path, error.strerror)

    def summary(self, values: dict[str, Any]) -> None:
        """Write ``summary.json`` atomically."""
        temporary = self.path / "summary.json.tmp"
        try:
            temporary.write_text(json.dumps(values, indent=2) + "\n")
            flush(temporary)
            temporary.replace(self.path / "summary.json")
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        if self._metrics is not None:
            with self._tolerating_errors():
                self._metrics.close()


def numbered_folders(config: Config) -> Iterator[Path]:
    """The folders that runs of this name use, in order, whether they exist or not."""
    for number in range(1, _MOST_RUNS):
        yield Path(config.output) / (config.run_name if number == 1 else f"{config.run_name}-{number}")


def lock(path: Path) -> bool:
    """Mark a run folder as in use until this process ends, however it ends; False if it is in use already."""
    handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return False
    # The handle stays open. A process forked from this one (to load data) must not keep the lock when this one has ended.
    os.register_at_fork(after_in_child=lambda: os.close(handle))
    return True


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
