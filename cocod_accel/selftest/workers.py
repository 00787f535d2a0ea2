"""Starts the workers of a self-test, hears what they find, and ends all that it started."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

#: What each of them runs.
MODULE = "cocod_accel.selftest.worker"
#: All checks together, at most.
_SECONDS = 300.0
#: A worker that is killed must be named by the others within this time.
_NAMED_SECONDS = 10.0

Row = dict[str, Any]


def devices_here(wanted: str) -> tuple[str, int]:
    """The kind of device to test, and how many workers it carries; on CPUs any number: 0."""
    import torch

    if wanted == "cpu":
        return "cpu", 0
    kind = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if kind is None else torch.accelerator.device_count()
    if kind is None or count < 2:
        if wanted != "auto":
            raise ValueError(f"--device={wanted}: {count} found here, two are needed; use --device cpu")
        return "cpu", 0
    return kind.type, count


def run_workers(
    kind: str, num_workers: int, folder: Path, on_row: Callable[[Row], None]
) -> tuple[list[Row], dict[str, Any]]:
    """All rows, and what worker 0 says of the machine; ``on_row`` is called as they come."""
    rows: list[Row] = []
    machine: dict[str, Any] = {}
    is_done = False
    with tempfile.TemporaryDirectory() as scratch, _started(kind, num_workers, folder, Path(scratch)) as workers:
        deadline = threading.Timer(_SECONDS, _kill, [workers])
        deadline.start()
        ending = _Ending(workers)
        try:
            for line in _lines(workers[0].stdout):
                if "machine" in line:
                    machine = line["machine"]
                elif "check" in line:
                    rows.append(line)
                    on_row(line)
                else:
                    is_done = True
            for worker in workers:
                worker.wait()
        finally:
            deadline.cancel()
            ending.stop()
        said = [_errors_of(Path(scratch), rank).read_text(errors="replace") for rank in range(num_workers)]
        last = _fault(workers, said, ending.seconds) if is_done else _failure(workers, said)
        rows.append(last)
        on_row(last)
    return rows, machine


@contextmanager
def _started(kind: str, num_workers: int, folder: Path, scratch: Path) -> Iterator[list[subprocess.Popen[str]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_workers)}
    shared.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    if kind == "cpu":
        shared |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    line = [sys.executable, "-m", MODULE, kind, str(folder), str(scratch)]
    workers: list[subprocess.Popen[str]] = []
    try:
        for rank in range(num_workers):
            with _errors_of(scratch, rank).open("w") as errors:
                own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                workers.append(subprocess.Popen(line, env=own, stdout=out, stderr=errors, text=True))
        yield workers
    finally:
        _kill(workers)
        for worker in workers:
            worker.wait()


def _errors_of(scratch: Path, rank: int) -> Path:
    return scratch / f"worker_{rank}.txt"


def _lines(stream: IO[str] | None) -> Iterator[Row]:
    assert stream is not None
    for text in stream:
        if text.startswith("{"):
            yield json.loads(text)


def _kill(workers: list[subprocess.Popen[str]]) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.kill()


class _Ending:
    """Once a worker is gone, all others must go by themselves; whoever has not done so in time is ended here."""

    def __init__(self, workers: list[subprocess.Popen[str]]) -> None:
        self._workers = workers
        self._stopped = threading.Event()
        #: From the end of the first worker to that of the last.
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The workers have ended."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while all(worker.poll() is None for worker in self._workers):
            if self._stopped.wait(0.02):
                return
        begin = time.monotonic()
        while any(worker.poll() is None for worker in self._workers) and self.seconds < 2 * _NAMED_SECONDS:
            time.sleep(0.02)
            self.seconds = time.monotonic() - begin
        _kill(self._workers)


def _fault(workers: list[subprocess.Popen[str]], said: list[str], seconds: float) -> Row:
    last = len(workers) - 1
    silent = [rank for rank in range(last) if not re.search(rf"error: worker {last} died at step \d+", said[rank])]
    row: Row = {"check": "killed", "state": "passed", "seconds": round(seconds, 2), "values": {}}
    row["text"] = f"worker {last} was killed: all others named it, and had ended after {seconds:.1f} s"
    if silent:
        row |= {"state": "failed", "text": f"worker {last} was killed: not named by {silent}", "values": {"stderr": said}}
    elif seconds > _NAMED_SECONDS:
        row |= {"state": "failed", "text": f"worker {last} was killed: the others ended only after {seconds:.1f} s"}
    return row


def _failure(workers: list[subprocess.Popen[str]], said: list[str]) -> Row:
    """The checks did not come to their end."""
    codes = [worker.returncode for worker in workers]
    # The one that raised first has most to say: others only lost it.
    own = [text for text in said if "Error" in text and "closed by peer" not in text] or said
    lines = [line for line in "\n".join(own).splitlines() if line.strip()]
    text = (
        f"the workers ended with codes {codes}: {next((line for line in reversed(lines) if 'Error' in line), 'no message')}"
    )
    return {"check": "ended", "state": "failed", "text": text, "seconds": 0.0, "values": {"stderr": said}}
