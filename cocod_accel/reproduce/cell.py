"""One cell of a grid, in a process of its own.

python -m cocod_accel.reproduce.cell '{"cell": {...}, "out": "...", "overrides": []}'
"""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from cocod_accel.reproduce.grid import Cell
from cocod_accel.reproduce.running import row_of
from cocod_accel.simulator.folders import write
from cocod_accel.simulator.learning import Learning
from cocod_accel.simulator.simulate import configured, simulate
from cocod_accel.steps import NonFiniteLossError


def run(cell: Cell, out: Path, overrides: list[str]) -> None:
    torch.set_num_threads(1)
    cluster = cell.on()
    config = configured(cluster, [*cell.arguments, *overrides])
    config.output, config.name = str(out / "runs"), cell.name
    begun = out / "runs" / cell.name
    if begun.exists():  # of a sitting that was cut off
        shutil.rmtree(begun)
    done = simulate(cluster, config)
    failed = None
    try:
        write(done, Learning(config, threads=1).rows() if cell.learns else None)
    except NonFiniteLossError as error:  # a result, not a fault
        failed = str(error)
    line = json.dumps(row_of(cell, begun, failed)) + "\n"
    with (out / "rows.jsonl").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # cells run side by side
        file.write(line)


def main(job: dict[str, Any]) -> None:
    cell = job["cell"]
    run(Cell(**{**cell, "arguments": tuple(cell["arguments"])}), Path(job["out"]), job["overrides"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
