"""A part of a model, and the one average of it that may be in flight.

A whole model is one part; with fragments there are several. A part has a codec (how it is written on the wire), a rule (what
becomes of an arrived mean), and a route (who it travels to). Algorithms are written in its verbs: launch, merge, adopt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cocod_accel.averaging.coder import Coder, launch_coded
from cocod_accel.averaging.drift import Drift
from cocod_accel.averaging.flat import FlatCopy, Segment, numels_of_cores, square_sums
from cocod_accel.averaging.header import Header, Kind
from cocod_accel.averaging.offload import HostCopy
from cocod_accel.averaging.polls import Polls
from cocod_accel.averaging.room import Room, Snapshot
from cocod_accel.averaging.route import Route
from cocod_accel.averaging.rules import Point, Rule, keep_share_, mix_
from cocod_accel.averaging.weights import mean_, negated_delta_
from cocod_accel.comm.handles import Handle, ring_total


@dataclass
class InFlight:
    """An average under way: the snapshot x_t, and the buffers that become the sum of all workers'.

    Once landed, ``handle`` is None, and ``total`` holds what :meth:`Part.merge` needs: x_t - z, or x_t if only a share of a
    worker's own steps is kept.
    """

    snapshot: Snapshot
    total: FlatCopy
    handle: Handle | None
    header: Header | None = None
    is_coded: bool = False
    beside: list[Handle] = field(default_factory=list)  # of what does not travel with the model
    answer: Tensor | None = None  # all workers' votes, if they do not
    drift: Drift = field(default_factory=Drift)  # once landed


class Part:
    """Consecutive parameters of one worker's model, with the state of their averages.

    With one worker nothing is ever in flight, so every verb leaves the parameters as they are, bit for bit.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        route: Route,
        *,
        rule: Rule | None = None,
        codec: str = "fp32",
        kind: Kind = Kind.ROUND,
    ) -> None:
        self.parameters = list(parameters)
        self.route = route
        self.rule = Rule() if rule is None else rule
        self.kind = kind
        #: Averages that were started.
        self.number = 0
        self.polls = Polls(route, kind)
        #: Of the last mean that was taken in.
        self.drift = Drift()
        self._in_flight: InFlight | None = None
        self._room = Room(self.parameters)
        self._kept: Snapshot | None = None
        is_needed = not route.is_alone and (codec != "fp32" or not self.rule.is_paper)
        #: z, where it is more than the last mean.
        self.point = Point(self.parameters, self.rule.outer) if is_needed else None
        self._codec = codec
        self._coders = self._new_coders()
        keeps_less = self.point is not None and self.rule.own_share < 1
        #: What merges have left out of x and no average carries yet: (1 - a) f.
        self._left_out = FlatCopy(self.parameters) if keeps_less else None
        self._has_left_out = False

    def offload(self) -> None:
        """From now on x_t and what rounding has dropped wait in the host's memory. Before training begins."""
        self._room.is_offloaded = True
        self._coders = self._new_coders()

    def _new_coders(self) -> list[Coder]:
        if self.point is None or self._codec == "fp32":
            return []
        return [Coder(self._codec, core, self.route.comm, offload=self._room.is_offloaded) for core in self.point.cores]

    # ---- verbs

    @torch.no_grad()
    def begin(self, *, equal: bool) -> None:
        """Training begins; ``equal``: all workers hold the same parameters, which are then the common point."""
        if equal and self.point is not None:
            self.point.set_to_parameters()

    @torch.no_grad()
    def launch(self, extras: Sequence[Tensor] = ()) -> None:
        """Keep x_t and start the average of all workers' in the background; ``extras`` travel with it, in full."""
        assert self._in_flight is None, "an average is already in flight"
        if self.route.is_alone and (self.route.node is None or not extras):
            return
        snapshot, total = self._room.for_average(extras)
        if total.header is None:
            return
        self.number += 1
        weights = self.route.weights
        is_coded = bool(self._coders) and self.point is not None and self.point.is_set
        self._fill(snapshot, total, is_coded)
        flight = InFlight(snapshot, total, None, is_coded=is_coded)
        if self.route.node is not None:
            self.route.node.average_([segment.flat for segment in total.segments if segment.is_extra])
            asked = self.polls.ask(total.header.device)
            if asked is not None:
                flight.answer = asked[0]
                flight.beside.append(asked[1])
        header = flight.header = Header(self.kind, self.number, weights.factors, weights.rank, self.polls.cast())
        if is_coded:
            assert self.point is not None
            if total.tails:
                flight.beside.append(self.route.comm.launch(total.tails))
            # What is coded stands in ``total``, if it is not x_t, or x_t is not here; the mean takes its place.
            values = total.cores if self._has_left_out or isinstance(snapshot, HostCopy) else snapshot.cores
            coding = self._coders, values, self.point.cores
            flight.handle = launch_coded(*coding, self.route.comm, header, weights.total)
        else:
            header.write(total.header)
            flight.handle = self.route.comm.launch(total.buffers)
        self._has_left_out = False
        self._in_flight = flight

    @torch.no_grad()
    def merge(self) -> bool:
        """x <- z + a (x - x_t), if an average is in flight; whether one was."""
        if self._in_flight is None:
            return False
        self.land()
        flight, self._in_flight = self._in_flight, None
        if self._left_out is not None and self.point is not None:
            _keep_share(flight.total, self._left_out, self.point, self.rule.own_share)
            self._has_left_out = True
        elif self.rule.mix is not None and self.point is not None:
            _mix(flight.total, self.point, self.rule.mix)
        else:
            for segment in flight.total.segments:
                # Minus (x_t - z) rounds like plus (z - x_t).
                torch._foreach_sub_(segment.tensors, segment.views)
        self.drift = flight.drift
        self._count_bytes(flight)
        return True

    @torch.no_grad()
    def adopt(self) -> bool:
        """x <- z, and extras <- their mean, if an average is in flight; whether one was."""
        if self._in_flight is None:
            return False
        flight, self._in_flight = self._in_flight, None
        assert flight.handle is not None, "a landed average keeps only what a merge needs"
        self._arrive(flight)
        self._count_bytes(flight)
        drift, index = Drift(), 0
        for segment, local in zip(flight.total.segments, flight.snapshot.each(), strict=True):
            mean = mean_(segment.flat, self._divisor(flight, segment))
            if not segment.is_extra:
                drift.norms += square_sums(mean)
                drift.distances += square_sums(local.sub_(mean))
                if self.point is not None:
                    mean.copy_(self.point.follow(index, mean))
                index += 1
            torch._foreach_copy_(segment.tensors, segment.views)
        self._point_is_set()
        self.drift = drift
        return True

    @torch.no_grad()
    def land(self) -> None:
        """Wait for the average in flight and keep what :meth:`merge` needs of it; the parameters are not touched."""
        flight = self._in_flight
        if flight is None or flight.handle is None:
            return
        if self._kept is flight.total:
            self._kept = FlatCopy(self.parameters)
            for core, value in zip(self._kept.cores, flight.total.cores, strict=True):
                core.copy_(value)
        self._arrive(flight)
        flight.handle = None
        for index, (segment, local) in enumerate(zip(flight.total.segments, flight.snapshot.each(), strict=True)):
            divisor = self._divisor(flight, segment)
            if self.point is None:
                flight.drift.norms += [piece / divisor**2 for piece in square_sums(segment.flat)]
                flight.drift.distances += square_sums(negated_delta_(segment.flat, local, divisor))
                continue
            mean = mean_(segment.flat, divisor)
            flight.drift.norms += square_sums(mean)
            if self._left_out is None and self.point.outer.is_mean:
                self.point.follow(index, mean)
                away = torch.sub(local, mean, out=segment.flat)  # which held the mean
            else:
                away = local - mean
                z = self.point.follow(index, mean)
                if self._left_out is None:
                    torch.sub(local, z, out=segment.flat)
                else:
                    segment.flat.copy_(local)
            flight.drift.distances += square_sums(away)
        self._point_is_set()

    @torch.no_grad()
    def settle(self) -> bool:
        """Take in what is in flight with all of this worker's own steps, because the run stops here for a while."""
        was_in_flight = self.merge()
        self.polls.settle()
        if self._has_left_out and self._left_out is not None:
            for segment in self._left_out.segments:
                torch._foreach_add_(segment.tensors, segment.views)
            self._has_left_out = False
        self._room.pair = None
        return was_in_flight

    @torch.no_grad()
    def set_common(self, views: Mapping[Tensor, Tensor]) -> None:
        """All workers hold these values now, by parameter: z is there, and nothing is owed."""
        if self.point is not None:
            self.point.set_to(views)
        for coder in self._coders:
            coder.clear()
        self._has_left_out = False

    @torch.no_grad()
    def keep_local(self) -> None:
        """Until :meth:`restore_local` the parameters may be anything. Where rounds have room to lend, no memory is taken."""
        self._kept = self._lent()
        self._kept.load_cores()

    @torch.no_grad()
    def restore_local(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.store_cores()

    def _lent(self) -> Snapshot:
        flight = self._in_flight
        if self._room.pair is None:
            return FlatCopy(self.parameters)
        snapshot, total = self._room.pair
        if flight is None or flight.handle is None:
            return snapshot  # what was started from it has landed
        if flight.is_coded:
            return total  # the mean is decoded into it, later; a state that is asked for meanwhile moves it
        if self.point is None:
            # Landing keeps one tensor of two, and moves nothing that workers share. It delays nobody: whatever is averaged
            # meanwhile would travel behind it.
            for handle in (*flight.beside, flight.handle):
                handle.wait()  # before its cost is counted: it was not training that waited
            self.land()
            return snapshot
        return HostCopy(total) if self._room.is_offloaded else FlatCopy(self.parameters)

    def poll(self) -> None:
        """Note in passing whether the average in flight has arrived."""
        if self._in_flight is not None and self._in_flight.handle is not None:
            self._in_flight.handle.poll()

    @property
    def mean_in_flight(self) -> FlatCopy | None:
        """What becomes the mean, or None; for whoever needs it after :meth:`adopt`."""
        return None if self._in_flight is None else self._in_flight.total

    # ---- the state between two steps

    def state(self, *, copies: bool = True) -> dict[str, Any]:
        """Waits for what is in flight; starts no collective. Without ``copies`` it holds only until the next step."""
        self.land()
        self.polls.settle()
        flight = self._in_flight
        keep = torch.clone if copies else torch.detach
        left_out = self._left_out.buffers if self._left_out is not None and self._has_left_out else None
        return {
            "number": self.number,
            "in_flight": None if flight is None else [keep(core) for core in flight.total.cores],
            "is_coded": flight is not None and flight.is_coded,
            "drift": [*self.drift.state(), *([] if flight is None else flight.drift.state())],
            "point": None if self.point is None else self.point.state(copies=copies),
            "residuals": [keep(coder.residual) for coder in self._coders],
            "owned_residuals": [keep(coder.owned_residual) for coder in self._coders],
            "left_out": None if left_out is None else [keep(buffer) for buffer in left_out],
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse what :meth:`load` could not load, before anything is changed."""
        if state["in_flight"] is not None:
            _check_sizes("state", state["in_flight"], numels_of_cores(self.parameters))
        if self.point is None:
            return
        self.point.check_state(state["point"])
        for key in ("residuals", "owned_residuals"):
            own = [(c.residual if key == "residuals" else c.owned_residual).numel() for c in self._coders]
            if state[key]:
                _check_sizes("payload", state[key], own)

    @torch.no_grad()
    def load(self, state: dict[str, Any] | None) -> None:
        """Go on from :meth:`state`; None: the state of a run with other workers, so the next mean is sent in full."""
        self.land()  # its memory belongs to a transfer until then
        self._in_flight, self._has_left_out = None, False
        self.number = 0 if state is None else state["number"]
        if self.point is not None:
            self.point.load(None if state is None else state["point"])
        for index, coder in enumerate(self._coders):
            coder.clear()
            if state is not None and state["residuals"]:
                coder.residual.copy_(state["residuals"][index])
            if state is not None and state["owned_residuals"]:
                coder.owned_residual.copy_(state["owned_residuals"][index])
        if state is None:
            return
        self.drift = Drift.of_state(state["drift"][:2])
        if self._left_out is not None and state["left_out"] is not None:
            self._left_out.fill(state["left_out"])
            self._has_left_out = True
        if state["in_flight"] is not None and not self.route.is_alone:
            pair = self._room.renew()
            for core, value in zip(pair[1].cores, state["in_flight"], strict=True):
                core.copy_(value)
            self._in_flight = InFlight(*pair, handle=None, is_coded=state["is_coded"])
            if len(state["drift"]) == 4:
                self._in_flight.drift = Drift.of_state(state["drift"][2:])

    # ---- details

    def _fill(self, snapshot: Snapshot, total: FlatCopy, is_coded: bool) -> None:
        """snapshot <- x_t; total <- what is summed or coded: x_t and what was left out, and extras."""
        factor, index = self.route.weights.factor, 0
        for position, scaled in enumerate(total.segments):
            local = snapshot.take(position)
            if not scaled.is_extra and self._has_left_out and self._left_out is not None:
                torch.add(local, self._left_out.segments[index].flat, out=scaled.flat)
                if not is_coded:
                    scaled.flat.mul_(factor)
            elif scaled.is_extra or not is_coded:
                torch.mul(local, factor, out=scaled.flat)
            elif isinstance(snapshot, HostCopy):
                scaled.flat.copy_(local)
            index += not scaled.is_extra

    def _arrive(self, flight: InFlight) -> None:
        assert flight.handle is not None
        assert flight.header is not None
        self.route.traffic.wait_for([*flight.beside, flight.handle])
        assert flight.total.header is not None
        slots = [rows for coder in self._coders for rows in coder.headers] if flight.is_coded else [flight.total.header]
        self.polls.read_headers(flight.header.read_rows if flight.is_coded else flight.header.read, slots)
        if flight.is_coded:
            assert self.point is not None
            for coder, centre, mean in zip(self._coders, self.point.cores, flight.total.cores, strict=True):
                coder.decode(centre, mean)
        if flight.answer is not None:
            self.polls.read_answer(flight.answer)

    def _divisor(self, flight: InFlight, segment: Segment) -> float:
        """What turns ``total`` into the mean."""
        return 1.0 if flight.is_coded and not segment.is_extra else self.route.weights.total

    def _point_is_set(self) -> None:
        if self.point is not None:
            self.point.is_set = True

    def _count_bytes(self, flight: InFlight) -> None:
        """When an average is taken in, not when it arrives: a state saved in between must not change a count."""
        comm, traffic, total = self.route.comm, self.route.traffic, flight.total
        traffic.num_bytes += comm.sent_bytes(total.tails if flight.is_coded else total.payloads)
        if flight.is_coded:
            traffic.num_bytes += ring_total(sum(coder.num_bytes for coder in self._coders), comm.size)


def _keep_share(total: FlatCopy, left_out: FlatCopy, point: Point, share: float) -> None:
    """x <- z + share f, of parts that began at what ``total`` holds; ``left_out`` <- (1 - share) f."""
    for start, rest, z in zip(total.segments, left_out.segments, point.segments, strict=True):
        torch._foreach_copy_(rest.views, start.tensors)
        keep_share_(rest.flat, start.flat, z.flat, share)
        torch._foreach_copy_(start.tensors, start.views)


def _mix(total: FlatCopy, point: Point, mix: float) -> None:
    """x <- mix x + (1 - mix) z"""
    for segment, z in zip(total.segments, point.segments, strict=True):
        torch._foreach_copy_(segment.views, segment.tensors)
        mix_(segment.flat, z.flat, mix)
        torch._foreach_copy_(segment.tensors, segment.views)


def _check_sizes(what: str, values: Sequence[Tensor], expected: list[int]) -> None:
    sizes = [value.numel() for value in values]
    if sizes != expected:
        raise ValueError(f"the saved {what} has {sizes} elements, this model {expected}; load a state of this model")
