"""Where one worker meets the others, in words, and its announcements there."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from cocod_accel.comm.groups import Channels
from cocod_accel.comm.meeting import LEFT
from cocod_accel.sync.driver import Driver


class Places:
    """The process groups of one attached model: what this worker does when it waits in one, and calls that meet all."""

    def __init__(self, driver: Driver, channels: Channels, rank: int) -> None:
        self._driver, self._rank = driver, rank
        self._calls = channels.calls
        self._seats = [*channels.rounds, *channels.backwards, *([] if self._calls is None else [self._calls])]
        for seats, where in ((channels.rounds, self._in_round), (channels.backwards, self._in_backward)):
            for seat in seats:
                seat.where = _weakly(where)
        if self._calls is not None:
            self._calls.meeting.come_back([seat.name for seat in self._seats])

    def meet(self, call: str) -> None:
        """All workers are to make this call now; raises on all of them if they do not."""
        if self._calls is not None:
            clock = self._driver.clock
            method = self._driver.method
            position = f" at step {clock.attempts}" if method.same_period else f" after round {clock.rounds}"
            # With a server, each worker has taken steps of its own.
            self._calls.meets(f"{call}{'' if method.is_served else position}", method.poll)

    def leave(self, how: str) -> None:
        """This worker comes to none of them any more, and whoever waits for it is told."""
        if self._calls is not None:
            self._calls.meeting.leave([seat.name for seat in self._seats], f"rank {self._rank} {LEFT}{how}")

    def _in_round(self) -> str:
        if self._driver.method.reduces_gradients:
            return self._in_backward()
        return f"ending round {self._driver.clock.rounds} at step {self._driver.clock.attempts}"

    def _in_backward(self) -> str:
        return f"in the backward of step {self._driver.clock.attempts + 1}"


def _weakly(method: Callable[[], str]) -> Callable[[], str]:
    """A method of an object that is not kept for it."""
    held = weakref.WeakMethod(method)

    def call() -> str:
        alive = held()
        return "in a collective" if alive is None else alive()

    return call
