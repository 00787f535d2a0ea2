"""Votes to stop or to save: any worker may ask, and all agree at the same round's end: votes travel with averages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cocod_accel.averaging.route import Route


@dataclass
class Wishes:
    """What a worker may ask all of them to do."""

    stop: bool = False
    save: bool = False


class Votes:
    """This worker's wishes, and what all have agreed on."""

    def __init__(self) -> None:
        self._wishes = Wishes()
        self._agreed = Wishes()

    def ask(self, *, stop: bool = False, save: bool = False) -> None:
        self._wishes.stop, self._wishes.save = self._wishes.stop or stop, self._wishes.save or save

    def cast(self) -> tuple[int, int]:
        """This worker's votes, 0 or 1 each, to stop and to save; a wish to save is cast once, or it would count twice."""
        save, self._wishes.save = self._wishes.save, False
        return int(self._wishes.stop), int(save)

    def count(self, stop: bool, save: bool) -> None:
        """Whether any worker has voted so; every worker counts the same at the same round."""
        self._agreed.stop = self._agreed.stop or stop
        self._agreed.save = self._agreed.save or save
        if save:
            self._wishes.save = False

    def take(self) -> Wishes:
        """What all are to do. A wish to save is fulfilled by taking it."""
        agreed, self._agreed = self._agreed, Wishes(stop=self._agreed.stop)
        return agreed

    def hold(self, route: Route, device: torch.device) -> None:
        """Ask all workers now, blocking; for algorithms whose rounds send no models."""
        ballot = torch.tensor(self.cast(), dtype=torch.float32, device=device)
        if route.everyone.size > 1:
            # A question is no payload: it is never slowed down, and has no bytes; but the time it blocks is counted.
            route.traffic.wait_for([route.everyone.launch([ballot])])
        stop, save = (ballot > 0).tolist()
        self.count(stop, save)
