"""Runs one cell of a grid: what a process of its own does."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

import torch

from cocod_accel.config.strict import ConfigError
from cocod_accel.reproduce.grid import Cell
from cocod_accel.reproduce.running import fingerprint, row_of
from cocod_accel.simulator.folders import write
from cocod_accel.simulator.learning import Learning
from cocod_accel.simulator.simulate import configured, simulate
from cocod_accel.trainer.steps import NonFiniteLossError


def run(cell: Cell, out: Path, overrides: list[str], made_with: str) -> None:
    """``made_with``: the fingerprint when the grid was started; files may have been edited since."""
    torch.set_num_threads(1)
    if fingerprint(cell, tuple(overrides)) != made_with:
        raise ConfigError(f"{cell.name}: its settings were edited while the grid ran; start the grid again")
    cluster = cell.on(overrides)
    config = configured(cluster, [*cell.arguments, *overrides])
    config.output, config.name = str(out / "runs"), cell.name
    begun = out / "runs" / cell.name
    if begun.exists():  # left by an interrupted run
        shutil.rmtree(begun)
    done = simulate(cluster, config)
    failed = None
    learning = Learning(config, threads=1) if cell.learns else None
    try:
        write(done, learning.rows() if learning is not None else None)
    except NonFiniteLossError as error:  # a result, not a fault
        failed = str(error)
    else:
        (begun / "made_with").write_text(made_with)
    digest = learning.task.digest if learning is not None else None
    append(out / "rows.jsonl", json.dumps(row_of(cell, begun, made_with, failed, digest)))


def append(path: Path, line: str) -> None:
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # cells run side by side
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":  # a write was interrupted
                file.write(b"\n")
        file.write(line.encode() + b"\n")


def run_logged(log: Path, cell: Cell, out: Path, overrides: list[str], made_with: str) -> None:
    """:func:`run` with what it says in a file, whichever library says it."""
    with log.open("w") as said, open(os.devnull, "w") as nothing:
        os.dup2(said.fileno(), 2)
        os.dup2(nothing.fileno(), 1)
    run(cell, out, overrides, made_with)
