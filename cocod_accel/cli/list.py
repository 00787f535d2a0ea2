"""``cocod list``: what a configuration may name."""

from __future__ import annotations

import argparse
from pathlib import Path

from cocod_accel.cli.common import Commands
from cocod_accel.config.strict import profiles


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    return commands.add_parser("list", help="list algorithms, tasks, models and profiles")


def run(options: argparse.Namespace) -> int:
    from cocod_accel.algorithms import NAMED
    from cocod_accel.tasks import DATASETS, MODELS

    def first_line(thing: object) -> str:
        return (thing.__doc__ or "").strip().splitlines()[0].rstrip(":.")

    for title, rows in (
        ("algorithms", {name: first_line(kind) for name, kind in NAMED.items()}),
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
