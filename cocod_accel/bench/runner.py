"""Runs a benchmark: measures the machine, makes the links, starts the workers, keeps every row.

A link is given as r_1 = T_comm / T_comp: how long one payload takes alone, over a step without communication. The step is
measured first, and the bandwidth follows from it.
"""

from __future__ import annotations

import json
import os
import platform
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from cocod_accel.bench.contenders import OURS, available
from cocod_accel.bench.settings import BenchSettings
from cocod_accel.comm import Link
from cocod_accel.lab import Lab, Loopback, why_not

#: No job is silent for longer than this.
_SILENCE_SECONDS = 300.0
#: A link is mended so often at most, until a payload takes what was meant, give or take this share.
_TRIES, _CLOSE_ENOUGH = 3, 0.05


class BenchError(RuntimeError):
    """A worker of a benchmark failed."""


def run_bench(settings: BenchSettings, folder: Path, *, uses_lab: bool = True) -> Path:
    """Everything the settings ask for; the file of raw rows."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.jsonl"
    (folder / "machine.json").write_text(json.dumps(describe_machine(), indent=2) + "\n")
    (folder / "settings.json").write_text(json.dumps(asdict(settings), indent=2) + "\n")
    reason = why_not() if uses_lab else "none was asked for"
    if reason is not None:
        print(f"no network lab: {reason}. Only our own algorithms are timed, on an emulated link.", flush=True)
    with ExitStack() as stack, path.open("w") as file:
        place: Lab | Loopback = Loopback() if reason is not None else Lab(settings.num_workers)
        stack.enter_context(place)
        total = _num_rows(settings, reason is None)
        bar = stack.enter_context(tqdm(total=total, unit="row", disable=not sys.stderr.isatty()))
        bench = _Bench(settings, place, file, bar)
        bench.steps()
        bench.accuracy()
    return path


class _Bench:
    """One benchmark on one machine."""

    def __init__(self, settings: BenchSettings, place: Lab | Loopback, file: Any, bar: Any) -> None:
        self.settings, self.place, self._file, self._bar = settings, place, file, bar

    def steps(self) -> None:
        """Seconds a step, link by link."""
        options = self.settings.steps
        overrides = [f"batch_size={options.batch_size}"]
        job = {"overrides": overrides, "steps": options.steps, "repeats": options.repeats}
        names = available(options.contenders)
        ours = [name for name in names if name in OURS]
        for ratio in options.ratios:
            if isinstance(self.place, Lab):
                link = self._limit(ratio, overrides)
                for row in self._run({**job, "kind": "steps", "contenders": names}):
                    self._keep({**row, "ratio": ratio, "clock": "lab", "link": asdict(link)})
                if ratio not in options.emulated_ratios:
                    continue
            else:
                link = self._link(ratio, overrides)
            self.place.limit(Link())
            for row in self._run({**job, "kind": "steps", "contenders": ours, "emulate": asdict(link)}):
                self._keep({**row, "ratio": ratio, "clock": "emulated", "link": asdict(link)})

    def accuracy(self) -> None:
        """Seconds to a target accuracy, with the same seeds for everybody."""
        options = self.settings.accuracy
        names = available(options.contenders)
        job = {"target": options.target, "looks": options.looks, "seeds": list(range(options.num_seeds))}
        for ratio in options.ratios:
            emulate: dict[str, Any] = {}
            if isinstance(self.place, Lab):
                link = self._limit(ratio, [])
            else:
                link = self._link(ratio, [])
                emulate, names = {"emulate": asdict(link)}, [name for name in names if name in OURS]
            for row in self._run({**job, **emulate, "kind": "accuracy", "contenders": names}):
                self._keep({**row, "ratio": ratio, "clock": "emulated" if emulate else "lab", "link": asdict(link)})

    def _limit(self, ratio: float, overrides: list[str]) -> Link:
        """Make the link, measure what a payload then really takes, and mend the link until that is what was meant."""
        link = self._link(ratio, overrides)
        for _ in range(_TRIES):
            self.place.limit(link)
            measured = self._measure(overrides)
            found = measured["communicate_seconds"] / measured["compute_seconds"]
            if abs(found / ratio - 1) <= _CLOSE_ENOUGH:
                break
            assert link.bandwidth_mbit is not None
            link = Link(bandwidth_mbit=link.bandwidth_mbit * found / ratio)
        self._keep({**measured, "ratio": ratio, "clock": "lab", "link": asdict(link)})
        return link

    def _link(self, ratio: float, overrides: list[str]) -> Link:
        """Measured anew each time: a machine's speed drifts. In a ring a worker sends 2 (N - 1) / N payloads."""
        self.place.limit(Link())
        measured = self._measure(overrides)
        num_workers = self.settings.num_workers
        sent_bits = 8 * measured["payload_bytes"] * 2 * (num_workers - 1) / num_workers
        return Link(bandwidth_mbit=sent_bits / (ratio * measured["compute_seconds"]) / 1e6)

    def _measure(self, overrides: list[str]) -> dict[str, Any]:
        (row,) = self._run({"kind": "measure", "overrides": overrides, "steps": 5, "repeats": 5})
        return row

    def _keep(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self._bar.update()

    def _run(self, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The rows of a job, as worker 0 prints them; every worker must end well."""
        given = {"config": self.settings.config, "period": self.settings.period, **job}
        port = self.place.free_port()
        processes = []
        for rank in range(self.settings.num_workers):
            env = {
                "RANK": str(rank), "WORLD_SIZE": str(self.settings.num_workers), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": self.place.address(0), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }  # fmt: skip
            command = [sys.executable, "-m", "cocod_accel.bench.worker", json.dumps(given)]
            streams = {"stdout": subprocess.PIPE if rank == 0 else subprocess.DEVNULL, "stderr": subprocess.PIPE}
            processes.append(self.place.start(rank, command, core=rank, env=env, text=True, **streams))
        try:
            yield from _rows_of(processes)
        finally:
            self.place.end()


def _rows_of(processes: list[subprocess.Popen[str]]) -> Iterator[dict[str, Any]]:
    out = processes[0].stdout
    assert out is not None
    heard = time.monotonic()
    while True:
        if select.select([out], [], [], 0.5)[0]:
            line = out.readline()
            if not line:
                break
            heard = time.monotonic()
            yield json.loads(line)
        failed = [(rank, p) for rank, p in enumerate(processes) if p.poll() not in (None, 0)]
        if failed:
            rank, process = failed[0]
            raise BenchError(f"worker {rank} ended with {process.returncode}: {_last_line(process)}")
        if time.monotonic() - heard > _SILENCE_SECONDS:
            raise BenchError(f"no worker has said anything for {_SILENCE_SECONDS:.0f} s")
    for rank, process in enumerate(processes):
        if process.wait(timeout=60) != 0:
            raise BenchError(f"worker {rank} ended with {process.returncode}: {_last_line(process)}")


def _last_line(process: subprocess.Popen[str]) -> str:
    lines = process.stderr.read().strip().splitlines() if process.stderr is not None else []
    return lines[-1] if lines else "it said nothing"


def describe_machine() -> dict[str, Any]:
    """What the figures were measured on."""
    models = [
        line.partition(":")[2].strip()
        for line in (Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else "").splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _num_rows(settings: BenchSettings, has_lab: bool) -> int:
    """How much there is to do, for the progress bar."""
    steps, accuracy = settings.steps, settings.accuracy
    total = 0
    for ratio in steps.ratios:
        everybody, ours = available(steps.contenders), [name for name in steps.contenders if name in OURS]
        total += steps.repeats * (2 * len([n for n in everybody if n != "none"]) + 1) + 1 if has_lab else 0
        total += steps.repeats * (2 * len(ours) + 1) if not has_lab or ratio in steps.emulated_ratios else 0
    contenders = [name for name in available(accuracy.contenders) if has_lab or name in OURS]
    return total + len(accuracy.ratios) * (accuracy.num_seeds * len(contenders) + (1 if has_lab else 0))
