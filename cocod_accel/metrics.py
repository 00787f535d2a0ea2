"""Clock, rows and the run folder: what a run leaves behind.

``metrics.jsonl`` has a row per logging step and per evaluation, ``spans/rank_N.jsonl`` a row per computation and
communication, ``summary.json`` what users compare. Training time is what the paper counts: without evaluation and set-up.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cocod_accel.config import Config, ConfigError, save_config


class TrainingClock:
    """Seconds spent training on this worker, waits included."""

    def __init__(self) -> None:
        self.origin = time.perf_counter()
        self._total = 0.0
        self._since: float | None = None

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        if self._since is not None:
            self._total += time.perf_counter() - self._since
            self._since = None

    @property
    def seconds(self) -> float:
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self._total + running


@dataclass
class TimeToAccuracy:
    """The training time of the first evaluation at or above each target; not interpolated."""

    targets: list[float]
    seconds: dict[float, float | None] = field(init=False)

    def __post_init__(self) -> None:
        self.seconds = dict.fromkeys(self.targets)

    def note(self, accuracy: float, train_seconds: float) -> None:
        for target in self.targets:
            if self.seconds[target] is None and accuracy >= target:
                self.seconds[target] = train_seconds


class RunFolder:
    """Where a run writes. Made new: an earlier run of the same name is never touched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "spans").mkdir(exist_ok=True)
        self._metrics: Any = None

    @staticmethod
    def create(config: Config) -> Path:
        """Make ``output/name``, or ``output/name-2`` and so on if that is taken."""
        root = Path(config.output)
        try:
            root.mkdir(parents=True, exist_ok=True)
            for number in range(1, 10_000):
                path = root / (config.run_name if number == 1 else f"{config.run_name}-{number}")
                try:
                    path.mkdir()
                except FileExistsError:
                    continue
                save_config(config, path / "config.yaml")
                return path
        except OSError as error:
            raise ConfigError(f"output={config.output}: a run folder cannot be made there ({error.strerror})") from error
        raise ConfigError(f"output={config.output}: holds 10,000 runs called {config.run_name}; choose another name")

    def row(self, values: dict[str, Any]) -> None:
        """Append one row of metrics."""
        if self._metrics is None:
            self._metrics = (self.path / "metrics.jsonl").open("a")
        self._metrics.write(json.dumps({key: _finite(value) for key, value in values.items()}) + "\n")
        self._metrics.flush()

    def spans(self, rank: int, rows: list[dict[str, Any]]) -> None:
        """Append what this worker did, as rows {rank, step, name, start, end}."""
        if rows:
            with (self.path / "spans" / f"rank_{rank}.jsonl").open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)

    def summary(self, values: dict[str, Any]) -> None:
        """Write ``summary.json``, whole or not at all."""
        temporary = self.path / "summary.json.tmp"
        temporary.write_text(json.dumps(values, indent=2) + "\n")
        temporary.replace(self.path / "summary.json")

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
