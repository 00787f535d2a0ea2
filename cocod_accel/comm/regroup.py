"""Sums over whoever is there: a gloo group that belongs to no process group of the program, and is formed anew at will."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from cocod_accel.comm.handles import Exchange, Handle, ring_bytes, ring_total


class Rendezvous:
    """A store on this worker's own address, where a group that it leads finds together."""

    def __init__(self, host: str, seconds: float) -> None:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind((host, 0))
            listener.listen()
            self.address = f"{_bracketed(host)}:{listener.getsockname()[1]}"
            self._store = TCPStore(
                host,
                listener.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=seconds),
                master_listen_fd=listener.detach(),
            )


def split_address(address: str) -> tuple[str, int]:
    """ "HOST:PORT" in parts; raises a ValueError if it is not that."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class RegroupingComm:
    """Sums between the members of one group after the other; alone, a sum is complete at once.

    All calls are made by one thread, in the same order on all members, and wait: so one gloo group is enough.
    """

    shard_index, num_shards = 0, 1

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self._group: Any = None

    def form(self, store: str, name: str, rank: int, size: int, host: str, *, come: float, seconds: float) -> None:
        """Become a group of this name, which all its members pass; raises a RuntimeError if some do not ``come`` in time.

        ``seconds``: that a sum may take.
        """
        self.leave()
        if size > 1:
            address, port = split_address(store)
            patience = timedelta(seconds=come)
            client = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=patience)
            here = PrefixStore(f"cocod_accel/{name}", client)
            here.set(f"here/{rank}", "")
            here.wait([f"here/{other}" for other in range(size)], patience)
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = timedelta(seconds=seconds)
            options._devices = [gloo.create_device(hostname=host)]
            self._group = gloo(here, rank, size, options)
        self.rank, self.size = rank, size

    def leave(self) -> None:
        """Whoever still waits for this worker in the group is told by the closed connection."""
        self._group, self.rank, self.size = None, 0, 1

    def launch(self, tensors: Sequence[Tensor]) -> Handle:
        works = [] if self._group is None else [self._group.allreduce([tensor]) for tensor in tensors]
        return Handle(works, self.sent_bytes(tensors))

    def sent_bytes(self, tensors: Sequence[Tensor]) -> int:
        return ring_bytes(tensors, self.size)

    def exchange(self, parts: Sequence[Exchange]) -> Handle:
        assert self._group is not None, "cannot exchange with a single worker"
        for part in parts:
            self._group.alltoall_base(part.incoming, part.rows, [], []).wait()
            part.combine()
        works = [self._group._allgather_base(part.made.view(-1), part.made[self.rank]) for part in parts]
        return Handle(works, ring_total(sum(part.num_bytes for part in parts), self.size))

    def let_go(self, seconds: float) -> None:
        """Nothing is ever left half done."""
