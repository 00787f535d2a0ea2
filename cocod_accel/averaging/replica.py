"""Weighted averaging: one worker's tensors, and its average in flight.

:class:`Replica` holds one worker's tensors and the one average it may have in flight; algorithms are written in its verbs:
launch, merge, adopt, drop. The merge rules are in :mod:`cocod_accel.averaging.weights`.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cocod_accel.averaging.codecs import CodedMean, coded_bytes
from cocod_accel.averaging.flat import FlatCopy, Segment, as_real, balanced_cuts
from cocod_accel.averaging.rules import Anchor, pulled_offset_
from cocod_accel.averaging.weights import Weights, mean_, negated_delta_
from cocod_accel.comm.handles import Communicator, Handle, wait_for_device
from cocod_accel.comm.traffic import Traffic

#: What is said of optimizer states that cannot be averaged.
UNLIKE_STATES = (
    "workers hold different optimizer states, because some have had no gradient for a parameter yet; "
    'use optimizer_state="keep"'
)


@dataclass
class Wishes:
    """What a worker may ask all of them to do at a round's end."""

    stop: bool = False
    save: bool = False


class _Drift:
    """||x_t - mean_t||^2 and ||mean_t||^2 in parts, kept on their devices: reading them would wait for the device."""

    def __init__(self) -> None:
        self.distances: list[Tensor] = []
        self.norms: list[Tensor] = []

    @classmethod
    def of(cls, distances: list[float], norms: list[float]) -> _Drift:
        drift = cls()
        drift.distances, drift.norms = ([torch.tensor(p, dtype=torch.float64) for p in ps] for ps in (distances, norms))
        return drift


@dataclass
class _InFlight:
    """An average under way: the snapshot x_t and the buffers that become sum_j M_j x_t^j."""

    snapshot: FlatCopy
    total: FlatCopy
    handle: Handle | None  # None once landed: ``total`` then holds x_t - mean_t, or (1 - alpha) x_t - z
    drift: _Drift = field(default_factory=_Drift)  # of the landed average
    ballot: Tensor | None = None  # becomes the number of workers that ask to stop, and to save
    beside: list[Handle] = field(default_factory=list)  # of what does not travel with the models
    is_coded: bool = False  # the parameters travel coded, and ``total`` becomes mean_t where they stand
    is_exact: bool = False  # to be taken as it is, whatever rounds do with a mean


@dataclass
class MeanInFlight:
    """A mean to be held for a while, on its way; nothing, where a worker is alone or it has been taken."""

    total: FlatCopy | None = None
    handle: Handle | None = None


class Replica:
    """One worker's model: what is averaged, with which weights, and the one average it may have in flight.

    ``buffers`` is asked anew at every use, because a module may rebind a buffer instead of writing into it.
    With one worker nothing is ever in flight, so every verb leaves the model as it is, bit for bit.

    ``everyone`` is who a question goes to, ``comm`` unless workers share nodes. ``node`` is then the same worker among those
    of its node: their parameters are equal, because they sum their gradients, but their buffers are not.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        buffers: Callable[[], list[Tensor]],
        comm: Communicator,
        weights: Weights,
        *,
        everyone: Communicator | None = None,
        node: Replica | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.buffers = buffers
        self.comm = comm
        self.everyone = comm if everyone is None else everyone
        self.node = node
        self.weights = weights
        #: Optimizer state that is averaged by value wherever buffers are, except for evaluation; None: it stays local.
        self.optimizer_tensors: Callable[[], list[Tensor]] | None = None
        #: How parameters travel in rounds; None: as they are.
        self.coded: CodedMean | None = None
        #: What rounds do with a mean: z, and the alpha that pulls towards it.
        self.anchor: Anchor | None = None
        self.pull_back = 0.0
        self.traffic = Traffic()
        self._in_flight: _InFlight | None = None
        self._pair: tuple[FlatCopy, FlatCopy] | None = None
        self._drift = _Drift()
        #: What this worker asks all of them to do; None: nobody may ask, and nothing is sent.
        self.wishes: Wishes | None = None
        #: The same on every worker after the same round, once one of them has asked.
        self.agreed = Wishes()

    def cut(self, num_parts: int) -> list[Replica]:
        """This replica in even parts of consecutive whole parameters, each with an average in flight of its own."""
        sizes = [as_real(parameter).numel() for parameter in self.parameters]
        parts = []
        for these in balanced_cuts(sizes, num_parts):
            part = Replica(self.parameters[these], list, self.comm, self.weights, everyone=self.everyone, node=self.node)
            part.traffic = self.traffic
            parts.append(part)
        return parts

    def lead(self, part: Replica, *, with_wishes: bool) -> Replica:
        """``part`` with all that may have been set here since the cut; one of the parts carries the wishes."""
        part.comm, part.weights, part.agreed = self.comm, self.weights, self.agreed
        part.wishes = self.wishes if with_wishes else None
        return part

    def take_drift(self, parts: Sequence[Replica]) -> None:
        """The last merge of a model in parts is the last of each."""
        self._drift = _Drift()
        for part in parts:
            self._drift.distances += part._drift.distances
            self._drift.norms += part._drift.norms

    def release(self) -> None:
        """Give back the memory of what is not in flight."""
        if self._in_flight is None:
            self._pair = None

    @property
    def drift(self) -> float:
        """||x_t - mean_t|| / ||mean_t|| at the last merge; 0 before it."""
        distance, norm = self.drift_parts
        return math.sqrt(distance / norm) if norm > 0 else 0.0

    @property
    def drift_parts(self) -> tuple[float, float]:
        distances, norms = self._drift.distances, self._drift.norms
        return math.fsum(float(part) for part in distances), math.fsum(float(part) for part in norms)

    def drift_state(self) -> list[list[float]]:
        """Of the last merge, and of what is in flight, which has been waited for."""
        drifts = [self._drift] if self._in_flight is None else [self._drift, self._in_flight.drift]
        return [[float(part) for part in parts] for drift in drifts for parts in (drift.distances, drift.norms)]

    def load_drift_state(self, state: list[list[float]]) -> None:
        self._drift = _Drift.of(*state[:2])
        if self._in_flight is not None and len(state) == 4:
            self._in_flight.drift = _Drift.of(*state[2:])

    # ---- the verbs of an algorithm

    @torch.no_grad()
    def begin(self, equal: bool) -> None:
        """Training begins; ``equal``: all workers hold the same parameters, which is then the first common mean."""
        centred = [part for part in (self.coded, self.anchor) if part is not None]
        if centred and self.comm.size > 1 and equal:
            start = FlatCopy(self.parameters)
            start.load()
            for part in centred:
                part.centre_on(start.cores)

    @torch.no_grad()
    def launch(self, *, with_buffers: bool = False, exact: bool = False) -> None:
        """Keep x_t and start the sum of M_i x_t in the background; ``exact``: in full, however rounds send it."""
        assert self._in_flight is None, "an average is already in flight"
        if self.comm.size == 1 and (self.node is None or not with_buffers):
            return
        snapshot, total = self._flat_pair(self._extras() if with_buffers else [])
        coded = self.coded if self.coded is not None and self.coded.is_centred and not exact else None
        for local, scaled in zip(snapshot.segments, total.segments, strict=True):
            torch._foreach_copy_(local.views, local.tensors)
            if coded is None or local.is_extra:
                torch.mul(local.flat, self.weights.factor, out=scaled.flat)
        if self.node is not None:
            self.node.average_([segment.flat for segment in total.segments if segment.is_extra])
        ballot, beside = self._ballot(total.buffers[0].device), []
        together = total.buffers if coded is None else total.tails
        # Mates send different shares of the models, and have wishes of their own; and codes are no sums.
        if ballot is not None and (self.node is not None or not together):
            beside.append(self.everyone.launch([ballot]))
        elif ballot is not None:
            together = [*together, ballot]
        if coded is None:
            handle = self.comm.launch(together)
        else:
            if together:
                beside.append(self.comm.launch(together))
            handle = coded.launch(snapshot.cores, self.comm, self.weights.factors, self.weights.total)
        self._in_flight = _InFlight(snapshot, total, handle, ballot=ballot, beside=beside)
        self._in_flight.is_coded, self._in_flight.is_exact = coded is not None, exact

    @torch.no_grad()
    def merge(self) -> None:
        """x <- x + (mean_t - x_t), or z + (1 - alpha) (x - x_t), if an average is in flight."""
        if self._in_flight is None:
            return
        self.land()
        for segment in self._in_flight.total.segments:
            if self.pull_back:
                torch._foreach_mul_(segment.tensors, 1 - self.pull_back)
            # Minus (x_t - mean_t) rounds like plus (mean_t - x_t).
            torch._foreach_sub_(segment.tensors, segment.views)
        self._drift = self._in_flight.drift
        self._count_bytes(self._in_flight)
        self._in_flight = None

    @torch.no_grad()
    def adopt(self) -> None:
        """x <- mean_t, or z, if an average is in flight."""
        if self._in_flight is None:
            return
        flight, self._in_flight = self._in_flight, None
        assert flight.handle is not None, "a landed average keeps only its delta"
        self._arrive(flight, flight.handle)
        self._count_bytes(flight)
        drift = _Drift()
        for segment, local in zip(flight.total.segments, flight.snapshot.segments, strict=True):
            mean_(segment.flat, self._divisor(flight, segment))
            torch._foreach_copy_(segment.tensors, segment.views)
            if not segment.is_extra:
                drift.norms.append(segment.flat.dot(segment.flat))
                drift.distances.append(local.flat.sub_(segment.flat).square_().sum())
        self._drift = drift
        if self.anchor is not None and flight.is_exact:
            self.anchor.centre_on(flight.total.cores)
        elif self.anchor is not None:
            self.anchor.follow_(flight.total.cores)
            flight.total.store()
        if self.coded is not None and not flight.is_coded:
            self.coded.centre_on(flight.total.cores)

    @torch.no_grad()
    def land(self) -> None:
        """Wait for the average in flight and keep what :meth:`merge` needs of it; the model is not touched."""
        flight = self._in_flight
        if flight is None or flight.handle is None:
            return
        self._arrive(flight, flight.handle)
        flight.handle = None
        if self.coded is not None and not flight.is_coded:  # sent in full, so it is common to all workers
            self.coded.centre_on([core / self.weights.total for core in flight.total.cores])
        if self.anchor is not None or self.pull_back:
            flight.drift = self._land_on_anchor(flight)
            return
        drift = _Drift()
        for segment, local in zip(flight.total.segments, flight.snapshot.segments, strict=True):
            divisor = self._divisor(flight, segment)
            drift.norms.append(segment.flat.dot(segment.flat) / divisor**2)
            negated_delta_(segment.flat, local.flat, divisor)
            drift.distances.append(segment.flat.dot(segment.flat))
        flight.drift = drift

    def _land_on_anchor(self, flight: _InFlight) -> _Drift:
        drift = _Drift()
        for segment, local in zip(flight.total.segments, flight.snapshot.segments, strict=True):
            mean = mean_(segment.flat, self._divisor(flight, segment))
            drift.norms.append(mean.dot(mean))
            drift.distances.append((local.flat - mean).square_().sum())
        if self.anchor is not None:
            self.anchor.follow_(flight.total.cores)
        for point, snapshot in zip(flight.total.cores, flight.snapshot.cores, strict=True):
            pulled_offset_(point, snapshot, self.pull_back)
        return drift

    @torch.no_grad()
    def equalise(self) -> None:
        """x <- the mean of all workers' models now, buffers too, blocking."""
        self.launch_exact()
        self.adopt_exact()

    def launch_exact(self) -> None:
        """The first half of :meth:`equalise`: start the mean, in full."""
        assert self._in_flight is None, "merge or adopt what is in flight first"
        self._pair = None  # room for the larger payload: two flat copies at a time are enough
        self.launch(with_buffers=True, exact=True)

    def adopt_exact(self) -> None:
        """The second half: wait for it, and take it."""
        self.adopt()
        self._pair = None

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Hold the mean of all workers' models, buffers too; afterwards the local state is back bit for bit."""
        with self.holding(self.launch_mean()):
            yield

    @torch.no_grad()
    def launch_mean(self) -> MeanInFlight:
        """The first half of :meth:`averaged`: start the mean of all workers' models now."""
        if self.coded is not None:
            self.land()  # its mean begins at the common one, which is about to be replaced
        if self.comm.size == 1 and self.node is None:
            return MeanInFlight()
        total = FlatCopy(self.parameters, self._floating_buffers())
        total.load()
        for buffer in total.buffers:
            buffer.mul_(self.weights.factor)
        if self.node is not None:
            self.node.average_([segment.flat for segment in total.segments if segment.is_extra])
        # Not counted in the traffic: this is evaluation, and training time is what the counters explain.
        return MeanInFlight(total, self.comm.launch(total.buffers))

    @contextmanager
    def holding(self, flight: MeanInFlight) -> Iterator[None]:
        """The second half: hold the mean; afterwards the local state is back bit for bit."""
        with torch.no_grad():
            others = [buffer for buffer in self.buffers() if not buffer.is_floating_point()]
            kept_others = [buffer.clone() for buffer in others]
            local = FlatCopy(self.parameters, self._floating_buffers())
            local.load()
            self._take_mean(flight)
        try:
            yield
        finally:
            with torch.no_grad():
                local.store()
                for buffer, kept in zip(others, kept_others, strict=True):
                    buffer.copy_(kept)

    def _take_mean(self, flight: MeanInFlight) -> None:
        # Nobody refers to it any more afterwards, so that its memory is free again while somebody evaluates.
        mean, handle = flight.total, flight.handle
        flight.total = flight.handle = None
        if mean is None or handle is None:
            return
        handle.wait()
        for buffer in mean.buffers:
            mean_(buffer, self.weights.total)
        mean.store()
        if self.coded is not None:
            self.coded.centre_on(mean.cores)

    def average_(self, flats: Sequence[Tensor]) -> None:
        """Every flat tensor <- its weighted mean over all workers, blocking."""
        if flats:
            for flat in flats:
                flat.mul_(self.weights.factor)
            self.comm.launch(flats).wait()
            for flat in flats:
                mean_(flat, self.weights.total)

    def time_transfer(self, *, with_buffers: bool = False) -> float:
        """Seconds that nothing of the size of a round's payload takes to be summed, from here on."""
        if self.comm.size == 1 or not self.parameters:
            return 0.0
        extras = self._floating_buffers() if with_buffers else []
        if with_buffers and self.optimizer_tensors is not None:
            extras += self.optimizer_tensors()
        flat = FlatCopy(self.parameters, extras)
        payload = [torch.zeros_like(buffer) for buffer in flat.buffers]
        if self.coded is not None:  # a coded exchange sends as much as a ring that sums its bytes
            sizes = [coded_bytes(self.coded.name, core.numel(), self.comm.size) for core in flat.cores]
            payload = [c.new_zeros(math.ceil(n / c.element_size())) for c, n in zip(flat.cores, sizes, strict=True)]
            payload += [torch.zeros_like(tail) for tail in flat.tails]
        wait_for_device()
        begin = time.perf_counter()
        self.comm.launch(payload).wait()
        wait_for_device()
        return time.perf_counter() - begin

    def poll(self) -> None:
        """Note in passing whether the average in flight has arrived."""
        if self._in_flight is not None and self._in_flight.handle is not None:
            self._in_flight.handle.poll()

    # ---- the state between two steps

    def in_flight_state(self) -> list[Tensor] | None:
        """x_t - mean_t of the average in flight, waited for; None if there is none."""
        self.land()
        return None if self._in_flight is None else self._in_flight.total.clone_buffers()

    def load_in_flight_state(self, state: list[Tensor] | None) -> None:
        """Replace what is in flight by a saved average."""
        if state is None or self.comm.size == 1:
            self.land()
            self._in_flight = None
            return
        # Checked on a copy of its own, so that a wrong state leaves everything as it was.
        loaded = FlatCopy(self.parameters)
        loaded.fill(state)
        self.land()
        self._pair = FlatCopy(self.parameters), loaded
        self._in_flight = _InFlight(*self._pair, handle=None)

    def payload_state(self) -> dict[str, Any]:
        """What coded averages go on from; whatever is in flight has landed."""
        if self.coded is None:
            return {"name": "fp32"}
        return {**self.coded.state(), "is_in_flight": self._in_flight is not None and self._in_flight.is_coded}

    def check_payload_state(self, state: dict[str, Any] | None) -> None:
        """Refuse what :meth:`load_payload_state` could not load, before anything is changed."""
        attached = "fp32" if self.coded is None else self.coded.name
        if state is not None and state["name"] != attached:
            raise ValueError(
                f"the state was saved with payload={state['name']}, attached is {attached}; attach with the same"
            )
        if state is not None and self.coded is not None:
            self.coded.check_state(state, FlatCopy(self.parameters).cores)

    def load_payload_state(self, state: dict[str, Any] | None) -> None:
        """After what is in flight has been loaded. None: of a run with other workers, so the next mean is sent in full."""
        if self.coded is not None:
            self.coded.load(state, FlatCopy(self.parameters).cores)
            if self._in_flight is not None and state is not None:
                self._in_flight.is_coded = state["is_in_flight"]

    def anchor_state(self) -> dict[str, Any]:
        """What merges go on from; whatever is in flight has landed."""
        return {"pull_back": self.pull_back, "anchor": None if self.anchor is None else self.anchor.state()}

    def check_anchor_state(self, state: dict[str, Any] | None) -> None:
        """Refuse what :meth:`load_anchor_state` could not load, before anything is changed."""
        if state is None:
            return
        anchor = state["anchor"]
        saved = state["pull_back"], 0.0 if anchor is None else anchor["momentum"]
        attached = self.pull_back, 0.0 if self.anchor is None else self.anchor.momentum
        if saved != attached:
            raise ValueError(
                f"the state was saved with pull_back={saved[0]:g} and outer_momentum={saved[1]:g}, "
                f"attached are {attached[0]:g} and {attached[1]:g}; attach with the same"
            )
        if self.anchor is not None:
            self.anchor.check_state(anchor, FlatCopy(self.parameters).cores)

    def load_anchor_state(self, state: dict[str, Any] | None) -> None:
        """None: of a run with other workers."""
        if self.anchor is not None:
            self.anchor.load(None if state is None else state["anchor"], FlatCopy(self.parameters).cores)

    def ask_all(self) -> None:
        """Ask all workers now, blocking; for algorithms whose rounds send no models."""
        ballot = self._ballot(self.parameters[0].device if self.parameters else torch.device("cpu"))
        if ballot is not None:
            if self.everyone.size > 1:
                # A question is no payload: never slowed down, and no bytes; but the time it blocks is counted.
                self.traffic.wait_for([self.everyone.launch([ballot])])
            self._count(ballot)

    # ---- details

    def _count_bytes(self, flight: _InFlight) -> None:
        """When an average is taken in, not when it arrives: a state saved in between must not change a count."""
        self.traffic.num_bytes += self.comm.sent_bytes(flight.total.tails if flight.is_coded else flight.total.buffers)
        if flight.is_coded and self.coded is not None:
            self.traffic.num_bytes += self.coded.sent_bytes(self.comm)

    def _arrive(self, flight: _InFlight, handle: Handle) -> None:
        self.traffic.wait_for([*flight.beside, handle])
        if flight.ballot is not None:
            self._count(flight.ballot)
        if flight.is_coded and self.coded is not None:
            self.coded.take(flight.total.cores)

    def _divisor(self, flight: _InFlight, segment: Segment) -> float:
        """What turns ``total`` into the mean."""
        return 1.0 if flight.is_coded and not segment.is_extra else self.weights.total

    def _ballot(self, device: torch.device) -> Tensor | None:
        if self.wishes is None:
            return None
        return torch.tensor([self.wishes.stop, self.wishes.save], dtype=torch.float32, device=device)

    def _count(self, ballot: Tensor) -> None:
        stop, save = (ballot > 0).tolist()
        self.agreed.stop = self.agreed.stop or stop
        self.agreed.save = self.agreed.save or save
        if save and self.wishes is not None:
            self.wishes.save = False

    def _floating_buffers(self) -> list[Tensor]:
        return [buffer for buffer in self.buffers() if buffer.is_floating_point()]

    def _extras(self) -> list[Tensor]:
        return self._floating_buffers() + (self._agreed_optimizer_tensors() if self.optimizer_tensors is not None else [])

    def _agreed_optimizer_tensors(self) -> list[Tensor]:
        """Optimizer state, after all workers have found that theirs is alike; else it would be mixed up in silence."""
        assert self.optimizer_tensors is not None
        tensors = self.optimizer_tensors()
        if self.everyone.size > 1:
            shapes = repr([tuple(tensor.shape) for tensor in tensors]).encode()
            mark = int.from_bytes(hashlib.blake2b(shapes, digest_size=2).digest(), "big") + 1
            sums = torch.tensor([mark, mark * mark], dtype=torch.float64)
            sums = sums.to(self.parameters[0].device)
            self.traffic.wait_for([self.everyone.launch([sums])])
            first, second = sums.tolist()
            if self.everyone.size * second != first * first:  # equal only if all marks are
                raise RuntimeError(UNLIKE_STATES)
        return tensors

    def _flat_pair(self, extras: list[Tensor]) -> tuple[FlatCopy, FlatCopy]:
        wanted = [*self.parameters, *extras]
        if self._pair is not None:
            held = self._pair[0].sources
            if len(held) == len(wanted) and all(a is b for a, b in zip(held, wanted, strict=True)):
                return self._pair
            self._pair = None
        self._pair = FlatCopy(self.parameters, extras), FlatCopy(self.parameters, extras)
        return self._pair
