"""Run a function on N real processes joined by gloo, and never leave one behind.

Processes are forked from a server that has already imported torch, so that a test costs tenths of a second. Every run
has a deadline; what is still alive then is killed by its process id, and the failing rank, its traceback or its
signal are reported.

Ranks are kept for the next call: each call gets a new process group, new seeds and the environment of a new process. A
rank that raised or died ends, and so do the others of its call. What changes the process itself (signals, exits, patched
modules, training from a configuration) asks for processes of its own with ``fresh=True``.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from cocod_accel.comm.shutdown import rest

_CONTEXT = multiprocessing.get_context("forkserver")
# What is not imported here, every worker imports anew: half a second of a core for the modules of the trainer and pytest.
_PRELOAD = [
    "torch._dynamo", "torch._inductor.config", "accelerate.accelerator", "safetensors.torch",
    "pytest", "hypothesis", "cocod_accel.train", "tests.workers",
]  # fmt: skip


#: destroy_process_group() of torch 2.7 waits for a thread of gloo for ever, holding the lock that it needs, if a collective
#: was abandoned or has only just ended: a rank that has answered and then hangs there is killed, and nothing is said.
_ENDS_MAY_HANG = version("torch").startswith("2.7.")


def preload(*modules: str) -> None:
    """More that the server imports, for test files whose workers all need it: called when they are imported."""
    _PRELOAD.extend(module for module in modules if module not in _PRELOAD)
    _CONTEXT.set_forkserver_preload(_PRELOAD)


preload()


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
    dist.barrier()  # a rank that leaves while another still connects would fail that one's connecting, not its call


def _call(rank: int, num_workers: int, store: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Outcome:
    try:
        start_of_worker(rank, num_workers, store)
        return Outcome(rank, result=function(rank, *args))
    except BaseException as error:
        return Outcome(rank, error=(type(error).__name__, str(error), traceback.format_exc()))


def _main(
    rank: int, num_workers: int, store: str, pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch.distributed as dist

    outcome = _call(rank, num_workers, store, function, args)
    pipe.send_bytes(pickle.dumps(outcome))  # plain pickle: by default tensors would travel as shared memory of this process
    if outcome.error is None and dist.is_initialized():
        rest()
        dist.destroy_process_group()


def _serve(pipe: Connection) -> None:
    """One kept rank: answers calls until no more come, one raises, or one leaves something behind."""
    gc.freeze()  # what the server has imported is never garbage, and looking through it would copy it
    atexit.register(gc.unfreeze)
    environment = dict(os.environ)
    process = _Process()
    while True:
        try:
            rank, num_workers, store, folder, job = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):  # nobody asks any more
            return
        os.chdir(folder)
        try:
            function, args = pickle.loads(job)
        except BaseException as error:
            outcome = Outcome(rank, error=(type(error).__name__, str(error), traceback.format_exc()))
        else:
            with warnings.catch_warnings():  # a warning that is shown once is shown once a call
                outcome = _call(rank, num_workers, store, function, args)
            del function, args
        failed = outcome.error is not None
        pipe.send_bytes(pickle.dumps(outcome))
        del outcome
        if failed:
            return
        _clean_up(environment)
        is_reusable = process.is_as_new()
        with contextlib.suppress(OSError):  # another rank of the call failed: this one is not asked again
            pipe.send_bytes(pickle.dumps(is_reusable))
        if not is_reusable:
            return


def _clean_up(environment: dict[str, str]) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        rest()
        dist.destroy_process_group()
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    os.environ.clear()
    os.environ.update(environment)
    gc.collect()  # models of this call, and the groups that DDP still holds


_PATCHABLE = ("os", "time", "shutil", "torch.distributed.distributed_c10d", "torch.nn.parallel.distributed")


class _Process:
    """What a call could leave behind in its process; a rank that differs from a new process is not used again."""

    def __init__(self) -> None:
        modules = [m for name, m in sys.modules.items() if name in _PATCHABLE or name.startswith("cocod_accel")]
        holders: dict[int, Any] = {id(module): module for module in modules}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # asking a deprecated name of torch's
            for module in modules:
                for value in vars(module).values():
                    if isinstance(value, type) and value.__module__ == module.__name__:
                        holders[id(value)] = value
        self._functions = [(holder, {k: v for k, v in vars(holder).items() if callable(v)}) for holder in holders.values()]
        self._state = self._now()

    @staticmethod
    def _now() -> tuple[object, ...]:
        import torch

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
        return (
            os.getpid(),  # a function that forked and came back twice
            [signal.getsignal(number) for number in numbers],
            [thread.name for thread in threading.enumerate()],
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.are_deterministic_algorithms_enabled(),
        )

    def is_as_new(self) -> bool:
        if self._now() != self._state:
            return False
        missing = object()
        return all(
            vars(holder).get(name, missing) is value for holder, values in self._functions for name, value in values.items()
        )


class _Ranks:
    """Ranks that live across calls; they end with 0, or whoever stops them fails."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def call(self, num_workers: int, function: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> list[Outcome]:
        job = pickle.dumps((function, args))
        while len(self.processes) < num_workers:
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(theirs,))
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        deadline = time.monotonic() + seconds
        called = self.pipes[:num_workers]
        is_whole = False
        try:
            with tempfile.TemporaryDirectory() as folder:
                for rank, pipe in enumerate(called):
                    pipe.send_bytes(pickle.dumps((rank, num_workers, str(Path(folder) / "store"), str(Path.cwd()), job)))
                outcomes = _answers(called, deadline)
                if all(outcome.error is None for outcome in outcomes):
                    reusable = [_is_reusable(pipe, rank, deadline) for rank, pipe in enumerate(called)]
                    is_whole = all(reusable)
                if is_whole:
                    for outcome in outcomes:
                        outcome.exit_code = 0  # seen when the ranks are stopped
                else:
                    for pipe in called:
                        pipe.close()
                    _take_exit_codes(self.processes[:num_workers], outcomes, deadline)
                return outcomes
        finally:
            if not is_whole:
                self.stop(num_workers)

    def stop(self, num_workers: int | None = None) -> list[int | None]:
        """End the first ranks, or all; their exit codes, ``None`` for one that had to be killed."""
        seconds = 20.0 if num_workers is None else 0.0  # else they have ended, or are late
        processes, pipes = self.processes[:num_workers], self.pipes[:num_workers]
        del self.processes[:num_workers], self.pipes[:num_workers]
        for pipe in pipes:
            pipe.close()
        return [_ended(process, seconds) for process in processes]

    def pids(self) -> set[int]:
        return {process.pid for process in self.processes}


_RANKS = _Ranks()
atexit.register(_RANKS.stop)  # before multiprocessing waits for them, should a session not end as it should


def kept_pids() -> set[int]:
    """The processes that are alive on purpose between two tests."""
    return _RANKS.pids()


def stop_kept_ranks() -> None:
    """At the end of a session: every kept rank must end by itself, with 0."""
    codes = _RANKS.stop()
    if any(code != 0 for code in codes):
        raise WorkerError(f"kept ranks exited with {codes}")


def run_outcomes(
    num_workers: int, function: Callable[..., Any], *args: Any, seconds: float = 60, fresh: bool = False
) -> list[Outcome]:
    """Call ``function(rank, *args)`` on every worker; what each returned or raised, in rank order.

    ``fresh``: in processes of their own, that end with the call.
    """
    if not fresh:
        return _RANKS.call(num_workers, function, args, seconds)
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
            deadline = time.monotonic() + seconds
            outcomes = _answers(pipes, deadline)
            _take_exit_codes(processes, outcomes, deadline)
            return outcomes
        finally:
            for process in processes:
                _killed(process)
            for pipe in pipes:
                pipe.close()


def _killed(process: Any) -> None:
    if process.is_alive() and process.pid is not None:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    process.close()


def _ended(process: Any, seconds: float = 0.0) -> int | None:
    process.join(seconds)
    code: int | None = process.exitcode
    _killed(process)
    return code


def _answers(pipes: list[Connection], deadline: float) -> list[Outcome]:
    outcomes = [Outcome(rank) for rank in range(len(pipes))]
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
            except (EOFError, ConnectionResetError):
                outcomes[rank].error = ("Died", f"rank {rank} died without a word", "")
    return outcomes


def _is_reusable(pipe: Connection, rank: int, deadline: float) -> bool:
    seconds = max(0.0, deadline - time.monotonic())
    if not pipe.poll(min(seconds, 10.0) if _ENDS_MAY_HANG else seconds):
        if _ENDS_MAY_HANG:
            return False
        raise WorkerError(f"rank {rank} answered but did not clean up in time")
    try:
        return bool(pickle.loads(pipe.recv_bytes()))
    except (EOFError, ConnectionResetError):
        raise WorkerError(f"rank {rank} answered but died while cleaning up") from None


def _take_exit_codes(processes: list[Any], outcomes: list[Outcome], deadline: float) -> None:
    for rank, process in enumerate(processes):
        process.join(max(0.1, min(10.0, deadline - time.monotonic()) if _ENDS_MAY_HANG else deadline - time.monotonic()))
        if process.exitcode is None and _ENDS_MAY_HANG:
            outcomes[rank].exit_code = 0
            continue
        if process.exitcode is None:
            raise WorkerError(f"rank {rank} answered but did not exit in time")
        outcomes[rank].exit_code = process.exitcode


def run_workers(
    num_workers: int, function: Callable[..., Any], *args: Any, seconds: float = 60, fresh: bool = False
) -> list[Any]:
    """Like :func:`run_outcomes`, but every worker must succeed and exit with 0; the results in rank order."""
    outcomes = run_outcomes(num_workers, function, *args, seconds=seconds, fresh=fresh)
    for outcome in outcomes:
        if outcome.error is not None:
            raise WorkerError(f"rank {outcome.rank}: {outcome.error[0]}: {outcome.error[1]}\n{outcome.error[2]}")
    for outcome in outcomes:
        if outcome.exit_code != 0:
            raise WorkerError(f"rank {outcome.rank} succeeded but exited with {outcome.exit_code}")
    return [outcome.result for outcome in outcomes]
