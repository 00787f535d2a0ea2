"""``algorithm.payload: auto`` and ``algorithm.delay: auto``: chosen once, before training, from measured times.

All workers time the same transfers and share what they found, so all of them choose the same. The choice stands in the run's
``config.yaml`` in place of ``auto``: a resumed run keeps it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from cocod_accel.config.loading import load_config
from cocod_accel.config.settings import Config
from cocod_accel.sync.sync import Sync
from cocod_accel.theory import StepTimes
from cocod_accel.theory.hiding import AUTO, CODES, Choice, choose

#: Transfers that are timed with each code.
_NUM_TRANSFERS = 3

Gather = Callable[[list[float]], list[list[float]]]


def choose_code(config: Config, sync: Sync, gather: Gather, compute_seconds: float) -> tuple[Choice, str]:
    """What hides, and why in words. Collective; ``compute_seconds``: a step of the slowest worker."""
    options = config.algorithm
    codes = CODES if options.payload == AUTO else (options.payload,)
    own = [sync.control.time_transfer(code) for code in codes for _ in range(_NUM_TRANSFERS)]
    rows = gather([compute_seconds, *own, *(sync.control.time_coding(code) for code in codes)])
    compute = max(row[0] for row in rows)
    times: dict[str, StepTimes] = {}
    for index, code in enumerate(codes):
        columns = range(1 + index * _NUM_TRANSFERS, 1 + (index + 1) * _NUM_TRANSFERS)
        # Whoever joined last has seen the transfer alone; the others have waited for that worker, too.
        alone = [min(row[column] for row in rows) for column in columns]
        coding = max(row[1 + len(own) + index] for row in rows)
        times[code] = StepTimes(compute, statistics.median(alone), interference=0.0, coding_seconds=coding)
    choice = choose(
        lambda code: times[code],
        payload=options.payload,
        period=None if config.has_auto_period else min(k for _, k in config.period_by_epoch),
        delay=options.delay,
        least=options.fragments,
    )
    transfers = ", ".join(f"{code} {_milliseconds(times[code])}" for code in codes)
    delay = "" if choice.delay is None else f", delay {choice.delay}"
    return (
        choice,
        f"payload {choice.payload}{delay}; a step takes {1e3 * compute:.1f} ms, an average in ms (+ coding): {transfers}",
    )


def _milliseconds(times: StepTimes) -> str:
    coding = f" + {1e3 * times.coding_seconds:.1f}" if times.coding_seconds else ""
    return f"{1e3 * times.comm_seconds:.1f}{coding}"


def keep_choice(config: Config, saved: Path) -> None:
    """Of a run that is resumed: what was chosen when it began."""
    options, before = config.algorithm, load_config([str(saved)]).algorithm
    if options.payload == AUTO:
        options.payload = before.payload
    if options.delay == AUTO:
        options.delay = before.delay
