"""A network lab on one machine: hosts as network namespaces, joined by links that really are slow.

    with Lab(num_hosts=2) as lab:
        lab.limit(Link(bandwidth_mbit=150))
        workers = [lab.start(host, [sys.executable, "worker.py"], core=host) for host in range(2)]

Each host is a Linux network namespace with one interface, ``eth0``, attached to a bridge in the lab's own namespace.
Nothing outside is touched, and everything is removed when the lab is closed, or, after a crash, when the next one is
created. The kernel limits bandwidth in both directions (``tc tbf``), so real sockets really wait. Needs root.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from cocod_accel.comm.emulated import Link

#: How long an idle link may burst at full speed, and how long a packet may queue before it is dropped.
_BURST_SECONDS, _QUEUE = 0.0005, "200ms"
#: Jumbo frames: network cards segment packets in hardware; here the computing core would have to. With 1,500-byte
#: packets, a transfer at 60 Mbit/s slowed a step down by a third.
_PACKET_BYTES = 9000
#: A packet and its header must fit in a burst. No more: the first burst after an idle time is free.
_LEAST_BURST_BYTES = _PACKET_BYTES + 600


class LabError(RuntimeError):
    """No lab is possible here; one line says why, and what to do instead."""


def why_not() -> str | None:
    """Why no lab can be created on this machine; None: it can."""
    fix = "use the emulated link instead: emulate.link.bandwidth_mbit"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"a network lab needs {' and '.join(missing)} (Debian: iproute2); {fix}"
    if os.geteuid() != 0:
        return f"a network lab creates network namespaces, which requires root; {fix}"
    probe = f"{_prefix(os.getpid())}probe"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "netns", "del", probe)
    except LabError as error:
        return f"this kernel cannot create network namespaces ({error}); {fix}"
    return None


class _Processes:
    """Runs commands on hosts; none of them outlives the lab."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[Any]] = []

    #: The network interface for gloo.
    interface: str

    def on_host(self, host: int) -> list[str]:
        """The command prefix that runs a command on a host."""
        raise AssertionError("implemented by subclasses")

    def start(
        self,
        host: int,
        command: Sequence[str],
        *,
        core: int | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Run a command on a host, on one core, with ``env`` added to the environment; killed when the lab closes."""
        pinned = [] if core is None else ["taskset", "--cpu-list", str(core % (os.cpu_count() or 1))]
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": self.interface, **(env or {})}
        line = [*pinned, *self.on_host(host), *command]
        process = subprocess.Popen(line, env=variables, start_new_session=True, **options)
        self._processes.append(process)
        return process

    def end(self) -> None:
        """Kill whatever is still running."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._processes = []


class Loopback(_Processes):
    """This machine as every host, where no lab can be created: an unlimited link, for emulation."""

    interface = "lo"

    def on_host(self, host: int) -> list[str]:
        return []

    def address(self, host: int) -> str:
        return "127.0.0.1"

    def free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    def limit(self, link: Link) -> None:
        if link != Link():
            raise LabError(f"link {link}: loopback cannot be limited; emulate it")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()


class Lab(_Processes):
    """Hosts and the links between them; a context manager."""

    interface = "eth0"

    def __init__(self, num_hosts: int) -> None:
        super().__init__()
        if not 2 <= num_hosts <= 200:
            raise ValueError(f"num_hosts={num_hosts}: must be from 2 to 200")
        reason = why_not()
        if reason is not None:
            raise LabError(reason)
        self.num_hosts = num_hosts
        #: Whether links can be given a latency; some kernels have no netem.
        self.has_latency = False
        self._prefix = _prefix(os.getpid())

    def on_host(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self._name(f"host{host}")]

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"10.77.0.{host + 1}"

    # ---- set up and removed

    def __enter__(self) -> Self:
        _remove_leftovers()
        try:
            switch = self._name("switch")
            _run("ip", "netns", "add", switch)
            _in(switch, "ip", "link", "add", "bridge", "type", "bridge")
            _in(switch, "ip", "link", "set", "bridge", "up")
            for host in range(self.num_hosts):
                self._join(host, switch)
            self.has_latency = self._try_latency()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End what was started in the lab, then remove it."""
        self.end()
        for name in _namespaces(self._prefix):
            _run("ip", "netns", "del", name, check=False)

    def _join(self, host: int, switch: str) -> None:
        name = self._name(f"host{host}")
        _run("ip", "netns", "add", name)
        # Created inside, so that the lab's interfaces never appear in the machine's own namespace.
        _in(switch, "ip", "link", "add", f"port{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
        _in(switch, "ip", "link", "set", f"port{host}", "mtu", str(_PACKET_BYTES), "master", "bridge", "up")
        _in(name, "ip", "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        _in(name, "ip", "link", "set", "eth0", "mtu", str(_PACKET_BYTES), "up")
        _in(name, "ip", "link", "set", "lo", "up")

    def _try_latency(self) -> bool:
        port = ["dev", "port0", "root"]
        found = _in(self._name("switch"), "tc", "qdisc", "add", *port, "netem", "delay", "1ms", check=False)
        if found:
            _in(self._name("switch"), "tc", "qdisc", "del", *port)
        return found

    # ---- used

    def limit(self, link: Link) -> None:
        """Make every host's link like this from now on, in both directions."""
        if link.latency_ms and not self.has_latency:
            raise LabError(f"latency_ms={link.latency_ms:g}: this kernel has no netem; set only a bandwidth")
        for host in range(self.num_hosts):
            for place, device in ((self._name(f"host{host}"), "eth0"), (self._name("switch"), f"port{host}")):
                if link == Link():
                    _in(place, "tc", "qdisc", "del", "dev", device, "root", check=False)
                # Replaced atomically, so that workers can keep running while a link changes.
                put = ["tc", "qdisc", "replace", "dev", device]
                parent = ["root", "handle", "1:"]
                if link.latency_ms:  # half in each direction of a hop; a hop has two such devices
                    _in(place, *put, *parent, "netem", "delay", f"{link.latency_ms / 2}ms")
                    parent = ["parent", "1:", "handle", "2:"]
                if link.bandwidth_mbit is not None:
                    rate = round(link.bandwidth_mbit * 1e6)
                    burst = max(_LEAST_BURST_BYTES, round(rate / 8 * _BURST_SECONDS))
                    shape = ["tbf", "rate", f"{rate}bit", "burst", f"{burst}b", "latency", _QUEUE]
                    _in(place, *put, *parent, *shape)

    def free_port(self) -> int:
        """A port on host 0, where nothing else listens."""
        return 29500

    def _name(self, part: str) -> str:
        return f"{self._prefix}{part}"


def _prefix(pid: int) -> str:
    return f"cocod-lab-{pid}-"


def _namespaces(prefix: str) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(prefix)]


def _remove_leftovers() -> None:
    """Remove labs whose processes are gone."""
    for name in _namespaces("cocod-lab-"):
        found = re.match(r"cocod-lab-(\d+)-", name)
        if found and not os.path.exists(f"/proc/{found.group(1)}"):
            _run("ip", "netns", "del", name, check=False)


def _in(namespace: str, *command: str, check: bool = True) -> bool:
    return _run("ip", "netns", "exec", namespace, *command, check=check)


def _run(*command: str, check: bool = True) -> bool:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise LabError(f"{' '.join(command)}: {' '.join((done.stderr or done.stdout).split()) or done.returncode}")
    return done.returncode == 0
