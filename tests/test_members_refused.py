"""What does not work with workers that come and go is refused in one line, and strangers are handed nothing."""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest
import torch

from cocod_accel import SSGD, Algorithm, AsynLocalSGD, CoCoDSGD, LocalSGD, MembersError, attach
from cocod_accel.members.healing import Donor, HealingError, fetch, to_bytes
from tests import loops
from tests.company import TOKEN, members, needs_torchft
from tests.workers import run_workers

# ------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"lighthouse": "somewhere"}, "Members(lighthouse='somewhere'): must be HOST:PORT; use e.g. 127.0.0.1:29510"),
        ({"token": "short"}, "must be a text of at least 8 characters"),
        ({"min_workers": 0}, "Members(min_workers=0): must be a whole number of at least 1"),
        ({"min_workers": 3, "begin_with": 2}, "Members(begin_with=2): must be a whole number of at least 3"),
        ({"timeout": 0}, "Members(timeout=0): must be a number of seconds above 0"),
        ({"name": "a b"}, "must be a name without spaces, colons and slashes"),
        ({"interface": "eth0"}, "must be an IP address of this machine"),
        ({"lighthouse": "10.1.2.3:29510"}, "workers at the lighthouse 10.1.2.3:29510 cannot reach it"),
        ({"optimizer_state": "mean"}, 'must be "donor" or "fresh"'),
    ],
)
def test_bad_settings_are_refused_in_one_line(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)) as caught:
        members("127.0.0.1:29510", "a", **options)
    assert "\n" not in str(caught.value)
    assert TOKEN not in repr(members("127.0.0.1:29510", "a"))


@pytest.mark.parametrize(
    ("algorithm", "options", "line"),
    [
        (SSGD(), {}, "algorithm ssgd does not work with members; use LocalSGD or CoCoDSGD"),
        (AsynLocalSGD(4), {}, "algorithm asynlocal does not work with members; use LocalSGD or CoCoDSGD"),
        (CoCoDSGD(4, fragments=2), {}, "fragments=2 does not work with members; leave it out"),
        (CoCoDSGD("auto"), {}, 'period="auto" does not work with members; leave it out'),
        (LocalSGD(4, optimizer_state="average"), {}, 'optimizer_state="average" does not work with members'),
        (CoCoDSGD(4), {"offload": "cpu"}, "offload does not work with members; leave it out"),
        (CoCoDSGD(4), {"inner": object()}, "inner does not work with members; leave it out"),
    ],
)
def test_what_does_not_work_with_members_is_refused_before_anything_waits(
    algorithm: Algorithm, options: dict[str, Any], line: str
) -> None:
    model = loops.make_model()
    optimizer = loops.OPTIMIZERS["sgd"](model)
    with pytest.raises(ValueError, match=re.escape(line)):
        attach(model, optimizer, algorithm, members=members("127.0.0.1:29510", "a"), **options)


def connected(rank: int) -> str:
    model = loops.make_model()
    try:
        attach(model, loops.OPTIMIZERS["sgd"](model), CoCoDSGD(4), members=members("127.0.0.1:29510", "a"))
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def test_workers_that_a_launcher_connected_are_refused() -> None:
    for line in run_workers(2, connected):
        assert "wrap it first" in line or "each worker is one process of its own" in line


@needs_torchft
def test_without_a_lighthouse_nobody_waits_for_long() -> None:
    model = loops.make_model()
    with pytest.raises(MembersError, match=r"cannot reach the lighthouse http://127\.0\.0\.1:1; start one with"):
        attach(model, loops.OPTIMIZERS["sgd"](model), CoCoDSGD(4), members=members("127.0.0.1:1", "a", timeout=1.0))


# ------------------------------------------------------------------------------------------------ from peer to peer


def test_what_is_handed_over_needs_the_token() -> None:
    state = {"optimizer": {"state": {0: {"momentum": torch.arange(3.0)}}, "lr": 0.1}, "at": (4, None)}
    donor = Donor("127.0.0.1", TOKEN, lambda what: to_bytes(state) if what == "state 4" else None)
    try:
        found = fetch(donor.address, TOKEN, "state 4", 5.0)
        assert torch.equal(found["optimizer"]["state"][0]["momentum"], torch.arange(3.0))
        assert found["at"] == (4, None)
        with pytest.raises(HealingError, match="has no state 5"):
            fetch(donor.address, TOKEN, "state 5", 5.0)
        with pytest.raises(HealingError, match="the connection was closed"):
            fetch(donor.address, "another token", "state 4", 5.0)
        with socket.create_connection(("127.0.0.1", int(donor.address.rsplit(":", 1)[1])), timeout=10) as stranger:
            stranger.recv(32)
            stranger.sendall(bytes(32) + (1 << 40).to_bytes(8, "big"))
            assert stranger.recv(1) == b""  # longer than any question: not even read
    finally:
        donor.close()
