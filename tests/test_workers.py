"""Kept ranks are like new ones: what a call leaves behind never reaches the next."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cocod_accel.runs import folder as patched
from tests.workers import WorkerError, kept_pids, run_outcomes, run_workers


def who(rank: int) -> tuple[int, int, float]:
    total = torch.ones(1)
    dist.all_reduce(total)
    return os.getpid(), int(total.item()), torch.rand(1).item()


def leaves(rank: int, what: str) -> int:
    if what == "environment":
        os.environ["LEFT_BEHIND"] = "1"
    elif what == "dtype":
        torch.set_default_dtype(torch.float64)
    elif what == "handler":
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    elif what == "patch":
        vars(patched)["Path"] = str
    elif what == "thread":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    elif what == "group":
        dist.new_group()
    return os.getpid()


def seen(rank: int) -> tuple[int, Any, bool, bool, bool, int]:
    return (
        os.getpid(),
        os.environ.get("LEFT_BEHIND"),
        torch.get_default_dtype() == torch.float32,
        signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL,
        vars(patched)["Path"] is not str,
        threading.active_count(),
    )


def fails(rank: int, how: str) -> int:
    if rank == 1 and how == "raises":
        raise KeyError("power")
    if rank == 1 and how == "exits":
        os._exit(3)
    if rank == 1 and how == "hangs":
        time.sleep(600)
    return os.getpid()


def test_ranks_are_kept_and_begin_anew() -> None:
    first, again, fewer = run_workers(3, who), run_workers(3, who), run_workers(2, who)
    assert first == again
    assert [pid for pid, _, _ in fewer] == [pid for pid, _, _ in first[:2]]
    assert [total for _, total, _ in fewer] == [2, 2]
    assert {pid for pid, _, _ in first} <= kept_pids()
    assert not {pid for pid, _, _ in run_workers(2, who, fresh=True)} & kept_pids()


@pytest.mark.parametrize("what", ["environment", "group", "dtype", "handler", "patch", "thread"])
def test_what_a_call_leaves_behind_is_not_seen_by_the_next(what: str) -> None:
    before = run_workers(2, leaves, what)
    after = run_workers(2, seen)
    assert [state[1:] for state in after] == [(None, True, True, True, 1)] * 2
    # What can be put back costs no new process.
    assert ([state[0] for state in after] == before) == (what in ("environment", "group"))


@pytest.mark.parametrize("how", ["raises", "exits", "hangs"])
def test_ranks_of_a_call_that_failed_are_replaced(how: str) -> None:
    old = {pid for pid, _, _ in run_workers(2, who)}
    if how == "hangs":
        with pytest.raises(WorkerError, match=r"ranks \[1\] did not end in time"):
            run_workers(2, fails, how, seconds=1)
    else:
        first, second = run_outcomes(2, fails, how)
        assert (first.error, first.exit_code) == (None, 0)
        assert second.error is not None
        assert (second.error[0], second.exit_code) == (("KeyError", 0) if how == "raises" else ("Died", 3))
    assert not old & kept_pids()
    assert not old & {pid for pid, _, _ in run_workers(2, who)}
    assert not any(os.path.exists(f"/proc/{pid}") for pid in old)
