"""The memory of a part's average: x_t, and what becomes the sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from cocod_accel.averaging.flat import FlatCopy
from cocod_accel.averaging.header import SUM_SIZE
from cocod_accel.averaging.offload import HostCopy

#: Where x_t is kept.
Snapshot: TypeAlias = FlatCopy | HostCopy


class Room:
    """Kept between averages, as long as they are of the same tensors."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        #: Whether x_t waits in the host's memory.
        self.is_offloaded = False
        #: What is there now.
        self.pair: tuple[Snapshot, FlatCopy] | None = None

    def for_average(self, extras: Sequence[Tensor] = ()) -> tuple[Snapshot, FlatCopy]:
        """Room for x_t and for the sum of the parameters and ``extras``."""
        wanted = [*self._parameters, *extras]
        if self.pair is not None:
            held = self.pair[0].sources
            if len(held) == len(wanted) and all(a is b for a, b in zip(held, wanted, strict=True)):
                return self.pair
            self.pair = None  # freed before there is more
        self.pair = self._new(extras)
        return self.pair

    def renew(self) -> tuple[Snapshot, FlatCopy]:
        """Room that nobody has used."""
        self.pair = self._new(())
        return self.pair

    def _new(self, extras: Sequence[Tensor]) -> tuple[Snapshot, FlatCopy]:
        total = FlatCopy(self._parameters, extras, header_size=SUM_SIZE)
        if self.is_offloaded:
            return HostCopy(total), total
        return FlatCopy(self._parameters, extras, header_size=SUM_SIZE), total
