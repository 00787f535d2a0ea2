"""``cocod doctor``: what this machine can run."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from cocod_accel.cli.common import Commands


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    return commands.add_parser("doctor", help="show what this machine can run")


def run(options: argparse.Namespace) -> int:
    import accelerate
    import torch

    from cocod_accel.trainer.launch import launch_command

    gpus = torch.cuda.device_count()
    cores = len(os.sched_getaffinity(0))
    print(f"python {sys.version.split()[0]}, torch {torch.__version__}, accelerate {accelerate.__version__}")
    print(f"{cores} CPU cores, {gpus} GPUs")
    backends = [name for name in ("gloo", "nccl") if getattr(torch.distributed, f"is_{name}_available")()]
    print(f"process groups: {', '.join(backends)}")
    workers = gpus if gpus >= 2 else max(2, min(cores, 16))
    if gpus < 2:
        print(f"fewer than two GPUs: {workers} CPU processes, one thread each, connected by gloo")
    arguments = ["configs/quickstart.yaml", f"cluster.num_workers={workers}"]
    print("run, for example:")
    print("  " + shlex.join(launch_command(workers, arguments, use_gpu=gpus >= 2)))
    return 0
