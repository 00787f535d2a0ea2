"""The header of every average: its kind, its number, and the weights it sums.

Workers meet in collectives by order alone. If one of them is ending a round where another one evaluates, and both sums have
one size, they would pair up in silence. So a sum carries a few numbers more at its end, and a coded row a few bytes at its
beginning; both are checked on arrival. Votes (to stop, to save) travel in the same place.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import torch
from torch import Tensor

from cocod_accel.comm.device import Fetch, runs_ahead
from cocod_accel.comm.meeting import TransferError

#: Elements that a summed buffer has room for at its end.
SUM_SIZE = 7
#: Bytes at the beginning of a coded row: kind, votes and number in one word, then the sender's weight.
ROW_BYTES = 8

# Small enough that a sum of squares over 4,000 workers is exact in float32.
_NUMBERS = 64
# A device that is further behind than so many averages is waited for.
_MOST_UNREAD = 8


#: To stop, to save.
Votes: TypeAlias = tuple[bool, bool]
_Read: TypeAlias = Callable[[Tensor], Votes]


class Kind(IntEnum):
    """What an average is for."""

    ROUND = 1
    FINISH = 2
    EVALUATION = 3
    GRADIENT = 4


@dataclass(frozen=True)
class Header:
    """What this worker says of one average, and so what it expects of all others."""

    kind: Kind
    number: int
    #: What each worker multiplies its tensors by.
    factors: tuple[float, ...]
    rank: int
    #: This worker's votes, each 0 or 1.
    votes: tuple[int, int] = (0, 0)

    # ---- in a sum

    def write(self, slot: Tensor) -> None:
        kind, number = float(self.kind), float(self.number % _NUMBERS)
        fields = [kind, kind * kind, number, number * number, self.factors[self.rank], *self.votes]
        if not runs_ahead(slot.device):
            slot.copy_(torch.tensor(fields, dtype=slot.dtype))
            return
        for place, field in zip(slot, fields, strict=True):  # copying from the host would wait for the device
            place.fill_(field)

    def read(self, slot: Tensor) -> tuple[bool, bool]:
        """The votes, after all workers' headers have been summed; raises unless all are alike."""
        kinds, kind_squares, numbers, number_squares, weight, stop, save = slot.tolist()
        size, kind, number = len(self.factors), int(self.kind), self.number % _NUMBERS
        # A mean and a mean square that are this worker's own leave no room for anybody else's.
        is_same_kind = kinds == size * kind and kind_squares == size * kind * kind
        is_same_number = numbers == size * number and number_squares == size * number * number
        if not (is_same_kind and is_same_number):
            other = "another worker is at a different average"
            if size == 2:
                other = _described(int(kinds) - kind, int(numbers) - number)
            raise TransferError(f"this worker is {self._here}, {other}; {_FIX}")
        total = sum(self.factors)
        if not abs(weight - total) <= 1e-3 * total:
            raise TransferError(f"the weights add up to {weight:g}, but this worker expects {total:g}; {_REWEIGHT}")
        return stop > 0, save > 0

    # ---- in coded rows

    def write_rows(self, headers: Tensor) -> None:
        """``headers``: int32, a row of two for each coded row."""
        flags = self.votes[0] | self.votes[1] << 1
        headers[:, 0] = self.kind << 24 | flags << 16 | self.number & 0xFFFF
        headers[:, 1].view(torch.float32).fill_(self.factors[self.rank])

    def read_rows(self, headers: Tensor) -> tuple[bool, bool]:
        """The votes; row j was written by worker j."""
        votes = 0
        for rank, ((word, bits), factor) in enumerate(zip(headers.tolist(), self.factors, strict=True)):
            (weight,) = struct.unpack("<f", struct.pack("<i", bits))
            kind, flags, number = word >> 24, word >> 16 & 0xFF, word & 0xFFFF
            if (kind, number) != (int(self.kind), self.number & 0xFFFF):
                raise TransferError(f"this worker is {self._here}, {_described(kind, number, f'worker {rank}')}; {_FIX}")
            if not abs(weight - factor) <= 1e-3 * factor:
                raise TransferError(
                    f"worker {rank} sends the weight {weight:g}, this worker expects {factor:g}; {_REWEIGHT}"
                )
            votes |= flags
        return bool(votes & 1), bool(votes & 2)

    @property
    def _here(self) -> str:
        return _described(int(self.kind), self.number, "").strip()


_REWEIGHT = "call reweight() on all workers"
_FIX = "call averaged(), finish() and reweight() on all workers at the same step"


def _described(kind: int, number: int, who: str = "the other worker") -> str:
    places = {
        Kind.ROUND: f"in round average {number}", Kind.FINISH: "in finish()", Kind.EVALUATION: "in averaged()",
        Kind.GRADIENT: f"in gradient {number}",
    }  # fmt: skip
    verb = "is " if who else ""
    return f"{who} {verb}{places.get(Kind(kind)) if kind in list(Kind) else 'at a different average'}"


class Arrivals:
    """Headers that have arrived. Reading them waits for a device, so there they are read once they have come to the host.

    Votes must count on all workers after the same round, so ``votes``: those of a device are read when the next ones arrive.
    """

    def __init__(self) -> None:
        self._unread: deque[tuple[_Read, list[Fetch]]] = deque()

    def check(self, read: _Read, slots: Sequence[Tensor], *, votes: bool = False, at_once: bool = False) -> Votes:
        """The votes known now: of the headers in ``slots``, or on a device those before them; ``at_once``: of both."""
        is_late = not at_once and any(runs_ahead(slot.device) for slot in slots)
        found = (False, False)
        while self._unread and (at_once or votes or len(self._unread) >= _MOST_UNREAD or self._has_come):
            found = _any(found, self._read_first())
        if is_late:
            self._unread.append((read, [Fetch(slot) for slot in slots]))
            return found
        for slot in slots:
            found = _any(found, read(slot))
        return found

    def settle(self) -> Votes:
        """Read all that has been put off."""
        found = (False, False)
        while self._unread:
            found = _any(found, self._read_first())
        return found

    @property
    def _has_come(self) -> bool:
        return all(slot.has_come for slot in self._unread[0][1])

    def _read_first(self) -> Votes:
        read, slots = self._unread.popleft()
        found = (False, False)
        for slot in slots:
            found = _any(found, read(slot.value()))
        return found


def _any(one: Votes, other: Votes) -> Votes:
    return one[0] or other[0], one[1] or other[1]
