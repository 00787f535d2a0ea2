"""Run folders -> tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


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
            str(s["algorithm"]),
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
    return aligned([header, *rows])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side, the first two to the left, figures to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return "\n".join([lines[0].rstrip(), "-" * len(lines[0]), *(line.rstrip() for line in lines[1:])])
