"""``cocod reproduce``: what is missing of a grid, run; then its tables and figures."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from cocod_accel.config.loading import load_config
from cocod_accel.config.strict import ConfigError
from cocod_accel.reproduce.grid import MODELS, Cell, cells, scale_of
from cocod_accel.reproduce.running import done_rows, folder_of, missing, read_rows, run_cells
from cocod_accel.reproduce.tables import Grid, report
from cocod_accel.tasks import build_task
from cocod_accel.trainer.launch import launch_command

_OUT = Path("runs/reproduce")


def run(
    scale_name: str,
    *,
    only: Sequence[str] = (),
    out: Path | None = None,
    rows_files: Sequence[Path] = (),
    jobs: int | None = None,
    overrides: Sequence[str] = (),
    only_tables: bool = False,
    dry_run: bool = False,
) -> int:
    """Run what is missing, print the tables, write figures."""
    scale = scale_of(scale_name)
    grid = cells(scale, only)
    out = _OUT / scale_name if out is None else out
    if jobs is not None and jobs < 1:
        raise ConfigError(f"--jobs={jobs}: must be at least 1")
    for file in rows_files:
        if not file.is_file():
            raise ConfigError(f"--rows={file}: no such file; give the rows.jsonl of an earlier sitting")
    if scale_name == "full":
        return _full(grid, overrides, out, dry_run=dry_run)
    rows = read_rows([*rows_files, out / "rows.jsonl"])
    todo = [] if only_tables else missing(grid, rows, overrides)
    if dry_run:
        for cell in todo:
            print(cell.name)
        print(f"{len(todo)} of {len(grid)} cells to run")
        return 0
    if todo:
        build_task(load_config([*todo[0].arguments, *overrides]))  # missing data is said here, once
        print(f"{len(todo)} of {len(grid)} cells to run; stop it anywhere, and the same command goes on", flush=True)
        try:
            run_cells(todo, out, jobs=jobs or len(os.sched_getaffinity(0)), overrides=overrides)
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        rows = read_rows([*rows_files, out / "rows.jsonl"])
    done = done_rows(grid, rows, overrides)
    if not done:
        raise ConfigError(f"{out / 'rows.jsonl'}: holds no row of these cells; run them first, or give --rows FILE")
    write(Grid(grid, done), out, overrides)
    return 0


def write(grid: Grid, out: Path, overrides: Sequence[str]) -> None:
    """Tables to the terminal and ``tables.txt``; figures 2 to 6 through ``cocod compare``, the others beside them."""
    from cocod_accel.cli.compare import collect, write_all
    from cocod_accel.report.groups import compare
    from cocod_accel.reproduce.figures import save

    out.mkdir(parents=True, exist_ok=True)
    text = report(grid)
    print(text)
    (out / "tables.txt").write_text(text + "\n")
    written = save(grid, out)
    for part in ("homogeneous", "scaling", "heterogeneous"):
        for model in MODELS:
            of_part = [c for c in grid.cells if (c.part, c.model) == (part, model) and c.name in grid.rows]
            folders = [folder_of(cell, grid.rows[cell.name], out, overrides) for cell in of_part]
            runs, _ = collect([folder for folder in folders if folder is not None]) if any(folders) else ([], [])
            if runs:
                written += write_all(compare(runs), out / f"{part}-{model}")
    print(f"\n{len(written)} files in {out}: tables.txt, and figures in {out}/*/")


def _full(grid: Sequence[Cell], overrides: Sequence[str], out: Path, *, dry_run: bool) -> int:
    """The paper itself: every cell a real training run, one after the other; ``cocod train`` resumes what was begun."""
    gpus = torch.cuda.device_count()
    most = max(cell.num_workers for cell in grid)
    if not dry_run and gpus < most:
        raise ConfigError(
            f"--scale=full: needs {most} GPUs on this machine, {gpus} are here; --dry-run prints the commands, which "
            "take the --config_file of a cluster"
        )
    for cell in grid:
        own = [f"name={cell.name}", f"output={out / 'runs'}", f"cluster.num_workers={cell.num_workers}", *overrides]
        if cell.part == "heterogeneous":  # as in the paper: equal GPUs, half of which are slowed down
            speeds = cell.on().speeds()
            own.append(f"emulate.slowdown=[{','.join(f'{max(speeds) / speed:g}' for speed in speeds)}]")
        arguments = [os.path.relpath(a) if a.endswith(".yaml") else a for a in cell.arguments]
        load_config([*arguments, *own])
        if dry_run:
            print(shlex.join(launch_command(cell.num_workers, [*arguments, *own], use_gpu=True)))
            continue
        if (out / "runs" / cell.name / "summary.json").is_file():
            continue
        code = subprocess.run(
            [sys.executable, "-m", "cocod_accel.cli.main", "train", *arguments, *own], check=False
        ).returncode
        if code:
            print(f"error: {cell.name} ended with {code}; mend it, and the same command goes on", file=sys.stderr)
            return code
    if not dry_run:
        print(f"figures: cocod compare {out / 'runs'} --out {out / 'report'}")
    return 0
