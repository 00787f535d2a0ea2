"""Run a function on N real processes joined by gloo, and never leave one behind.

Processes are forked from a server that has already imported torch, so that a test costs tenths of a second. Every run
has a deadline; what is still alive then is killed by its process id, and the failing rank, its traceback or its
signal are reported.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
# What is not imported here, every worker imports anew: half a second of a core for the modules of the trainer and pytest.
_PRELOAD = ["torch._dynamo", "torch._inductor.config", "accelerate.accelerator", "safetensors.torch", "pytest", "hypothesis"]
_CONTEXT.set_forkserver_preload([*_PRELOAD, "cocod_accel.train", "tests.workers"])


@dataclass
class Outcome:
    """How one worker ended: its result, or the error it raised (type name, message, traceback)."""

    rank: int
    result: Any = None
    error: tuple[str, str, str] | None = None
    exit_code: int | None = None


class WorkerError(AssertionError):
    """A worker raised, died or did not end in time."""


def start_of_worker(rank: int, num_workers: int, store: str) -> None:
    """What every test worker does first: one thread, loopback only, a file store of its own."""
    import torch
    import torch.distributed as dist

    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(num_workers))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_workers, timeout=timedelta(seconds=60)
    )


def _main(
    rank: int, num_workers: int, store: str, pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch.distributed as dist

    try:
        start_of_worker(rank, num_workers, store)
        outcome = Outcome(rank, result=function(rank, *args))
    except BaseException as error:
        outcome = Outcome(rank, error=(type(error).__name__, str(error), traceback.format_exc()))
    pipe.send_bytes(pickle.dumps(outcome))  # plain pickle: by default tensors would travel as shared memory of this process
    if outcome.error is None and dist.is_initialized():
        dist.destroy_process_group()


def run_outcomes(num_workers: int, function: Callable[..., Any], *args: Any, seconds: float = 60) -> list[Outcome]:
    """Call ``function(rank, *args)`` on every worker; what each returned or raised, in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes, pipes = [], []
        try:
            for rank in range(num_workers):
                receiver, sender = _CONTEXT.Pipe(duplex=False)
                process = _CONTEXT.Process(target=_main, args=(rank, num_workers, store, sender, function, args))
                process.start()
                sender.close()
                processes.append(process)
                pipes.append(receiver)
            return _collect(processes, pipes, time.monotonic() + seconds)
        finally:
            for process in processes:
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, signal.SIGKILL)
                process.join()
                process.close()
            for pipe in pipes:
                pipe.close()


def _collect(processes: list[Any], pipes: list[Connection], deadline: float) -> list[Outcome]:
    outcomes = [Outcome(rank) for rank in range(len(processes))]
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = sorted(open_pipes.values())
            raise WorkerError(f"ranks {late} did not end in time")
        for pipe in ready:
            rank = open_pipes.pop(pipe)  # type: ignore[arg-type]
            try:
                outcomes[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                outcomes[rank].error = ("Died", f"rank {rank} died without a word", "")
    for rank, process in enumerate(processes):
        process.join(max(0.1, deadline - time.monotonic()))
        if process.exitcode is None:
            raise WorkerError(f"rank {rank} answered but did not exit in time")
        outcomes[rank].exit_code = process.exitcode
    return outcomes


def run_workers(num_workers: int, function: Callable[..., Any], *args: Any, seconds: float = 60) -> list[Any]:
    """Like :func:`run_outcomes`, but every worker must succeed and exit with 0; the results in rank order."""
    outcomes = run_outcomes(num_workers, function, *args, seconds=seconds)
    for outcome in outcomes:
        if outcome.error is not None:
            raise WorkerError(f"rank {outcome.rank}: {outcome.error[0]}: {outcome.error[1]}\n{outcome.error[2]}")
    for outcome in outcomes:
        if outcome.exit_code != 0:
            raise WorkerError(f"rank {outcome.rank} succeeded but exited with {outcome.exit_code}")
    return [outcome.result for outcome in outcomes]
