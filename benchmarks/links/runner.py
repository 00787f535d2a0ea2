"""Runs a benchmark: sets up the links, starts the workers, keeps every row.

A link is given as r_1 = T_comm / T_comp: the time of one payload alone over that of a step without communication. A
machine's speed drifts within seconds, so the workers keep reporting their step time, and the link is adjusted to it.
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

from benchmarks.links.contenders import OURS, available
from benchmarks.links.lab import Lab, Loopback, why_not
from benchmarks.links.meeting import Meeting
from benchmarks.links.settings import BenchSettings
from cocod_accel.comm.emulated import Link
from cocod_accel.config.loading import load_config
from cocod_accel.tasks import build_model, build_task

#: A job that is silent for longer has failed.
_SILENCE_SECONDS = 300.0


class BenchError(RuntimeError):
    """A worker of a benchmark failed."""


def run_bench(settings: BenchSettings, folder: Path, *, uses_lab: bool = True) -> Path:
    """Run the whole benchmark; returns the file of raw rows."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.jsonl"
    (folder / "machine.json").write_text(json.dumps(describe_machine(), indent=2) + "\n")
    (folder / "settings.json").write_text(json.dumps(asdict(settings), indent=2) + "\n")
    reason = why_not() if uses_lab else "--no-lab was given"
    if reason is not None:
        print(f"no network lab: {reason}. Only our own algorithms are timed, on an emulated link.", flush=True)
    with ExitStack() as stack, path.open("w") as file:
        place: Lab | Loopback = Loopback() if reason is not None else Lab(settings.num_workers)
        stack.enter_context(place)
        total = _num_rows(settings, reason is None)
        bar = stack.enter_context(tqdm(total=total, unit="row", disable=not sys.stderr.isatty()))
        bench = Bench(settings, place, folder, file, bar)
        bench.steps()
        bench.accuracy()
    return path


class Bench:
    """One benchmark on one machine."""

    def __init__(self, settings: BenchSettings, place: Lab | Loopback, folder: Path, file: Any, bar: Any) -> None:
        self.settings, self.place, self._folder, self._file, self._bar = settings, place, folder, file, bar
        self._has_lab = isinstance(place, Lab)
        #: The share of a limited link that payload gets: packets have headers, and messages have overhead.
        self._goodput = 1.0
        self._payload_bits = 8 * _payload_bytes(settings)

    def steps(self) -> None:
        """Seconds per step, for each link."""
        options = self.settings.steps
        names = [name for name in available(options.contenders) if name != "none"]
        ours = [name for name in names if name in OURS]
        for ratio in options.ratios:
            emulated = ours if ratio in options.emulated_ratios or not self._has_lab else []
            overrides = [f"batch_size={options.batch_size}"]
            given = {"kind": "steps", "overrides": overrides, "steps": options.steps, "repeats": options.repeats}
            given |= {"closer": options.closer, "closer_repeats": options.closer_repeats}
            self._run(ratio, {**given, "contenders": names, "emulated": emulated})

    def accuracy(self) -> None:
        """Seconds to a target accuracy, with the same seeds for every contender."""
        options = self.settings.accuracy
        names = [name for name in available(options.contenders) if self._has_lab or name in OURS]
        for ratio in options.ratios:
            given = {"target": options.target, "looks": options.looks, "seeds": list(range(options.num_seeds))}
            self._run(ratio, {**given, "kind": "accuracy", "contenders": names})

    def periods(self, ratio: float, job: dict[str, Any]) -> None:
        """The measurement of ``cocod plan`` on one link, and the step time of CoCoD-SGD with every period."""
        overrides = [f"batch_size={self.settings.steps.batch_size}"]
        self._run(ratio, {**job, "kind": "periods", "overrides": overrides})

    def _run(self, ratio: float, job: dict[str, Any]) -> None:
        """Keep the rows of a job, and answer its requests."""
        meeting = self._folder.resolve() / "meeting"
        Meeting.prepare(meeting, self.settings.num_workers)
        given = {"config": self.settings.config, "period": self.settings.period, "has_lab": self._has_lab, **job}
        given["meeting"] = str(meeting)
        processes = self._start(given)
        try:
            for row in _rows_of(processes, self._folder):
                if row["kind"] == "ask":
                    _tell(processes[0], self._make_link(ratio, row))
                    continue
                if row["kind"] == "measured":
                    self._goodput *= row["link"]["payload_seconds"] / row["communicate_seconds"]
                self._keep({"ratio": ratio, "clock": "lab" if self._has_lab else "emulated", **row})
        finally:
            self.place.end()
            self.place.limit(Link())
            meeting.unlink()

    def _make_link(self, ratio: float, asked: dict[str, Any]) -> dict[str, Any]:
        """Set up the link for a worker's current step time. In a ring a worker sends 2 (N - 1) / N payloads."""
        seconds = (asked["ratio"] or ratio) * asked["compute_seconds"]
        num_workers = self.settings.num_workers
        bandwidth = self._payload_bits * 2 * (num_workers - 1) / num_workers / seconds / 1e6
        if not asked["emulated"]:
            bandwidth /= self._goodput
        self.place.limit(Link() if asked["emulated"] else Link(bandwidth_mbit=bandwidth))
        return {"bandwidth_mbit": bandwidth, "payload_seconds": seconds}

    def _keep(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self._bar.update()

    def _start(self, job: dict[str, Any]) -> list[subprocess.Popen[str]]:
        port = self.place.free_port()
        processes = []
        for rank in range(self.settings.num_workers):
            env = {
                "RANK": str(rank), "WORLD_SIZE": str(self.settings.num_workers), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": self.place.address(0), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }  # fmt: skip
            command = [sys.executable, "-m", "benchmarks.links.worker", json.dumps(job)]
            silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
            streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE} if rank == 0 else silent
            # A file: a pipe that nobody reads would block a verbose worker.
            complaints = (self._folder / f"worker{rank}.log").open("w")
            with complaints:
                started = self.place.start(rank, command, core=rank, env=env, text=True, stderr=complaints, **streams)
            processes.append(started)
        return processes


def _tell(process: subprocess.Popen[str], answer: dict[str, Any]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(answer) + "\n")
        process.stdin.flush()
    except BrokenPipeError:  # it has failed; the next poll reports why
        pass


def _payload_bytes(settings: BenchSettings) -> int:
    config = load_config([settings.config])
    model = build_model(config, build_task(config))
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _rows_of(processes: list[subprocess.Popen[str]], folder: Path) -> Iterator[dict[str, Any]]:
    """The rows that worker 0 prints; every worker must exit with 0."""
    assert processes[0].stdout is not None
    out = processes[0].stdout.fileno()  # not the file object: select would miss what it has buffered
    heard, begun = time.monotonic(), b""
    while True:
        if select.select([out], [], [], 0.5)[0]:
            read = os.read(out, 1 << 16)
            if not read:
                break
            heard = time.monotonic()
            *lines, begun = (begun + read).split(b"\n")
            for line in lines:
                yield json.loads(line)
        for rank, process in enumerate(processes):
            if process.poll() not in (None, 0):
                raise _failed(rank, process, folder)
        if time.monotonic() - heard > _SILENCE_SECONDS:
            raise BenchError(f"no output from worker 0 for {_SILENCE_SECONDS:.0f} s")
    for rank, process in enumerate(processes):
        if process.wait(timeout=60) != 0:
            raise _failed(rank, process, folder)


def _failed(rank: int, process: subprocess.Popen[str], folder: Path) -> BenchError:
    log = folder / f"worker{rank}.log"
    lines = log.read_text(errors="replace").strip().splitlines()
    return BenchError(f"worker {rank} exited with {process.returncode}: {lines[-1] if lines else 'silent'}; see {log}")


def describe_machine() -> dict[str, Any]:
    """The machine that the figures were measured on."""
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
    """The number of rows to expect, for the progress bar."""
    steps, accuracy = settings.steps, settings.accuracy
    total = 0
    names = [name for name in available(steps.contenders) if name != "none"]
    for ratio in steps.ratios:
        num_blocks = len(names) if has_lab else 0
        if ratio in steps.emulated_ratios or not has_lab:
            num_blocks += len([name for name in names if name in OURS])
        closer = len([name for name in names if name in steps.closer and (has_lab or name in OURS)])
        total += steps.repeats * (2 * num_blocks + 1) + (2 if has_lab else 0)
        total += steps.closer_repeats * (2 * closer + 1) if closer else 0
    contenders = [name for name in available(accuracy.contenders) if has_lab or name in OURS]
    return total + len(accuracy.ratios) * (accuracy.num_seeds * len(contenders) + (2 if has_lab else 0))
