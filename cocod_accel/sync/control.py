"""What only a trainer needs of a :class:`~cocod_accel.sync.sync.Sync`: requests, measurements, emulation, spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cocod_accel.algorithms.rounds import Period, PeriodLike, check_fragments
from cocod_accel.averaging.timing import time_payload_coding, time_transfer
from cocod_accel.comm.agreement import exchange_reports
from cocod_accel.comm.emulated import EmulatedLink, Link
from cocod_accel.comm.groups import TwoLevelComm
from cocod_accel.comm.handles import Communicator
from cocod_accel.comm.traffic import Traffic
from cocod_accel.sync.auto import AutoPlan, Decision, decide
from cocod_accel.sync.votes import Votes, Wishes
from cocod_accel.theory import StepTimes

if TYPE_CHECKING:
    from cocod_accel.sync.sync import Sync


class Control:
    """``sync.control``. Whatever changes what workers send must be called on all of them at the same point."""

    def __init__(self, sync: Sync) -> None:
        self._sync = sync
        self._driver = sync._driver
        self._votes: Votes | None = None

    # ---- before a model enters an average

    @property
    def guard(self) -> Callable[[], None] | None:
        """Called at a round's end before this worker's model enters an average; may raise to keep it out."""
        return self._driver.guard

    @guard.setter
    def guard(self, guard: Callable[[], None] | None) -> None:
        self._driver.guard = guard

    # ---- asking all workers

    def listen(self) -> None:
        """From now on any worker may ask all of them to stop or to save."""
        self._votes = Votes()
        self._driver.replica.vote_with(self._votes)

    def request(self, *, stop: bool = False, save: bool = False) -> None:
        """Ask all workers to stop, or to save. They agree at a round's end: the question travels with the average."""
        if self._votes is not None:
            self._votes.ask(stop=stop, save=save)

    def agreed(self, ask_now: bool = False) -> Wishes:
        """What all workers are to do, the same on each of them after the same round. A wish to save is taken by asking.

        ``ask_now``: every worker asks at this step. Needed where rounds send no models, and ignored elsewhere.
        """
        if self._votes is None:
            return Wishes()
        replica = self._driver.replica
        if ask_now and (self._driver.method.reduces_gradients or replica.route.is_alone):
            device = replica.parameters[0].device if replica.parameters else torch.device("cpu")
            self._votes.hold(replica.route, device)
        return self._votes.take()

    # ---- rounds

    @property
    def is_round_start(self) -> bool:
        """Whether the last step ended a round."""
        return self._driver.clock.start == self._driver.clock.attempts

    def start_at(self, attempts: int) -> None:
        """Begin a round here, as if this many steps had been attempted."""
        self._driver.clock.attempts = attempts
        self._driver.clock.restart()

    def set_period(self, period: PeriodLike) -> None:
        """Another period or schedule, the same on every worker.

        The pairs of a schedule count from the first step of all: a round under way keeps the period of its own first step.
        """
        parsed = Period.parse(period)
        check_fragments(self._driver.method.fragments, parsed)
        self._driver.clock.period = parsed

    def restore_weights(self, weights: Sequence[float]) -> None:
        """The weights that were in force when a state was saved; every worker passes the same ones. Nothing is finished."""
        self._sync._set_weights(weights)

    def state_to_write(self) -> dict[str, Any]:
        """``sync.state_dict()`` for whoever writes it down at once: it is not copied, and holds until the next step."""
        return self._sync._state(copies=False)

    def wait(self) -> None:
        """For what would go on while training time is not counted; no model is changed."""
        self._driver.method.wait()

    # ---- time

    def time_transfer(self, payload: str | None = None) -> float:
        """Seconds that a transfer like a round's takes, from when this worker joins it. Collective; no model is changed.

        ``payload``: as if it were coded so.
        What is in flight is waited for first, so that the link is free. It is not counted in ``stats()``.
        """
        self._sync._settle("time_transfer()")
        return self._time_transfer(payload)

    def _time_transfer(self, payload: str | None = None) -> float:
        """The same where a step has just been counted."""
        self._driver.state(copies=False)
        codec = self._driver.method.payload if payload is None else payload
        replica = self._driver.replica
        extras = replica.extras_unasked(with_buffers=self._driver.method.sends_buffers)
        return time_transfer(replica.parameters, extras, codec, replica.route)

    def auto_plan(self, least: int) -> AutoPlan:
        """What chooses the period of a loop that leaves it open."""
        subject = self._sync.subject

        def gather(row: list[float]) -> list[list[float]]:
            return exchange_reports(row, subject.group, subject.device)

        def decide_here(compute_seconds: float) -> tuple[Decision, StepTimes] | None:
            return decide(self._time_transfer, self.time_coding, gather, compute_seconds, least)

        return AutoPlan(least, self, decide_here)

    def time_coding(self, payload: str | None = None) -> float:
        """Seconds that this worker's main thread takes to code a round's payload; sends nothing. None: its own code."""
        replica, codec = self._driver.replica, self._driver.method.payload if payload is None else payload
        return time_payload_coding(replica.parameters, codec, replica.route)

    def emulate_link(self, link: Link) -> None:
        """From now on collectives take what they would on ``link``."""
        route = self._driver.replica.route
        if isinstance(route.comm, TwoLevelComm):  # a node's own links are as fast as they are
            route.comm = route.comm.with_outer(_emulated(route.comm.outer, link))
        else:
            route.comm = _emulated(route.comm, link)

    @property
    def traffics(self) -> list[Traffic]:
        """Between nodes, and inside this one."""
        route = self._driver.replica.route
        return [each.traffic for each in (route, route.node) if each is not None]

    def blocked_seconds(self) -> float:
        """Seconds that communication has exposed so far; waits for the device."""
        for traffic in self.traffics:
            traffic.catch_up(wait=True)
        return sum(traffic.exposed_seconds for traffic in self.traffics)

    def record_spans(self) -> None:
        """From now on keep when communication happened, for :meth:`take_spans`."""
        for traffic in self.traffics:
            traffic.spans = []

    def take_spans(self) -> list[tuple[str, float, float]]:
        """(name, start, end) in ``time.perf_counter`` seconds since the last call: "communicate" and "wait"."""
        taken: list[tuple[str, float, float]] = []
        for traffic in self.traffics:
            traffic.catch_up(wait=True)
            if traffic.spans is not None:
                taken, traffic.spans = taken + traffic.spans, []
        return taken


def _emulated(comm: Communicator, link: Link) -> Communicator:
    return EmulatedLink(comm.inner if isinstance(comm, EmulatedLink) else comm, link)
