"""What a self-test found: a table for people, a file for whoever is to help them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cocod_accel.selftest.workers import Row

_WIDTH = 118


def heading(machine: dict[str, Any], kind: str, num_workers: int) -> str:
    """The versions, and what was tested: CPUs are not GPUs."""
    known = [name for name in ("cocod_accel", "python", "torch", "accelerate", "cuda", "nccl") if name in machine]
    versions = ", ".join(f"{name} {machine[name]}" for name in known)
    device = "CPU processes" if kind == "cpu" else machine.get("device", kind)
    what = f"{num_workers} {device}, {machine.get('backend', '?')}"
    note = "; this says nothing about GPUs" if kind == "cpu" else ""
    return f"{versions}\n{what}{note}"


def line(row: Row) -> str:
    """One check, wrapped under itself."""
    head = f"{row['check']:<8} {row['state']:<8} {row['seconds']:5.1f} s  "
    return textwrap.fill(row["text"], _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))


def write(path: Path, rows: Sequence[Row], machine: dict[str, Any], kind: str, num_workers: int) -> None:
    tree = {
        "machine": machine,
        "device": kind,
        "num_workers": num_workers,
        "passed": all(row["state"] != "failed" for row in rows),
        "checks": list(rows),
    }
    path.write_text(json.dumps(tree, indent=2) + "\n")
