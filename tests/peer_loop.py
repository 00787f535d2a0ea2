"""A loop of a user's own, with ``sync.watch()``; at a step one worker is killed, stopped, raises or leaves."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cocod_accel import SSGD, CoCoDSGD, attach


def main(what: str, algorithm: str, at: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(model, optimizer, SSGD() if algorithm == "ssgd" else CoCoDSGD(2)) as sync:
        sync.watch(frozen_seconds={"stopped": 3, "cut": 6}.get(what, 60))
        for step in range(10**9):
            if step == at and rank == 1:
                print(f"pid {os.getpid()}", flush=True)
                if what == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if what == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if what == "raises":
                    raise ValueError("no such batch")
                if what == "leaves":
                    sys.exit(0)
            optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
