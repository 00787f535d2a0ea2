"""``cocod reproduce``: runs what is missing of the paper's grid, then writes its tables and figures."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from cocod_accel import extras
from cocod_accel.cli.common import Commands, add_configs, check_at_least
from cocod_accel.config.strict import ConfigError

if TYPE_CHECKING:
    from cocod_accel.reproduce.grid import Cell
    from cocod_accel.reproduce.running import Row
    from cocod_accel.reproduce.tables import Grid

_OUT = Path("runs/reproduce")


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser("reproduce", help="the paper's tables and figures, and where they do not hold")
    add_configs(parser, "overrides for every cell, e.g. task.data_dir=/data", metavar="key=value")
    parser.add_argument("--scale", default="small", metavar="SCALE", help="smoke, small (default) or full (16 GPUs)")
    parser.add_argument("--only", default="", metavar="A,B", help="parts: homogeneous, scaling, ..., learning, language")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/reproduce/SCALE")
    parser.add_argument("--rows", type=Path, action="append", default=[], metavar="FILE", help="rows of earlier runs")
    parser.add_argument("--jobs", type=int, metavar="N", help="cells to run in parallel; default: one per core")
    parser.add_argument("--only-tables", action="store_true", help="run nothing; use the rows that exist")
    parser.add_argument("--dry-run", action="store_true", help="print what would run")
    return parser


def run(options: argparse.Namespace) -> int:
    """Run what is missing, print the tables, write figures."""
    from cocod_accel.config.loading import load_config
    from cocod_accel.reproduce.grid import cells, scale_of
    from cocod_accel.reproduce.language import wanted
    from cocod_accel.reproduce.running import done_rows, missing, read_rows, run_cells
    from cocod_accel.reproduce.tables import Grid
    from cocod_accel.tasks import build_task

    overrides: list[str] = options.configs
    for given in overrides:
        if "=" not in given:
            raise ConfigError(f"{given}: not a key=value override; --scale selects the configuration files")
    everything = cells(scale_of(options.scale), [part.strip() for part in options.only.split(",") if part.strip()])
    out = _OUT / options.scale if options.out is None else options.out
    check_at_least("--jobs", options.jobs, 1)
    for file in options.rows:
        if not file.is_file():
            raise ConfigError(f"--rows={file}: no such file; give the rows.jsonl of an earlier run")
    if options.scale == "full":
        return _full(everything, overrides, out, dry_run=options.dry_run)
    absent = extras.missing("matplotlib", "report")
    if absent is not None and not options.dry_run:
        raise ConfigError(f"reproduce draws figures: {absent}")
    files = [*options.rows, out / "rows.jsonl"]

    def planned() -> tuple[list[Cell], list[Cell], dict[str, Row]]:
        """The grid, what is missing of it and what is done. Which cells are wanted may depend on what was found."""
        rows = read_rows(files)
        grid = wanted(everything, done_rows(everything, rows, overrides))
        return grid, missing(grid, rows, overrides), done_rows(grid, rows, overrides)

    grid, todo, done = planned()
    if options.dry_run:
        for cell in todo:
            print(cell.name)
        print(f"{len(todo)} of {len(grid)} cells to run")
        return 0
    while todo and not options.only_tables:
        build_task(load_config([*todo[0].arguments, *overrides]))  # missing data is reported here, once
        print(f"{len(todo)} of {len(grid)} cells to run; if interrupted, rerun the same command to continue", flush=True)
        try:
            run_cells(todo, out, jobs=options.jobs or len(os.sched_getaffinity(0)), overrides=overrides)
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        grid, todo, done = planned()
    if not done:
        raise ConfigError(f"{out / 'rows.jsonl'}: has no row of these cells; run them first, or give --rows FILE")
    _write(Grid(grid, done), out, overrides)
    return 0


def _write(grid: Grid, out: Path, overrides: Sequence[str]) -> None:
    """Tables to the terminal and ``tables.txt``; figures 2 to 6 as ``cocod compare`` draws them, the others beside them."""
    from cocod_accel.report.groups import compare
    from cocod_accel.report.writing import collect, write_all
    from cocod_accel.reproduce.figures import save
    from cocod_accel.reproduce.grid import MODELS
    from cocod_accel.reproduce.language import best_cells
    from cocod_accel.reproduce.learning import learned
    from cocod_accel.reproduce.running import folder_of
    from cocod_accel.reproduce.tables import report

    out.mkdir(parents=True, exist_ok=True)
    text = report(grid)
    print(text)
    (out / "tables.txt").write_text(text + "\n")
    written = save(grid, out)
    found = learned(grid)
    if found is not None:
        path = out / "learned.json"
        path.write_text(json.dumps(asdict(found), indent=2) + "\n")
        written.append(path)
    together = {f"language-{deal.replace(' ', '-')}": these for deal, these in best_cells(grid).items()}
    for part in ("homogeneous", "scaling", "heterogeneous"):
        for model in MODELS:
            of_part = [c for c in grid.cells if (c.part, c.model) == (part, model) and c.name in grid.rows]
            together[f"{part}-{model}"] = of_part
    for name, compared in together.items():
        folders = [folder_of(cell, grid.rows[cell.name], out, overrides) for cell in compared]
        runs, _ = collect([folder for folder in folders if folder is not None])
        if runs:
            written += write_all(compare(runs), out / name)
    print(f"\n{len(written)} files in {out}: tables.txt, and figures in {out}/*/")


def _full(grid: Sequence[Cell], overrides: Sequence[str], out: Path, *, dry_run: bool) -> int:
    """The paper itself: every cell is a real training run, one after the other; ``cocod train`` resumes unfinished ones."""
    import torch

    from cocod_accel.config.loading import load_config
    from cocod_accel.trainer.launch import launch_command

    gpus = torch.cuda.device_count()
    most = max(cell.num_workers for cell in grid)
    if not dry_run and gpus < most:
        raise ConfigError(
            f"--scale=full: needs {most} GPUs on this machine, found {gpus}; --dry-run prints the commands, which you can "
            "run with the --config_file of a cluster"
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
        code = subprocess.run([sys.executable, "-m", "cocod_accel.cli", "train", *arguments, *own], check=False).returncode
        if code:
            print(f"error: {cell.name} exited with {code}; fix it and rerun the same command to continue", file=sys.stderr)
            return code
    if not dry_run:
        print(f"figures: cocod compare {out / 'runs'} --out {out / 'report'}")
    return 0
