"""``cocod plan``: measures this cluster, or reads one, and says what to train with and what to expect."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from cocod_accel.cli.common import (
    Commands,
    add_accelerate_config,
    add_configs,
    add_failures,
    add_workers,
    check_at_least,
    failures_of,
    say_without_figures,
    start_workers,
)
from cocod_accel.config.strict import ConfigError, printable_lines


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser("plan", help="measure this cluster, or read one; say what to train with and what to expect")
    add_configs(parser, "what to train, as for cocod train")
    parser.add_argument("--cluster", metavar="CLUSTER.yaml", help="plan for this cluster file; measure nothing")
    add_workers(parser, "number of workers to measure; with --cluster: resize it, keeping its mix")
    parser.add_argument(
        "--save", type=Path, default=Path("cluster.yaml"), metavar="FILE", help="where to save; default: cluster.yaml"
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.add_argument("--seconds", type=float, default=40.0, help="about how long to measure; default: 40")
    add_accelerate_config(parser)
    add_failures(parser)
    parser.add_argument("--out", type=Path, default=Path("plan"), metavar="DIR", help="folder of the figure; default: plan")
    return parser


def run(options: argparse.Namespace) -> int:
    from cocod_accel.plan.recommend import advise, planned_run
    from cocod_accel.plan.tables import report, scaling_of
    from cocod_accel.simulator.cluster import load_cluster
    from cocod_accel.simulator.tables import goodput_table

    check_at_least("--workers", options.workers, 1)
    failures = failures_of(options)
    path = options.save if options.cluster is None else options.cluster
    if options.cluster is None:
        code = _measure(options)
        if code:
            return code
    cluster = load_cluster(path)
    if options.cluster is not None and options.workers is not None:
        cluster = cluster.resized(options.workers)
    advice = advise(cluster, options.configs)
    print(printable_lines(report(cluster, advice, options.configs)))
    if failures is not None:
        print("\n" + goodput_table([planned_run(cluster, options.configs, advice)], failures))
    if not say_without_figures():
        from cocod_accel.report.figures import draw_expected, save_figures

        options.out.mkdir(parents=True, exist_ok=True)
        figures = save_figures(draw_expected(scaling_of(advice.expected)), options.out)
        print(f"\nfigure: {', '.join(map(str, figures))}")
    if options.cluster is None:
        again = shlex.join(["cocod", "plan", *options.configs, "--cluster", str(path)])
        print(f"measured: {path}; to plan from it again: {again}")
    return 0


def _measure(options: argparse.Namespace) -> int:
    """Start workers that measure and write ``--save``."""
    from cocod_accel.config.loading import merged_config
    from cocod_accel.plan.measure import MODULE

    if options.save.exists() and not options.force:
        raise ConfigError(f"--save={options.save}: already exists; plan from it with --cluster, or add --force")
    if not options.save.absolute().parent.is_dir():
        raise ConfigError(f"--save={options.save}: its folder does not exist; create it first")
    if not 0 < options.seconds <= 3600:
        raise ConfigError(f"--seconds={options.seconds:g}: must be positive and at most 3600")
    shard = merged_config(options.configs).cluster.shard
    if shard is not None:
        raise ConfigError(f"cluster.shard={shard}: is not measured, which takes a whole model; describe it with --cluster")
    return start_workers(options, module=MODULE, arguments=[str(options.save), str(options.seconds)])
