"""Runs cells in parallel, each in its own process, and keeps one row for each finished cell.

Processes are forked from a server that has imported torch once: importing it takes longer than many a small cell.

A cell that has a row is never run again, so a grid resumes after any interruption. Rows are small enough to be
committed: a run's summary and its evaluations. Its run folder can be recreated from them for ``cocod compare``.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import shutil
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cocod_accel.config.fields import Affects
from cocod_accel.config.loading import flattened, save_config
from cocod_accel.config.settings import ACCURACY, DEFAULT_EPOCHS, Config, may_differ
from cocod_accel.config.strict import ConfigError
from cocod_accel.reproduce.grid import Cell
from cocod_accel.simulator.simulate import configured, title

Row = dict[str, Any]
#: By cell name and fingerprint, so that rows with other settings can coexist.
Rows = dict[tuple[str, str], Row]
#: Also kept if the averaged model's loss on the training data was computed.
_MORE = ("mean_train_loss",)
_CELL = "cocod_accel.reproduce.cell"


def _summary_keys(metric: str) -> tuple[str, ...]:
    """The keys of a summary that are kept."""
    known = () if metric == ACCURACY else ("metric", "better")
    return (
        "steps", "rounds", f"best_{metric}", f"final_{metric}", "train_seconds", f"time_to_{metric}", "comm_bytes",
        "comm_exposed_seconds", "comm_hidden_seconds", "samples_per_second", *known,
    )  # fmt: skip


def _evaluation_keys(metric: str) -> tuple[str, ...]:
    return "epoch", "step", metric, "test_loss", "train_loss", "train_seconds"


def read_rows(paths: Iterable[Path]) -> Rows:
    """Rows by cell; a truncated last line is skipped."""
    rows: Rows = {}
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines() if path.is_file() else [], start=1):
            try:
                row = json.loads(line)
                rows[row["name"], row["made_with"]] = row
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                if line.endswith("}"):
                    raise ConfigError(f"{path}: line {number} is not the row of a cell; remove it") from error
    return rows


@cache
def fingerprint(cell: Cell, overrides: tuple[str, ...] = ()) -> str:
    """A hash of what determines a cell's row: its non-default configuration, and its cluster.

    A new configuration key does not invalidate old rows as long as it has its default.
    """
    cluster = cell.on(overrides)
    given, usual = (flattened(asdict(config)) for config in (configured(cluster, [*cell.arguments, *overrides]), Config()))
    usual["schedule.epochs"] = DEFAULT_EPOCHS  # what it becomes where nothing is stated, as it was in earlier rows
    tree = {key: value for key, value in given.items() if value != usual.get(key) and not may_differ(key, Affects.CELL)}
    return hashlib.blake2b(json.dumps([tree, title(cluster)], sort_keys=True).encode(), digest_size=6).hexdigest()


def done_rows(cells: Sequence[Cell], rows: Rows, overrides: Sequence[str] = ()) -> dict[str, Row]:
    """cell name -> row, for cells that have a row with these settings."""
    keys = [(cell.name, fingerprint(cell, tuple(overrides))) for cell in cells]
    return {key[0]: rows[key] for key in keys if key in rows}


def missing(cells: Sequence[Cell], rows: Rows, overrides: Sequence[str] = ()) -> list[Cell]:
    """Cells without a row with these settings."""
    done = done_rows(cells, rows, overrides)
    return [cell for cell in cells if cell.name not in done]


def run_cells(cells: Sequence[Cell], out: Path, *, jobs: int, overrides: Sequence[str] = ()) -> None:
    """Run them ``jobs`` at a time; each appends its row to ``rows.jsonl`` when it finishes."""
    waiting, num_done = list(cells), 0
    running: dict[BaseProcess, tuple[Cell, Path]] = {}
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    # On SIGTERM, kill the running cells before exiting.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    bar = tqdm(total=len(cells), unit="cell", disable=not sys.stderr.isatty(), dynamic_ncols=True)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.pop(0)
                log = logs / f"{cell.name}.log"
                running[_start(cell, out, log, overrides)] = cell, log
                bar.set_postfix_str(cell.name)
            wait([process.sentinel for process in running])
            for process in [process for process in running if process.exitcode is not None]:
                cell, log = running.pop(process)
                if process.exitcode != 0:
                    lines = log.read_text(errors="replace").strip().splitlines()
                    said = lines[-1] if lines else f"exit code {process.exitcode}"
                    raise RuntimeError(f"{cell.name}: {said}; see {log}")
                log.unlink()
                num_done += 1
                bar.update()
                if bar.disable:
                    print(f"{num_done} of {len(cells)}: {cell.name}", flush=True)
    finally:
        bar.close()
        signal.signal(signal.SIGTERM, before)
        for process in running:
            process.kill()
            process.join()


def _start(cell: Cell, out: Path, log: Path, overrides: Sequence[str]) -> BaseProcess:
    from cocod_accel.reproduce.cell import run_logged

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_CELL])
    made_with = fingerprint(cell, tuple(overrides))
    process = context.Process(target=run_logged, args=(log, cell, out, list(overrides), made_with))
    process.start()
    return process


# ---------------------------------------------------------------------------------------------- rows and folders


def row_of(cell: Cell, folder: Path, made_with: str, failed: str | None = None, digest: str | None = None) -> Row:
    """The row of a finished run. ``digest``: of its data, if they are not the same everywhere."""
    row: Row = {"name": cell.name, "made_with": made_with, "learns": cell.learns}
    if digest is not None:
        row["data_digest"] = digest
    if failed is not None:
        return {**row, "failed": failed}
    summary = json.loads((folder / "summary.json").read_text())
    metric = summary.get("metric", ACCURACY)
    row |= {key: _short(summary[key]) for key in _summary_keys(metric)}
    evaluations = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [*_evaluation_keys(metric), *(key for key in _MORE if any(key in e for e in evaluations))]
    row["evaluations"] = [[_short(e[key]) for key in kept] for e in evaluations if e["kind"] == "eval"]
    return row


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def evaluations(row: Row) -> list[dict[str, Any]]:
    keys = (*_evaluation_keys(row.get("metric", ACCURACY)), *_MORE)
    return [dict(zip(keys[: len(values)], values, strict=True)) for values in row["evaluations"]]


def folder_of(cell: Cell, row: Row, out: Path, overrides: Sequence[str] = ()) -> Path | None:
    """The run folder of a row, recreated if missing or outdated; None if the run failed."""
    folder = out / "runs" / cell.name
    if "failed" in row:
        return None
    mark = folder / "made_with"
    if not mark.is_file() or mark.read_text() != row["made_with"]:
        config = configured(cell.on(overrides), [*cell.arguments, *overrides])
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        mark.write_text(row["made_with"])
        save_config(config, folder / "config.yaml")
        metric = row.get("metric", ACCURACY)
        marks = {"simulated": True} | {key: row[key] for key in ("metric", "better") if key in row}
        rows = [{"kind": "eval", **evaluation, **marks} for evaluation in evaluations(row)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
        summary = {
            "name": cell.name,
            "algorithm": config.algorithm.name,
            "task": config.task.name,
            "model": config.model.name,
            "seed": config.seed,
            "num_workers": cell.num_workers,
            "proportional": config.cluster.proportional,
            "clock": config.clock,
            "emulated": config.emulated,
            "epochs": config.schedule.epochs,
            **{key: row[key] for key in _summary_keys(metric)},
        }
        (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return folder
