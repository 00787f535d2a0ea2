"""Run folders -> tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cocod_accel.tables import aligned


def read_summary(folder: Path) -> dict[str, Any]:
    """``summary.json`` of a run folder."""
    path = folder / "summary.json"
    if not path.is_file():
        raise ValueError(f"{folder}: has no summary.json; give the folder of a run that has ended")
    try:
        summary: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: is not valid JSON ({error}); run it again") from error
    return summary


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f}"


def comparison(summaries: Sequence[dict[str, Any]], target: float | None = None) -> str:
    """A table of runs: accuracy, time, bytes and communication, aligned for a terminal."""
    if target is None:
        reached = [float(t) for s in summaries for t, seconds in s["time_to_accuracy"].items() if seconds is not None]
        # The highest target that every run reached, else the highest that any did.
        common = [t for t in set(reached) if all(s["time_to_accuracy"].get(f"{t:g}") is not None for s in summaries)]
        target = max(common or reached, default=None)
    header = ["run", "algorithm", "workers", "best", "final", "training s", "samples/s", "MB sent", "waiting s", "hidden s"]
    if target is not None:
        header.insert(6, f"s to {target:.0%}")
    rows = []
    for s in summaries:
        row = [
            str(s["name"]),
            f"{s['algorithm']}{' + PS' if s.get('proportional') else ''}",
            str(s["num_workers"]),
            f"{s['best_accuracy']:.2%}",
            f"{s['final_accuracy']:.2%}",
            _seconds(s["train_seconds"]),
            f"{s['samples_per_second']:.0f}",
            f"{s['comm_bytes'] / 1e6:.1f}",
            _seconds(s["comm_exposed_seconds"]),
            _seconds(s["comm_hidden_seconds"]),
        ]
        if target is not None:
            row.insert(6, _seconds(s["time_to_accuracy"].get(f"{target:g}")))
        rows.append(row)
    labels = [f"{s['name']}: emulated {s['emulated']}" for s in summaries if s.get("emulated")]
    return "\n".join([aligned([header, *rows]), *labels])
