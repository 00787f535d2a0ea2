"""Run folders written by hand: what a run of known figures would have left."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cocod_accel.config.loading import load_config, save_config

STEPS_PER_EPOCH = 10


def write_run(
    root: Path,
    name: str,
    accuracies: Sequence[float] = (0.5, 0.8),
    seconds_per_epoch: float = 2.0,
    overrides: Sequence[str] = (),
    finished: bool = True,
    rows_per_epoch: int = 2,
    exposed_seconds: float = 1.0,
    summary: dict[str, Any] | None = None,
) -> Path:
    """A run with an evaluation after every epoch: its accuracies are given, its clock ticks evenly."""
    folder = root / name
    (folder / "spans").mkdir(parents=True)
    config = load_config([f"schedule.epochs={len(accuracies)}", "schedule.warmup_epochs=1", f"name={name}", *overrides])
    save_config(config, folder / "config.yaml")
    steps = max(STEPS_PER_EPOCH, rows_per_epoch)
    rows: list[dict[str, Any]] = [{"kind": "plan", "step": 0, "epoch": 0, "speeds": [1.0, 1.0], "batches": [32, 32]}]
    label = {} if config.emulated is None else {"emulated": True}
    for epoch, accuracy in enumerate(accuracies, start=1):
        for i in range(1, rows_per_epoch + 1):
            step = (epoch - 1) * steps + i * steps // rows_per_epoch
            seconds = step / steps * seconds_per_epoch
            rows.append(
                {
                    "kind": "train",
                    "step": step,
                    "epoch": epoch,
                    "loss": 2.0 / (1 + step / steps) + 0.01 * (i % 3),
                    "train_seconds": seconds,
                    "samples_per_second": 100.0,
                    "comm_bytes": 1000 * step,
                    "comm_exposed_seconds": exposed_seconds * seconds / (seconds_per_epoch * len(accuracies)),
                    "comm_hidden_seconds": 0.0,
                }
            )
        evaluation = {"accuracy": accuracy, "test_loss": 1.0, "train_loss": 2.0 / (1 + epoch)}
        done = {"train_seconds": epoch * seconds_per_epoch}
        rows.append({"kind": "eval", "step": epoch * steps, "epoch": epoch, **evaluation, **done})
    (folder / "metrics.jsonl").write_text("".join(json.dumps({**row, **label}) + "\n" for row in rows))
    for rank in range(config.cluster.num_workers):
        write_spans(folder, rank, [(step, step * 0.1, 0.02, 0.03) for step in range(1, 1 + 2 * STEPS_PER_EPOCH)])
    if finished:
        reached = {
            f"{t:g}": next((seconds_per_epoch * (i + 1) for i, a in enumerate(accuracies) if a >= t), None)
            for t in config.evaluation.targets
        }
        values = {
            "name": name,
            "algorithm": config.algorithm.name,
            "num_workers": config.cluster.num_workers,
            "seed": config.seed,
            "clock": "real" if config.emulated is None else "emulated",
            "emulated": config.emulated,
            "steps": len(accuracies) * steps,
            "epochs": len(accuracies),
            "best_accuracy": max(accuracies),
            "final_accuracy": accuracies[-1],
            "train_seconds": seconds_per_epoch * len(accuracies),
            "time_to_accuracy": reached,
            "comm_bytes": 1000 * len(accuracies) * steps,
            "comm_exposed_seconds": exposed_seconds,
            "comm_hidden_seconds": 0.5,
            "samples_per_second": 100.0,
        }
        (folder / "summary.json").write_text(json.dumps({**values, **(summary or {})}))
    return folder


def write_spans(folder: Path, rank: int, steps: Sequence[tuple[int, float, float, float]]) -> None:
    """Steps of 0.1 s as (step, start, wait, transfer): each ends in a wait, which is the end of a transfer."""
    rows = []
    for step, start, wait, transfer in steps:
        end = start + 0.1
        rows.append({"rank": rank, "step": step, "name": "compute", "start": start, "end": end})
        rows.append({"rank": rank, "step": step, "name": "communicate", "start": end - transfer, "end": end})
        rows.append({"rank": rank, "step": step, "name": "wait", "start": end - wait, "end": end})
    (folder / "spans" / f"rank_{rank}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
