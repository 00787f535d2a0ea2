"""What arrives beside a part's averages: their headers, which are checked, and the votes of all workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from cocod_accel.averaging.header import Arrivals, Kind, Votes
from cocod_accel.averaging.route import Route
from cocod_accel.comm.handles import Handle


class Ballot(Protocol):
    """What workers ask of each other on the way: to stop, to save."""

    def cast(self) -> tuple[int, int]:
        """This worker's votes."""

    def count(self, stop: bool, save: bool) -> None:
        """Whether any worker has voted so."""


class Polls:
    """Votes travel in headers, except where the workers of a node send different shares of the model and ask separately."""

    def __init__(self, route: Route, kind: Kind) -> None:
        self._route = route
        # Only a round may end before its header has been read: whoever waits for anything else reads it at once.
        self._at_once = kind is not Kind.ROUND
        self._headers, self._asked = Arrivals(), Arrivals()
        #: Who votes travel for; None: nobody.
        self.ballot: Ballot | None = None

    @property
    def _travel_in_headers(self) -> bool:
        return self.ballot is not None and self._route.node is None

    def cast(self) -> tuple[int, int]:
        """What stands in the next header."""
        return self.ballot.cast() if self.ballot is not None and self._travel_in_headers else (0, 0)

    def ask(self, device: torch.device) -> tuple[Tensor, Handle] | None:
        """Ask all workers beside the next average, if that is needed: where the answer will stand, and when."""
        if self.ballot is None or self._travel_in_headers:
            return None
        votes = torch.zeros(2, device=device)
        for place, vote in zip(votes, self.ballot.cast(), strict=True):
            if vote:  # filled in place: a copy from the host would wait for a device
                place.fill_(1)
        return votes, self._route.everyone.launch([votes])

    def read_headers(self, read: Callable[[Tensor], Votes], slots: Sequence[Tensor]) -> None:
        """Check what has arrived; on a device perhaps an average later."""
        self.count(self._headers.check(read, slots, votes=self._travel_in_headers, at_once=self._at_once))

    def read_answer(self, votes: Tensor) -> None:
        self.count(self._asked.check(_votes_in, [votes], votes=True, at_once=self._at_once))

    def settle(self) -> None:
        """Read all that has been put off."""
        for arrivals in (self._headers, self._asked):
            self.count(arrivals.settle())

    def count(self, votes: Votes) -> None:
        """Votes that have arrived."""
        if self.ballot is not None:
            self.ballot.count(*votes)


def _votes_in(votes: Tensor) -> Votes:
    stop, save = (votes > 0).tolist()
    return bool(stop), bool(save)
