"""The network lab: made of namespaces, limited by the kernel, and gone afterwards, whatever happens inside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.links import lab as labs
from benchmarks.links.lab import Lab, LabError, Loopback, why_not
from cocod_accel.comm.emulated import Link

_REASON = why_not()
needs_lab = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    return [line.split()[0] for line in listed.splitlines() if f"-{os.getpid()}-" in line]


def shaped(lab: Lab) -> list[str]:
    """What the kernel says of every device's queue."""
    places = [(f"host{i}", "eth0") for i in range(lab.num_hosts)] + [("switch", f"port{i}") for i in range(lab.num_hosts)]
    found = []
    for place, device in places:
        command = ["ip", "netns", "exec", lab._name(place), "tc", "qdisc", "show", "dev", device]
        found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


@needs_lab
def test_hosts_reach_each_other_and_everything_goes_away() -> None:
    listen = "import socket; s = socket.create_server(('', 4000)); print('ready', flush=True); print(s.accept()[0].recv(9))"
    with Lab(3) as lab:
        assert len(namespaces()) == 4
        server = lab.start(0, [sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        call = f"import socket; socket.create_connection(('{lab.address(0)}', 4000)).send(b'hello')"
        assert lab.start(2, [sys.executable, "-c", call]).wait(30) == 0
        assert server.stdout.readline() == "b'hello'\n"
    assert namespaces() == []
    here = subprocess.run(["ip", "link", "show"], capture_output=True, text=True, check=True).stdout
    assert "port0" not in here, "the machine's own network is never touched"


@needs_lab
def test_every_link_is_limited_in_both_directions_and_free_again() -> None:
    with Lab(2) as lab:
        lab.limit(Link(bandwidth_mbit=12.5))
        assert all(re.search(r"tbf .*rate 12500Kbit", text) for text in shaped(lab)), shaped(lab)
        lab.limit(Link(bandwidth_mbit=100))
        assert all("rate 100Mbit" in text for text in shaped(lab))
        lab.limit(Link())
        assert not any("tbf" in text for text in shaped(lab))
        if not lab.has_latency:
            with pytest.raises(LabError, match=r"latency_ms=3: this kernel has no netem; set only a bandwidth"):
                lab.limit(Link(latency_ms=3))


@needs_lab
def test_a_lab_is_removed_after_an_exception_with_what_ran_in_it() -> None:
    started: list[Any] = []

    def fail() -> None:
        with Lab(2) as lab:
            started.append(lab.start(1, [sys.executable, "-c", "import time; time.sleep(600)"]))
            raise KeyError("power")

    with pytest.raises(KeyError):
        fail()
    assert namespaces() == []
    assert started[0].returncode is not None


@needs_lab
def test_what_a_killed_process_left_is_removed_by_the_next_lab() -> None:
    code = "import os; from benchmarks.links.lab import Lab; Lab(2).__enter__(); print(os.getpid(), flush=True); os._exit(9)"
    dead = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    assert labs._namespaces(f"cocod-lab-{dead}-")
    with Lab(2):
        assert not labs._namespaces(f"cocod-lab-{dead}-")


def test_without_root_it_says_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match=r"requires root; use the emulated link instead: emulate\.link\.bandwidth_mbit"):
        Lab(2)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"num_hosts=1: must be from 2 to 200"):
        Lab(1)
    with Loopback() as place, pytest.raises(LabError, match="loopback cannot be limited; emulate it"):
        place.limit(Link(bandwidth_mbit=5))
