"""Flat tensors that wait in the host's memory, so that a device has room: x_t, and what rounding has dropped.

They travel on a stream of their own. On a CPU the same steps copy from memory to memory, and end with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cocod_accel.averaging.flat import FlatCopy, Segment, as_real, view_like
from cocod_accel.comm.device import Reached, beside, room_on_host, runs_ahead

_STREAM = "offload"


class HostTensor:
    """A flat tensor on the host, of which a device works on stretches."""

    def __init__(self, num_elements: int, like: Tensor) -> None:
        self._host = room_on_host(num_elements, like)
        self._device = like.device
        self._stored: Reached | None = None

    @property
    def value(self) -> Tensor:
        """Once all that was stored is there."""
        if self._stored is not None:
            self._stored.wait_on_host()
        return self._host

    def fetch(self, start: int, room: Tensor) -> Reached | None:
        """room <- the stretch from ``start``, beside the current stream; whoever reads it waits for what is returned."""
        with beside(self._device, _STREAM):
            room.copy_(self._host[start : start + room.numel()], non_blocking=True)
            return _reached(self._device)

    def store(self, start: int, room: Tensor) -> Reached | None:
        """The stretch from ``start`` <- room; whoever writes into the room waits for what is returned."""
        with beside(self._device, _STREAM):
            self._host[start : start + room.numel()].copy_(room, non_blocking=True)
            self._stored = _reached(self._device)
        return self._stored


class HostCopy:
    """Like a :class:`~cocod_accel.averaging.flat.FlatCopy` of the same tensors, but on the host.

    On the device there is room for two segments: one that is worked on, and one that travels.
    """

    def __init__(self, layout: FlatCopy) -> None:
        self.sources = layout.sources
        self._segments = layout.segments
        self._hosts = [HostTensor(segment.flat.numel(), segment.flat) for segment in self._segments]
        largest: dict[tuple[torch.device, torch.dtype], int] = {}
        for segment in self._segments:
            key = segment.flat.device, segment.flat.dtype
            largest[key] = max(largest.get(key, 0), segment.flat.numel())
        self._rooms = {
            key: [torch.empty(size, device=key[0], dtype=key[1]) for _ in range(2)] for key, size in largest.items()
        }
        self._busy: list[Reached | None] = [None, None]

    def take(self, index: int) -> Tensor:
        """Keep the tensors of a segment, and return them flat; until the next but one is taken."""
        segment, room = self._segments[index], self._room(index)
        self._free(index)
        torch._foreach_copy_(_views(room, segment), segment.tensors)
        self._busy[index % 2] = self._hosts[index].store(0, room)
        return room

    def each(self) -> Iterator[Tensor]:
        """What was kept, segment by segment; while one is worked on, the next one travels."""
        coming = self._fetch(0)
        for index in range(len(self._segments)):
            if coming is not None:
                coming.wait()
            if index + 1 < len(self._segments):
                coming = self._fetch(index + 1)
            yield self._room(index)

    def load_cores(self) -> None:
        for index, segment in enumerate(self._segments):
            if not segment.is_extra:
                self.take(index)

    def store_cores(self) -> None:
        for segment, flat in zip(self._segments, self.each(), strict=True):
            if not segment.is_extra:
                torch._foreach_copy_(segment.tensors, _views(flat, segment))

    def _fetch(self, index: int) -> Reached | None:
        self._free(index)
        return self._hosts[index].fetch(0, self._room(index)) if index < len(self._segments) else None

    def _room(self, index: int) -> Tensor:
        flat = self._segments[index].flat
        return self._rooms[flat.device, flat.dtype][index % 2][: flat.numel()]

    def _free(self, index: int) -> None:
        """What comes next on the current stream comes after what was stored from this room."""
        stored, self._busy[index % 2] = self._busy[index % 2], None
        if stored is not None:
            stored.wait()


def _views(flat: Tensor, segment: Segment) -> list[Tensor]:
    reals = [as_real(source) for source in segment.sources]
    pieces = flat.split([real.numel() for real in reals])
    return [view_like(piece, real) for piece, real in zip(pieces, reals, strict=True)]


def _reached(device: torch.device) -> Reached | None:
    return Reached(device) if runs_ahead(device) else None
