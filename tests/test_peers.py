"""``sync.watch()``: in a loop of the user's own, a worker that is gone ends all others, which name it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from cocod_accel.comm.watchdog import _FAULT, Watch, _place, store_of
from tests.test_trainer import ROOT
from tests.workers import run_workers

MESSAGES = {
    "killed": r"worker 1 died at step \d+",
    "stopped": r"worker 1 has not responded for \d+ s; it was at step \d+",
    "raises": r"worker 1 failed at step 31: no such batch",
    "leaves": r"worker 1 ended at step \d+, before the others",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("what", "algorithm", "workers"),
    [
        ("killed", "cocod", 3),
        ("raises", "ssgd", 3),
        ("leaves", "ssgd", 2),
        pytest.param("stopped", "cocod", 2, marks=pytest.mark.alone),
    ],
)
def test_a_worker_that_is_gone_is_named_by_all_others(what: str, algorithm: str, workers: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(workers)}
    line = [sys.executable, "-m", "tests.peer_loop", what, algorithm, "30"]
    processes = [
        subprocess.Popen(
            line, env={**shared, "RANK": str(rank)}, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(workers)
    ]
    try:
        assert processes[1].stdout is not None
        assert processes[1].stdout.readline().startswith("pid")
        begin = time.monotonic()
        for rank in range(workers):
            if rank == 1:
                continue
            _, error = processes[rank].communicate(timeout=60)
            assert processes[rank].returncode == 1, error
            assert re.search(rf"error: {MESSAGES[what]}; worker {rank} ends as well", error), error
        print(f"{what}: all ended after {time.monotonic() - begin:.1f} s")
    finally:
        for process in processes:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
            process.wait()


def kept_apart(rank: int) -> bytes:
    groups = [dist.new_group([0]), dist.new_group([1])]
    store = store_of(groups[rank])
    store.set("beat", str(rank))
    dist.barrier()
    found: bytes = store.get("beat")
    return found


def test_two_models_of_different_workers_do_not_hear_each_other() -> None:
    assert run_workers(2, kept_apart) == [b"0", b"1"]


class LastWords(HashStore):  # type: ignore[misc, unused-ignore]
    """Somebody writes down what is wrong just after it was looked up for the first time."""

    def check(self, keys: list[str]) -> bool:
        found = bool(super().check(keys))
        if not found and keys == [_FAULT]:
            self.set(_FAULT, json.dumps([2, "has not responded for 6 s"]))
        return found


def test_a_worker_that_ended_because_of_another_is_not_accused() -> None:
    store = LastWords()
    beat = {
        "count": 1,
        "place": _place(),
        "pid": os.getpid(),
        "begun": "of one that has ended",
        "doing": "step 3",
        "state": "",
    }
    store.set("cocod_accel/beat/1", json.dumps(beat))
    watch = Watch(store, 0, 3, frozen_seconds=6, on_fault=lambda rank, what: None)
    assert watch.explain(2) == (2, "has not responded for 6 s")
