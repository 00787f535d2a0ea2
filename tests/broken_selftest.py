"""A worker of ``cocod selftest`` in which something is wrong: a rule, or a worker that fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from cocod_accel.averaging import part
from cocod_accel.averaging.weights import negated_delta_
from cocod_accel.selftest import worker
from cocod_accel.selftest.checks import CHECKS, Check, Finding, Place


def a_little_off(total: Tensor, local: Tensor, divisor: float) -> Tensor:
    return negated_delta_(total, local, divisor * (1 + 1e-9))


def failing(place: Place) -> Finding:
    if place.rank == 1:
        raise OSError("no such device")
    return Finding("well")


def main(kind: str, folder: str, scratch: str) -> None:
    place: Any = worker
    rules: Any = part
    if os.environ["COCOD_BROKEN"] == "raises":
        place.CHECKS = (Check("exact", failing),)
    else:
        rules.negated_delta_ = a_little_off
        place.CHECKS = [check for check in CHECKS if check.name in ("exact", "ddp")]
    worker.main(kind, Path(folder), Path(scratch))


if __name__ == "__main__":
    main(*sys.argv[1:])
