"""Kill one worker of several, again and again: it must be named every time, and the run must be over within seconds.

python -m tests.kills [--kills 20] [--workers 3] [--seed 0]
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.test_faults import WHERE, end, start, wait_for_rows, workers_of

#: All of them run at some time; the first communicates in every step, so that somebody always waits for the dead worker.
ALGORITHMS = ("ssgd", "cocod", "local", "pipe")


@dataclass(frozen=True)
class Kill:
    """One worker killed in one run."""

    what: str
    is_named: bool
    #: Until the launcher had ended.
    seconds: float
    said: str
    left: int


def kill_one(output: Path, num_workers: int, algorithm: str, rank: int, after_seconds: float) -> Kill:
    """Start a run, let it train, kill a worker; how it ended."""
    output.mkdir()
    more = [f"cluster.num_workers={num_workers}", "cluster.frozen_seconds=60", f"algorithm.name={algorithm}"]
    process = start(output, *more)
    try:
        wait_for_rows(output, process)
        time.sleep(after_seconds)
        os.kill(workers_of(output)[rank], signal.SIGKILL)
        begin = time.monotonic()
        _, said = process.communicate(timeout=120)
        seconds = time.monotonic() - begin
        left = len(workers_of(output))
    finally:
        end(process, output)
    named = re.search(rf"^error: worker {rank} died at {WHERE}$", said, re.MULTILINE) is not None
    return Kill(f"{algorithm}, worker {rank} of {num_workers}", named and "Traceback" not in said, seconds, said, left)


def kills(output: Path, count: int, num_workers: int, seed: int) -> Iterator[Kill]:
    """Of every algorithm in turn, at random moments."""
    chance = random.Random(seed)
    for number in range(count):
        algorithm, rank = ALGORITHMS[number % len(ALGORITHMS)], chance.randrange(num_workers)
        yield kill_one(output / str(number), num_workers, algorithm, rank, chance.uniform(0, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for kill in kills(Path(folder), options.kills, options.workers, options.seed):
            found.append(kill)
            fate = "named" if kill.is_named else f"not named: {kill.said!r}"
            print(f"{kill.what}: over after {kill.seconds:.1f} s, {kill.left} left, {fate}", flush=True)
    named, seconds = sum(kill.is_named for kill in found), sorted(kill.seconds for kill in found)
    print(f"{named} of {len(found)} named; over after {seconds[len(seconds) // 2]:.1f} s, at most {seconds[-1]:.1f} s")
    return 0 if named == len(found) and not any(kill.left for kill in found) else 1


if __name__ == "__main__":
    sys.exit(main())
