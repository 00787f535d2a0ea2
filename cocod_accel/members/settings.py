"""What a user says of workers that come and go."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from cocod_accel.comm.regroup import split_address

_LEAST_TOKEN = 8


class Stateful(Protocol):
    """Such as a learning rate scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> object: ...


class MembersError(RuntimeError):
    """This worker cannot take part, or too few are left."""


@dataclass(frozen=True)
class Members:
    """Workers that come and go: pass it to :func:`~cocod_accel.sync.attach.attach` on each of them."""

    #: HOST:PORT of a torchft lighthouse, which knows who is there. ``cocod lighthouse`` starts one.
    lighthouse: str
    #: A secret that all workers of this run share; whoever does not know it is not let in.
    token: str = field(repr=False)
    #: With fewer workers nothing is averaged: a round waits for more, at most ``timeout``, and then this worker stops.
    min_workers: int = 1
    #: How many begin together, from equal models; whoever comes later gets the model of those who are there.
    begin_with: int | None = None
    #: Seconds that a round waits at most for the lighthouse, for the others, and for each transfer.
    timeout: float = 30.0
    #: The address that this worker is reached at by the others, and the only one it listens on.
    interface: str = "127.0.0.1"
    #: Of this worker, to be seen by the others. Workers are numbered in the order of their names.
    name: str = "worker"
    #: What momentum a worker that comes later begins with: that of a worker who is there, or none.
    optimizer_state: Literal["donor", "fresh"] = "donor"
    #: What else such a worker gets: learning rate schedulers, and whatever else has a ``state_dict()``.
    carried: Mapping[str, Stateful] = field(default_factory=dict)

    def __post_init__(self) -> None:
        address = self.lighthouse.removeprefix("http://").rstrip("/") if isinstance(self.lighthouse, str) else ""
        try:
            host, _ = split_address(address)
        except ValueError:
            raise ValueError(
                f"Members(lighthouse={self.lighthouse!r}): must be HOST:PORT; use e.g. 127.0.0.1:29510"
            ) from None
        if not isinstance(self.token, str) or len(self.token) < _LEAST_TOKEN:
            raise ValueError(
                f"Members(token=...): must be a text of at least {_LEAST_TOKEN} characters that all workers of the run "
                "share; use e.g. `openssl rand -hex 16`"
            )
        for key, least in (("min_workers", 1), ("begin_with", self.min_workers)):
            value = getattr(self, key)
            if key == "begin_with" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"Members({key}={value!r}): must be a whole number of at least {least}")
        seconds = self.timeout
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds < math.inf:
            raise ValueError(f"Members(timeout={seconds!r}): must be a number of seconds above 0")
        if self.optimizer_state not in ("donor", "fresh"):
            raise ValueError(f'Members(optimizer_state={self.optimizer_state!r}): must be "donor" or "fresh"')
        if not isinstance(self.name, str) or not self.name or any(letter in self.name for letter in " :/\n"):
            raise ValueError(f"Members(name={self.name!r}): must be a name without spaces, colons and slashes")
        try:
            own = ipaddress.ip_address(self.interface)
        except ValueError:
            raise ValueError(
                f"Members(interface={self.interface!r}): must be an IP address of this machine; use e.g. 127.0.0.1"
            ) from None
        if own.is_loopback and not is_loopback(host):
            raise ValueError(
                f"Members(interface={self.interface!r}): workers at the lighthouse {address} cannot reach it; pass this "
                "machine's address in their network"
            )

    @property
    def address(self) -> str:
        """Of the lighthouse, without a scheme."""
        return self.lighthouse.removeprefix("http://").rstrip("/")

    @property
    def first_workers(self) -> int:
        return self.min_workers if self.begin_with is None else self.begin_with


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
