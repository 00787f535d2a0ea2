"""The ``cocod`` command: train, compare, watch, trace, bench, simulate, plan, reproduce, doctor, list."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from pathlib import Path

from cocod_accel import __version__
from cocod_accel.config.strict import ConfigError, found, profiles


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="cocod", description="Train on many workers without waiting for the network or for the slowest machine."
    )
    parser.add_argument("--version", action="version", version=f"cocod {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train from YAML files: prints the accelerate launch line and runs it")
    train.add_argument("configs", nargs="*", metavar="A.yaml|key=value", help="merged in order, then the overrides")
    train.add_argument("--workers", type=int, help="how many workers; default: cluster.num_workers of the configuration")
    train.add_argument(
        "--accelerate-config", type=Path, metavar="FILE", help="another one than this machine's, e.g. one with DeepSpeed"
    )
    train.add_argument("--max-restarts", type=int, default=0, help="start all workers again if one fails; they resume")
    train.add_argument("--dry-run", action="store_true", help="print the line and check the configuration, run nothing")
    train.set_defaults(run=_train)

    compare = commands.add_parser("compare", help="runs side by side: a table, the paper's figures, a page")
    compare.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folders, or folders that hold them")
    compare.add_argument("--target", type=float, help="accuracy for the time to accuracy, e.g. 0.85")
    compare.add_argument("--baseline", help="what speedup is measured against: an algorithm, or a row's name; default: ssgd")
    compare.add_argument("--out", type=Path, metavar="DIR", help="write tables, figures and report.html there")
    compare.set_defaults(run=_compare)

    watch = commands.add_parser("watch", help="a run that is running, in the terminal")
    watch.add_argument("folder", type=Path, metavar="RUN", help="its run folder")
    watch.add_argument("--once", action="store_true", help="print where it is and end; the default without a terminal")
    watch.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="how often to look; default: 1")
    watch.set_defaults(run=_watch)

    trace = commands.add_parser("trace", help="who computed and communicated when, for chrome://tracing and ui.perfetto.dev")
    trace.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    trace.add_argument("--out", type=Path, metavar="FILE", help="default: trace.json in the run folder")
    trace.set_defaults(run=_trace)

    bench = commands.add_parser("bench", help="step time and time to accuracy on slow links, beside the alternatives")
    bench.add_argument("configs", nargs="*", metavar="A.yaml|key=value", help="e.g. configs/bench/links.yaml")
    bench.add_argument("--out", type=Path, default=Path("benchmarks/results/links"), metavar="DIR", help="where to write")
    bench.add_argument("--no-lab", action="store_true", help="emulate links, for our own algorithms alone")
    bench.add_argument("--only-tables", action="store_true", help="of the rows that are there; measure nothing")
    bench.set_defaults(run=_bench)

    simulate = commands.add_parser("simulate", help="what to expect on a cluster that is not there, in virtual time")
    simulate.add_argument("cluster", metavar="CLUSTER.yaml", help="e.g. configs/cluster/paper.yaml")
    simulate.add_argument("configs", nargs="*", metavar="A.yaml|key=value", help="what is trained, as for cocod train")
    simulate.add_argument("--algorithms", metavar="A,B", help="default: all five, or what algorithm.name=... says")
    simulate.add_argument("--workers", type=int, metavar="N", help="another number of workers, of the cluster's mix")
    simulate.add_argument("--steps", type=int, metavar="N", help="steps of worker 0; default: those of the configuration")
    simulate.add_argument("--learn", action="store_true", help="train all workers for real, one by one in this process")
    simulate.add_argument("--spans", type=int, metavar="STEPS", help="how many steps' spans to keep; default: 200")
    simulate.add_argument("--out", type=Path, metavar="DIR", help="where run folders are made; default: runs/simulated")
    simulate.set_defaults(run=_simulate)

    plan = commands.add_parser("plan", help="measure this cluster, or read one: what to train with, what to expect")
    plan.add_argument("configs", nargs="*", metavar="A.yaml|key=value", help="what is trained, as for cocod train")
    plan.add_argument("--cluster", metavar="CLUSTER.yaml", help="plan for this one; measure nothing")
    plan.add_argument("--workers", type=int, metavar="N", help="how many to measure; with --cluster: of its mix")
    plan.add_argument(
        "--save", type=Path, default=Path("cluster.yaml"), metavar="CLUSTER.yaml", help="where to; default: cluster.yaml"
    )
    plan.add_argument("--force", action="store_true", help="replace a file that is there")
    plan.add_argument("--seconds", type=float, default=40.0, help="how long measuring takes, about; default: 40")
    plan.add_argument("--accelerate-config", type=Path, metavar="FILE", help="another one than this machine's")
    plan.add_argument("--out", type=Path, default=Path("plan"), metavar="DIR", help="where the picture goes; default: plan")
    plan.set_defaults(run=_plan)

    reproduce = commands.add_parser("reproduce", help="the paper's tables and figures, and where they do not hold")
    reproduce.add_argument(
        "configs", nargs="*", metavar="key=value", help="overrides for every cell, e.g. task.data_dir=/data"
    )
    reproduce.add_argument("--scale", default="small", metavar="SCALE", help="smoke, small (default) or full: 16 GPUs")
    reproduce.add_argument("--only", default="", metavar="A,B", help="parts: homogeneous, scaling, heterogeneous, skew, ...")
    reproduce.add_argument("--out", type=Path, metavar="DIR", help="default: runs/reproduce/SCALE")
    reproduce.add_argument("--rows", type=Path, action="append", default=[], metavar="FILE", help="rows of earlier sittings")
    reproduce.add_argument("--jobs", type=int, metavar="N", help="cells side by side; default: one a core")
    reproduce.add_argument("--only-tables", action="store_true", help="of the rows that are there; run nothing")
    reproduce.add_argument("--dry-run", action="store_true", help="say what would be run")
    reproduce.set_defaults(run=_reproduce)

    commands.add_parser("doctor", help="what this machine can run").set_defaults(run=_doctor)
    commands.add_parser("list", help="algorithms, tasks, models and profiles").set_defaults(run=_list)

    options, rest = parser.parse_known_args(arguments)
    if options.command in ("train", "bench", "simulate", "plan", "reproduce") and not any(
        argument.startswith("-") for argument in rest
    ):
        options.configs += rest  # overrides after an option
    elif rest:
        parser.error(f"unknown: {' '.join(rest)}")
    try:
        return int(options.run(options))
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _train(options: argparse.Namespace) -> int:
    from cocod_accel.config.loading import load_training_config
    from cocod_accel.tasks import build_task
    from cocod_accel.trainer.launch import launch_command

    arguments = list(options.configs)
    if options.workers is not None:
        arguments.append(f"cluster.num_workers={options.workers}")
    config = load_training_config(arguments)
    build_task(config)  # missing data is said here, once, and not by every worker
    use_gpu = False if config.cluster.device == "cpu" else None
    if options.max_restarts < 0:
        raise ConfigError(f"--max-restarts={options.max_restarts}: must be at least 0")
    given = None if options.accelerate_config is None else found(options.accelerate_config)
    if given is not None and not given.is_file():
        raise ConfigError(f"--accelerate-config={given}: no such file; see configs/accelerate")
    command = launch_command(config.cluster.num_workers, arguments, use_gpu, options.max_restarts, given)
    print(shlex.join(command), flush=True)
    return 0 if options.dry_run else _launch(command)


def _launch(command: list[str]) -> int:
    """Run an ``accelerate launch`` line in this process, and end without its traceback when a worker fails."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.disable(logging.CRITICAL)  # the launcher's own account of a failure: the worker has said what happened
    try:
        launch_command(launch_command_parser().parse_args(command[2:]))
    except ChildFailedError as error:
        # The first to fail is the cause; the others were ended by the launcher.
        code = int(error.get_first_failure()[1].exitcode)
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    except SystemExit as error:
        return int(error.code or 0)
    return 0


def _compare(options: argparse.Namespace) -> int:
    from cocod_accel.cli.compare import collect, write_all
    from cocod_accel.report.groups import compare
    from cocod_accel.report.tables import terminal

    runs, problems = collect(options.runs)
    if not runs:
        raise ValueError(problems[0] if len(problems) == 1 else f"{problems[0]} (and {len(problems) - 1} more like it)")
    comparison = compare(runs, options.target, options.baseline)
    print(terminal(comparison))
    for problem in problems:
        print(f"left out: {problem}", file=sys.stderr)
    if options.out is None:
        print("figures and an interactive page: add --out DIR")
    else:
        written = write_all(comparison, options.out)
        print(f"{len(written)} files in {options.out}; open {options.out / 'report.html'}")
    return 0


def _watch(options: argparse.Namespace) -> int:
    from cocod_accel.report.watch import watch

    return watch(options.folder, sys.stdout, once=options.once or not sys.stdout.isatty(), every_seconds=options.every)


def _trace(options: argparse.Namespace) -> int:
    from cocod_accel.report.trace import write_trace
    from cocod_accel.runs.reading import find_runs
    from cocod_accel.runs.spans import read_spans

    folders = [folder for given in options.runs for folder in find_runs(given)]
    if options.out is None and len(folders) > 1:
        raise ValueError(f"--out: name the file for the {len(folders)} runs together, e.g. --out trace.json")
    path = options.out or folders[0] / "trace.json"
    num_spans = write_trace({folder.name: read_spans(folder) for folder in folders}, path)
    print(f"{num_spans} spans in {path}; open it in ui.perfetto.dev or chrome://tracing")
    return 0


def _bench(options: argparse.Namespace) -> int:
    from benchmarks.links.results import draw, read_rows, summary
    from benchmarks.links.runner import BenchError, run_bench
    from benchmarks.links.settings import load_settings

    settings = load_settings(options.configs)
    path = options.out / "rows.jsonl"
    if not options.only_tables:
        try:
            run_bench(settings, options.out, uses_lab=not options.no_lab)
        except BenchError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    elif not path.is_file():
        raise ConfigError(f"--only-tables: {path} is not there; run the benchmark first")
    rows = read_rows(path)
    text = summary(rows, settings)
    print(text)
    (options.out / "tables.txt").write_text(text + "\n")
    draw(rows, options.out / "step_time.png")
    draw(rows, options.out / "step_time.svg")
    print(f"\nraw rows, tables and picture: {options.out}")
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from cocod_accel.cli.simulate import run
    from cocod_accel.simulator.cluster import load_cluster

    cluster = load_cluster(options.cluster)
    if options.workers is not None:
        if options.workers < 1:
            raise ConfigError(f"--workers={options.workers}: must be at least 1")
        cluster = cluster.resized(options.workers)
    lengths = {"steps": options.steps, "spans": options.spans}
    run(cluster, options.configs, options.algorithms, **lengths, out=options.out, learns=options.learn)
    return 0


def _plan(options: argparse.Namespace) -> int:
    from cocod_accel.cli.plan import run
    from cocod_accel.simulator.cluster import load_cluster

    if options.workers is not None and options.workers < 1:
        raise ConfigError(f"--workers={options.workers}: must be at least 1")
    path = options.save if options.cluster is None else options.cluster
    if options.cluster is None:
        code = _measure(options)
        if code:
            return code
    cluster = load_cluster(path)
    if options.cluster is not None and options.workers is not None:
        cluster = cluster.resized(options.workers)
    run(cluster, options.configs, options.out)
    if options.cluster is None:
        again = shlex.join(["cocod", "plan", *options.configs, "--cluster", str(path)])
        print(f"measured: {path}; plan again from it with {again}")
    return 0


def _measure(options: argparse.Namespace) -> int:
    """Start the workers that measure and write ``--save``."""
    from cocod_accel.config.loading import load_training_config
    from cocod_accel.plan.measure import MODULE
    from cocod_accel.tasks import build_task
    from cocod_accel.trainer.launch import launch_command

    if options.save.exists() and not options.force:
        raise ConfigError(f"--save={options.save}: is there already; plan from it with --cluster, or add --force")
    if not options.save.absolute().parent.is_dir():
        raise ConfigError(f"--save={options.save}: its folder is not there; make it first")
    if not 0 < options.seconds <= 3600:
        raise ConfigError(f"--seconds={options.seconds:g}: must be positive, and an hour at most")
    given = None if options.accelerate_config is None else found(options.accelerate_config)
    if given is not None and not given.is_file():
        raise ConfigError(f"--accelerate-config={given}: no such file; see configs/accelerate")
    arguments = list(options.configs)
    if options.workers is not None:
        arguments.append(f"cluster.num_workers={options.workers}")
    config = load_training_config(arguments)
    build_task(config)
    use_gpu = False if config.cluster.device == "cpu" else None
    worker_arguments = [str(options.save), str(options.seconds), *arguments]
    command = launch_command(config.cluster.num_workers, worker_arguments, use_gpu, config_file=given, module=MODULE)
    print(shlex.join(command), flush=True)
    return _launch(command)


def _reproduce(options: argparse.Namespace) -> int:
    from cocod_accel.cli.reproduce import run

    for given in options.configs:
        if "=" not in given:
            raise ConfigError(f"{given}: not a key=value override; the configurations are those of --scale")
    only = [part.strip() for part in options.only.split(",") if part.strip()]
    flags = {"only_tables": options.only_tables, "dry_run": options.dry_run}
    given = {"only": only, "out": options.out, "rows_files": options.rows, "jobs": options.jobs}
    return run(options.scale, **given, **flags, overrides=options.configs)


def _doctor(options: argparse.Namespace) -> int:
    import accelerate
    import torch

    from cocod_accel.trainer.launch import launch_command

    gpus = torch.cuda.device_count()
    cores = len(os.sched_getaffinity(0))
    print(f"python {sys.version.split()[0]}, torch {torch.__version__}, accelerate {accelerate.__version__}")
    print(f"{cores} CPU cores, {gpus} GPUs")
    backends = [name for name in ("gloo", "nccl") if getattr(torch.distributed, f"is_{name}_available")()]
    print(f"process groups: {', '.join(backends)}")
    workers = gpus if gpus >= 2 else max(2, min(cores, 16))
    if gpus < 2:
        print(f"fewer than two GPUs: {workers} CPU processes, one thread each, joined by gloo")
    arguments = ["configs/quickstart.yaml", f"cluster.num_workers={workers}"]
    print("run, for example:")
    print("  " + shlex.join(launch_command(workers, arguments, use_gpu=gpus >= 2)))
    return 0


def _list(options: argparse.Namespace) -> int:
    from cocod_accel.algorithms import ALGORITHMS
    from cocod_accel.tasks import DATASETS, MODELS

    def first_line(thing: object) -> str:
        return (thing.__doc__ or "").strip().splitlines()[0].rstrip(":.")

    for title, rows in (
        ("algorithms", {name: first_line(kind) for name, kind in ALGORITHMS.items()}),
        ("tasks", {name: first_line(make) for name, make in DATASETS.items()}),
        ("models", {name: first_line(make) for name, make in MODELS.items()}),
    ):
        print(f"{title}:")
        for name, text in rows.items():
            print(f"  {name:14s} {text}")
    print("profiles:")
    root = profiles()
    folders = ("", "tasks/", "variants/", "cluster/", "reproduce/")
    for path in [path for folder in folders for path in sorted(root.glob(f"{folder}*.yaml"))]:
        comment = path.read_text().splitlines()[0].lstrip("# ").rstrip(".")
        print(f"  {Path('configs') / path.relative_to(root)!s:40s} {comment}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
