"""The ``accelerate launch`` line for this machine, and how many threads each worker gets."""

from __future__ import annotations

import os
import socket
from importlib.metadata import version
from pathlib import Path

import torch

from cocod_accel.config.strict import profiles

#: What workers run, unless another module is named.
TRAINER = "cocod_accel.train"


def _local_workers() -> int:
    """Workers on this machine; the ``deepspeed`` launcher has a name of its own for it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")


def accelerate_config(num_workers: int, use_gpu: bool) -> Path:
    """The accelerate configuration in ``configs/accelerate`` for one machine."""
    name = "gpu_8" if use_gpu else "cpu_16" if num_workers > 2 else "cpu_2"
    return profiles() / "accelerate" / f"{name}.yaml"


def launch_command(
    num_workers: int,
    arguments: list[str],
    use_gpu: bool | None = None,
    max_restarts: int = 0,
    config_file: Path | None = None,
    module: str = TRAINER,
) -> list[str]:
    """The ``accelerate launch`` line that runs the trainer, or another module, with this many workers on this machine."""
    gpu = torch.cuda.device_count() >= num_workers if use_gpu is None else use_gpu
    config = config_file or accelerate_config(num_workers, gpu)
    shown = os.path.relpath(config)
    options = ["--config_file", str(config) if shown.startswith("..") else shown, "--num_processes", str(num_workers)]
    if "main_process_port: 0" in config.read_text().splitlines() and not chooses_port():
        options += ["--main_process_port", str(_free_port())]
    if max_restarts:
        options += ["--max_restarts", str(max_restarts), "--monitor_interval", "0.5"]
    return ["accelerate", "launch", *options, "-m", module, *arguments]


def chooses_port() -> bool:
    """Whether accelerate takes a free port where it is told port 0; before 1.7 workers would try to reach that one."""
    major, minor = version("accelerate").split(".")[:2]
    return (int(major), int(minor)) >= (1, 7)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def threads_of_each(num_workers: int) -> int:
    """How many threads each of the workers on this machine computes with: as asked for, or its share of the cores."""
    try:
        asked = int(os.environ["OMP_NUM_THREADS"])
    except (KeyError, ValueError):
        asked = 0
    return asked if asked > 0 else max(1, len(os.sched_getaffinity(0)) // num_workers)


def most_workers() -> int:
    """More workers than this are no use on this machine, and a danger to it."""
    return max(64, 32 * (os.cpu_count() or 1))


def has_core_each() -> bool:
    """Whether every worker on this machine can have a CPU core of its own."""
    return _local_workers() <= len(os.sched_getaffinity(0))
