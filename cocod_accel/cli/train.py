"""``cocod train``: the ``accelerate launch`` command for this machine, printed and run."""

from __future__ import annotations

import argparse

from cocod_accel.cli.common import Commands, add_accelerate_config, add_configs, add_workers, start_workers


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser("train", help="train from YAML files; prints the accelerate launch command and runs it")
    add_configs(parser)
    add_workers(parser, "number of workers; default: cluster.num_workers of the configuration")
    add_accelerate_config(parser)
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="if a worker fails, restart all and resume, up to N times"
    )
    parser.add_argument("--dry-run", action="store_true", help="check the configuration and print the command; run nothing")
    return parser


def run(options: argparse.Namespace) -> int:
    return start_workers(options, max_restarts=options.max_restarts, dry_run=options.dry_run)
