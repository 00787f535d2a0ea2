"""Workers that come and go, and a real lighthouse, as processes of a test: started, told to go on, killed by their ids."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from cocod_accel import Members
from tests import workers

HAS_TORCHFT = importlib.util.find_spec("torchft") is not None
TOKEN = "a token of these tests"
SECONDS = 60.0

needs_torchft = pytest.mark.skipif(not HAS_TORCHFT, reason="torchft is not installed: pip install 'cocod-accel[elastic]'")

if HAS_TORCHFT:
    workers.preload("torchft.coordination")


def members(address: str, called: str, **options: Any) -> Members:
    return Members(**{"lighthouse": address, "token": TOKEN, "name": called, "timeout": 10.0, **options})


def _serve(pipe: Connection, bind: str, heartbeat_ms: int) -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=bind, min_replicas=1, join_timeout_ms=5000, quorum_tick_ms=20, heartbeat_timeout_ms=heartbeat_ms
    )
    say(pipe, server.address().rsplit(":", 1)[1])
    with contextlib.suppress(EOFError):
        hear(pipe)


def _work(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    os.environ.update(OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    try:
        say(pipe, ("returned", function(pipe, *args)))
    except BaseException as error:
        say(pipe, ("raised", f"{type(error).__name__}: {error}"))


def say(pipe: Connection, what: Any) -> None:
    pipe.send_bytes(pickle.dumps(what))  # plain pickle: else tensors would travel as shared memory of this process


def hear(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


class Process:
    """A process, and what it says."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self.pipe, theirs = workers._CONTEXT.Pipe()
        self._process = workers._CONTEXT.Process(target=target, args=(theirs, *args))
        self._process.start()
        theirs.close()

    def hear(self, seconds: float = SECONDS) -> Any:
        """What it says next."""
        if not self.pipe.poll(seconds):
            raise AssertionError("a worker did not answer in time")
        try:
            return hear(self.pipe)
        except EOFError:
            raise AssertionError("a worker died without a word") from None

    def result(self, seconds: float = SECONDS) -> Any:
        """What its function returned; everything it said before is skipped."""
        end = time.monotonic() + seconds
        while True:
            said = self.hear(max(0.1, end - time.monotonic()))
            if isinstance(said, tuple) and said[0] == "returned":
                return said[1]
            if isinstance(said, tuple) and said[0] == "raised":
                raise AssertionError(said[1])

    def error(self, seconds: float = SECONDS) -> str:
        """The line that it raised."""
        said = self.hear(seconds)
        assert isinstance(said, tuple), said
        assert said[0] == "raised", said
        return str(said[1])

    def tell(self, what: Any = None) -> None:
        say(self.pipe, what)

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        self.kill()
        self._process.close()
        self.pipe.close()


class Company:
    """A lighthouse and workers, which end with the block."""

    def __init__(self, heartbeat_ms: int = 1000) -> None:
        self._heartbeat_ms = heartbeat_ms
        self.address = ""
        self._all: list[Process] = []

    def __enter__(self) -> Company:
        self.light("127.0.0.1:0")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._all:
            process.close()

    def light(self, bind: str | None = None) -> None:
        """Start the lighthouse, again at the same address."""
        process = self._new(_serve, self.address if bind is None else bind, self._heartbeat_ms)
        self.lighthouse = process
        self.address = f"127.0.0.1:{process.hear()}"

    def start(self, function: Callable[..., Any], name: str, *args: Any) -> Process:
        """``function(pipe, address, name, *args)`` in a process."""
        return self._new(_work, function, (self.address, name, *args))

    def _new(self, target: Callable[..., None], *args: Any) -> Process:
        process = Process(target, *args)
        self._all.append(process)
        return process
