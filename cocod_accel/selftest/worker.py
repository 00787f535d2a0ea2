"""One worker of ``cocod selftest``: ``python -m cocod_accel.selftest.worker DEVICE FOLDER SCRATCH``.

Worker 0 prints lines of JSON: the machine, each check, and that the last one has come to its end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cocod_accel.comm.agreement import exchange_reports
from cocod_accel.selftest.checks import CHECKS, Check, Finding, Place, coded_in_one_process, killed

_TIMEOUT = timedelta(seconds=60)


def main(kind: str, folder: Path, scratch: Path) -> None:
    rank, num_workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if kind == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        device = torch.device("cpu")
        torch.set_num_threads(1)
        backend = "gloo"
    else:
        device = torch.device(kind, rank)
        torch.accelerator.set_device_index(rank)
        backend = dist.get_default_backend_for_device(device)
    coded = coded_in_one_process(rank, num_workers)
    dist.init_process_group(backend, timeout=_TIMEOUT)
    place = Place(device, rank, num_workers, folder, scratch, coded)
    machine = {**_machine(device, backend), "device": _devices(device)}
    if rank == 0:
        _say({"machine": machine})
    for check in CHECKS:
        _answer(place, check)
    if rank == 0:
        _say({"done": True})
    killed(place)


def _say(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


def _answer(place: Place, check: Check) -> None:
    begin = time.perf_counter()
    finding = check.run(place)
    seconds = time.perf_counter() - begin
    everybodys: list[Finding] = exchange_reports(finding, dist.group.WORLD, place.device)
    wrong = [(rank, each) for rank, each in enumerate(everybodys) if not each.is_right]
    text = f"worker {wrong[0][0]}: {wrong[0][1].text}" if wrong and finding.is_right else finding.text
    if place.rank == 0:
        state = "failed" if wrong else "skipped" if finding.is_skipped else "passed"
        told = {"text": text, "seconds": round(seconds, 2), "values": finding.values}
        _say({"check": check.name, "state": state, **told})


def _devices(device: torch.device) -> str:
    """What the workers run on; each kind once."""
    own = "CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device.index)
    return ", ".join(dict.fromkeys(exchange_reports(own, dist.group.WORLD, device)))


def _machine(device: torch.device, backend: str) -> dict[str, Any]:
    import accelerate

    import cocod_accel

    found: dict[str, Any] = {
        "cocod_accel": cocod_accel.__version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "backend": backend,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
