"""A part of a model whose averages are made with whoever is there, in the background: members, weights, sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cocod_accel.averaging.coder import Coder, launch_coded
from cocod_accel.averaging.evaluation import Evaluation
from cocod_accel.averaging.flat import FlatCopy, Segment, floating
from cocod_accel.averaging.header import SUM_SIZE, Header, Kind
from cocod_accel.averaging.part import InFlight, Part
from cocod_accel.averaging.room import Snapshot
from cocod_accel.averaging.weights import mean_
from cocod_accel.comm.handles import Handle
from cocod_accel.members.session import Gathering, Job, Session


@dataclass
class _Flight(InFlight):
    """One that may fail. Written by the thread that makes it until ``job`` is done."""

    job: Job | None = None
    has_arrived: bool = False
    divisor: float = 1.0
    num_bytes: int = 0
    #: Who made it.
    gathering: Gathering | None = None
    votes: tuple[bool, bool] = (False, False)
    #: Residuals before it was coded, to go back to.
    residuals: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class MembersPart(Part):
    """A :class:`~cocod_accel.averaging.part.Part`; an average that fails leaves everything as it was."""

    def __init__(self, *args: Any, session: Session, at: Callable[[], int], **options: Any) -> None:
        super().__init__(*args, **options)
        self._session, self._at = session, at
        self._places = (0, 1)  # rank and size that the coders are made for
        self._share = 1.0  # of this worker in the last mean
        #: Called before the average of a round starts: whether what joiners need is ready; None: no round starts here.
        self.prepare: Callable[[], bool | None] = lambda: False

    # ---- verbs

    @torch.no_grad()
    def launch(self, extras: Sequence[Tensor] = ()) -> None:
        assert self._in_flight is None, "an average is already in flight"
        if self._session.has_left:
            return
        leaves = self._session.is_leaving and self.kind is Kind.ROUND
        is_ready = self.prepare() if self.kind is Kind.ROUND else False
        flight = None if is_ready is None else self._new_flight(extras)
        if flight is not None:
            send = self._sender(flight)
            flight.job = self._session.submit(self.kind, self._at(), send, is_ready=bool(is_ready), leaves=leaves)
            flight.handle = Handle([flight.job], 0)
            self._in_flight = flight
            if leaves:  # nobody waits for this worker once its last average is made
                flight.handle.wait()
                self._session.has_left = True

    def merge(self) -> bool:
        return self._comes() and super().merge()

    def adopt(self) -> bool:
        return self._comes() and super().adopt()

    def land(self) -> None:
        if self._comes():
            super().land()

    @torch.no_grad()
    def take_part(self, gathering: Gathering, extras: Sequence[Tensor], apply: Callable[[], None] | None) -> None:
        """Take part in a round with weight 0, blocking. ``apply``: called before its mean is taken; None: it is not."""
        flight = self._new_flight(extras)
        if flight is None:
            return
        self._sender(flight)(gathering)
        if apply is None:
            return
        apply()
        flight.has_arrived, flight.handle = True, Handle((), 0)
        self._note(flight)
        self._in_flight = flight
        super().adopt()
        for coder in self._coders:
            coder.clear()
        self._has_left_out = False

    def state(self, *, copies: bool = True) -> dict[str, Any]:
        """What any number of workers can go on from: nothing of it depends on how many there are."""
        state = super().state(copies=copies)
        return {**state, "residuals": self._owed(), "owned_residuals": []}

    # ---- what all workers have in common

    def common(self) -> Any:
        """To be handed to whoever lacks it."""
        return None if self.point is None else self.point.state()

    @torch.no_grad()
    def set_common_point(self, state: Any) -> None:
        if self.point is not None:
            self.point.check_state(state)
            self.point.load(state)

    # ---- in the thread that makes averages

    def _sender(self, flight: _Flight) -> Callable[[Gathering], None]:
        @torch.no_grad()
        def send(gathering: Gathering) -> None:
            try:
                self._send(flight, gathering)
            except RuntimeError:
                for coder, (own, owned) in zip(self._coders, flight.residuals, strict=False):
                    coder.residual.copy_(own)
                    coder.owned_residual.copy_(owned)
                raise

        return send

    def _send(self, flight: _Flight, gathering: Gathering) -> None:
        weights, comm, total = gathering.weights, gathering.comm, flight.total
        assert total.header is not None
        self._fit_coders(gathering)
        self._share = weights.factor / weights.total
        flight.residuals = [(coder.residual.clone(), coder.owned_residual.clone()) for coder in self._coders]
        is_coded = bool(self._coders) and self.point is not None and self.point.is_set
        flight.is_coded = is_coded and comm.size > 1
        self._fill_for(flight, weights.factor, with_residuals=is_coded and comm.size == 1)
        header = Header(self.kind, gathering.at, weights.factors, weights.rank, self.polls.cast())
        tails = comm.sent_bytes(total.tails)
        if flight.is_coded:
            assert self.point is not None
            comm.launch(total.tails).wait()
            handle = launch_coded(self._coders, total.cores, self.point.cores, comm, header, weights.total)
            handle.wait()
            slots = [rows for coder in self._coders for rows in coder.headers]
            flight.votes = _any([header.read_rows(slot) for slot in slots])
            for coder, centre, mean in zip(self._coders, self.point.cores, total.cores, strict=True):
                coder.decode(centre, mean)
            flight.num_bytes = tails + handle.num_bytes
        else:
            header.write(total.header)
            comm.launch(total.buffers).wait()
            flight.votes = header.read(total.header)
            flight.num_bytes = comm.sent_bytes(total.payloads)
        flight.divisor, flight.gathering = weights.total, gathering

    def _fill_for(self, flight: _Flight, factor: float, *, with_residuals: bool) -> None:
        """total <- what is summed or coded: x_t and what was left out, and extras; of a worker with weight 0, nothing."""
        index = 0
        for scaled, local in zip(flight.total.segments, flight.snapshot.each(), strict=True):
            is_coded = flight.is_coded and not scaled.is_extra
            if factor == 0:
                scaled.flat.zero_()
                if is_coded and self.point is not None:
                    scaled.flat.copy_(self.point.segments[index].flat)
            elif not scaled.is_extra and self._has_left_out and self._left_out is not None:
                torch.add(local, self._left_out.segments[index].flat, out=scaled.flat)
            else:
                scaled.flat.copy_(local)
            if not is_coded:
                scaled.flat.mul_(factor)
            index += not scaled.is_extra
        if with_residuals:  # alone: what rounding has dropped comes back in full
            for coder, core in zip(self._coders, flight.total.cores, strict=True):
                core.add_(coder.residual, alpha=factor)
                coder.clear()

    def _fit_coders(self, gathering: Gathering) -> None:
        """The layout of coded averages depends on who is there. What rounding has dropped stays."""
        places = gathering.comm.rank, gathering.comm.size
        if not self._coders or self.point is None or places == self._places:
            return
        owed, self._places = self._owed(), places
        self._coders = [Coder(self._codec, core, gathering.comm) for core in self.point.cores]
        for residual, coder in zip(owed, self._coders, strict=True):
            if residual.numel() == coder.residual.numel():
                coder.residual.copy_(residual)

    def _owed(self) -> list[Tensor]:
        """What rounding has dropped, of means too: as if it had been dropped of this worker's own values."""
        owed = [coder.residual.clone() for coder in self._coders]
        for residual, coder in zip(owed, self._coders, strict=True):
            if residual.numel() and self._share > 0:
                row = self._places[0] * coder.layout.chunk
                there = residual[row : row + coder.layout.chunk]
                there.add_(coder.owned_residual[: there.numel()], alpha=1 / self._share)
        return owed

    # ---- details

    def _new_flight(self, extras: Sequence[Tensor]) -> _Flight | None:
        snapshot, total = self._room.for_average(extras)
        if total.header is None:
            return None
        assert isinstance(snapshot, FlatCopy)
        snapshot.load()
        self.number += 1
        return _Flight(snapshot, total, None)

    def _comes(self) -> bool:
        """Whether there is an average in flight that has succeeded; waits for it. One that has failed is dropped."""
        flight = self._in_flight
        if not isinstance(flight, _Flight) or flight.has_arrived:
            return flight is not None
        assert flight.handle is not None
        assert flight.job is not None
        self.route.traffic.wait_for([flight.handle])
        flight.has_arrived = True
        if not flight.job.succeeded:
            self._in_flight = None
            return False
        self._note(flight)
        self.polls.count(flight.votes)
        self._has_left_out = False
        return True

    def _note(self, flight: _Flight) -> None:
        if self.kind is Kind.ROUND and flight.gathering is not None:
            self._session.last = flight.gathering

    def _arrive(self, flight: InFlight) -> None:
        """It has."""

    def _divisor(self, flight: InFlight, segment: Segment) -> float:
        assert isinstance(flight, _Flight)
        return 1.0 if flight.is_coded and not segment.is_extra else flight.divisor

    def _count_bytes(self, flight: InFlight) -> None:
        if isinstance(flight, _Flight):
            self.route.traffic.num_bytes += flight.num_bytes

    def _lent(self) -> Snapshot:
        return FlatCopy(self.parameters)


class MembersEvaluation(Evaluation):
    """The mean of those who are there."""

    def __init__(self, *args: Any, session: Session, at: Callable[[], int]) -> None:
        super().__init__(*args)
        self._session, self._at = session, at

    def _average_in_pieces(self) -> None:
        total = FlatCopy(self._parameters, floating(self._buffers()), header_size=SUM_SIZE)
        if total.header is None:
            return
        at, divisor = self._at(), 1.0

        @torch.no_grad()
        def send(gathering: Gathering) -> None:
            nonlocal divisor
            assert total.header is not None
            weights = gathering.weights
            total.load()
            for payload in total.payloads:
                payload.mul_(weights.factor)
            header = Header(Kind.EVALUATION, gathering.at, weights.factors, weights.rank)
            header.write(total.header)
            gathering.comm.launch(total.buffers).wait()
            header.read(total.header)
            divisor = weights.total

        self._session.submit(Kind.EVALUATION, at, send).wait()
        for payload in total.payloads:
            mean_(payload, divisor)
        total.store()


def _any(votes: Sequence[tuple[bool, bool]]) -> tuple[bool, bool]:
    return any(stop for stop, _ in votes), any(save for _, save in votes)
