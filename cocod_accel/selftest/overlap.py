"""How much of a transfer lies beside computing: step times on a stretched link, and a profiler's trace of a real one."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from cocod_accel.algorithms import Algorithm, CoCoDSGD, LocalSGD
from cocod_accel.comm.agreement import exchange_reports
from cocod_accel.comm.device import wait_for_device
from cocod_accel.comm.emulated import Link
from cocod_accel.sync.attach import attach

_PERIOD, _ROUNDS, _WARM_UP = 5, 6, 5
#: A stretched transfer takes so much of a round's computing.
_STRETCH = 0.6
_ANCHOR = "cocod_accel: here its clock is read"

Interval = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """What was measured, by the slowest worker."""

    text: str
    #: Of the stretched transfers.
    hidden_share: float
    values: dict[str, Any]


class _Loop:
    """A model that takes some milliseconds a step, and is averaged in rounds."""

    def __init__(self, device: torch.device, algorithm: Algorithm, link: Link | None = None) -> None:
        torch.manual_seed(0)
        width, batch = (384, 1024) if device.type == "cpu" else (4096, 4096)
        layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
        self._device = device
        devices = None if device.type == "cpu" else [device]
        self._model = DistributedDataParallel(nn.Sequential(*layers).to(device), device_ids=devices)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._inputs = torch.randn(batch, width, device=device)
        self.sync = attach(self._model, self._optimizer, algorithm)
        if link is not None:
            self.sync.control.emulate_link(link)

    def steps(self, number: int) -> float:
        """Seconds that they take."""
        wait_for_device(self._device)
        begin = time.perf_counter()
        for _ in range(number):
            self._optimizer.zero_grad()
            self._model(self._inputs).square().mean().backward()
            self._optimizer.step()
        wait_for_device(self._device)
        return time.perf_counter() - begin


def measure_overlap(device: torch.device, rank: int, num_workers: int, trace: Path) -> Overlap:
    """Every worker calls this; worker 0 writes the trace."""

    def slowest(value: float) -> float:
        return float(max(exchange_reports(value, dist.group.WORLD, device)))

    def step_seconds(algorithm: Algorithm, link: Link | None) -> tuple[float, float]:
        """Of a step, and the share of the transfers that was hidden."""
        loop = _Loop(device, algorithm, link)
        loop.steps(_WARM_UP)
        before = loop.sync.stats()
        seconds = loop.steps(_PERIOD * _ROUNDS) / (_PERIOD * _ROUNDS)
        after = loop.sync.stats()
        loop.sync.detach()
        hidden = after.hidden_seconds - before.hidden_seconds
        total = hidden + after.exposed_seconds - before.exposed_seconds
        return slowest(seconds), 1 - slowest(1 - hidden / total if total > 0 else 0.0)

    alone, _ = step_seconds(LocalSGD(10**9), None)
    transfer = _STRETCH * _PERIOD * alone
    link = Link(latency_ms=transfer * 1e3 / (2 * (num_workers - 1)))
    ours, hidden = step_seconds(CoCoDSGD(_PERIOD), link)
    blocking, _ = step_seconds(LocalSGD(_PERIOD), link)
    beside = _profiled(device, rank, trace)
    values = {
        "step_seconds": {"no communication": alone, "cocod": ours, "local": blocking},
        "emulated_transfer_seconds": transfer,
        "hidden_share": hidden,
        "beside_computing_in_trace": beside,
    }
    text = (
        f"transfers stretched to {_STRETCH:g} of a round: {hidden:.0%} hidden; a step takes {ours / alone:.2f} "
        f"of one without communication (local {blocking / alone:.2f})"
    )
    if beside is not None:
        text += f"; real ones in the trace: {beside:.0%} beside computing"
    return Overlap(text, hidden, values)


def _profiled(device: torch.device, rank: int, path: Path) -> float | None:
    """How much of the transfers lies beside computing; worker 0's trace, with its own account of transfers in it."""
    loop = _Loop(device, CoCoDSGD(_PERIOD))
    loop.steps(_WARM_UP)
    loop.sync.control.record_spans()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    if rank == 0:
        with profile(activities=activities) as profiler:
            with record_function(_ANCHOR):
                anchor = time.perf_counter()
            loop.steps(2 * _PERIOD + 1)
        profiler.export_chrome_trace(str(path))
    else:
        loop.steps(2 * _PERIOD + 1)
    spans = loop.sync.control.take_spans()
    loop.sync.detach()
    if rank != 0:
        return None
    tree = json.loads(path.read_text())
    events = tree["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if kernels:
        sent = [_interval(event) for event in kernels if "nccl" in event["name"].lower()]
        computed = [_interval(event) for event in kernels if "nccl" not in event["name"].lower()]
        share = _covered(sent, computed)
    else:
        sent = [(start, end) for name, start, end in spans if name == "communicate"]
        share = 1 - _covered(sent, [(start, end) for name, start, end in spans if name == "wait"])
    offset = next(float(event["ts"]) for event in events if event.get("name") == _ANCHOR) - 1e6 * anchor
    events += _events(spans, offset)
    path.write_text(json.dumps(tree))
    return share


def _events(spans: Sequence[tuple[str, float, float]], offset: float) -> list[dict[str, Any]]:
    """As a process of their own in the trace."""
    names = sorted({name for name, _, _ in spans})
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": "cocod_accel", "args": {"name": "cocod_accel, worker 0"}},
        *(
            {"ph": "M", "name": "thread_name", "pid": "cocod_accel", "tid": tid, "args": {"name": name}}
            for tid, name in enumerate(names)
        ),
    ]
    for name, start, end in spans:
        place = {"pid": "cocod_accel", "tid": names.index(name), "ts": 1e6 * start + offset}
        events.append({"ph": "X", "name": name, "cat": "cocod_accel", **place, "dur": 1e6 * (end - start)})
    return events


def _interval(event: dict[str, Any]) -> Interval:
    start = float(event["ts"])
    return start, start + float(event["dur"])


def _covered(intervals: Sequence[Interval], others: Sequence[Interval]) -> float:
    """The share of ``intervals`` that lies in ``others``; 0 if there are none."""
    total = sum(end - start for start, end in intervals)
    if total <= 0:
        return 0.0
    merged: list[list[float]] = []
    for start, end in sorted(others):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    inside = sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in intervals for begin, stop in merged)
    return inside / total
