"""One worker's model: its parts, what travels beside them, and exact means of all of it."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cocod_accel.averaging.coder import coded_bytes, time_coding
from cocod_accel.averaging.drift import Drift
from cocod_accel.averaging.flat import FlatCopy, as_real, balanced_cuts, in_pieces
from cocod_accel.averaging.header import SUM_SIZE, Header, Kind
from cocod_accel.averaging.part import Ballot, Part
from cocod_accel.averaging.route import Route
from cocod_accel.averaging.rules import Rule
from cocod_accel.averaging.weights import mean_
from cocod_accel.comm.device import wait_for_device
from cocod_accel.comm.handles import Handle

#: Error message for optimizer states that cannot be averaged.
UNLIKE_STATES = (
    "workers hold different optimizer states, because some have had no gradient for a parameter yet; "
    'use optimizer_state="keep"'
)

# What a mean to evaluate with takes beside the model, and what one collective of it sends.
_PIECE_BYTES = 64 << 20


@dataclass
class MeanInFlight:
    """A mean to evaluate with, on its way; empty where a worker is alone, or once it has been taken."""

    total: FlatCopy | None = None
    handle: Handle | None = None
    header: Header | None = None


class Replica:
    """One worker's model, cut into parts of consecutive whole parameters.

    ``buffers`` is asked anew at every use, because a module may rebind a buffer instead of writing into it.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        buffers: Callable[[], list[Tensor]],
        route: Route,
        *,
        rule: Rule | None = None,
        codec: str = "fp32",
        num_parts: int = 1,
    ) -> None:
        self.parameters = list(parameters)
        self.buffers = buffers
        self.route = route
        sizes = [as_real(parameter).numel() for parameter in self.parameters]
        cuts = balanced_cuts(sizes, num_parts) if num_parts > 1 else [slice(None)]
        self.parts = [Part(self.parameters[these], route, rule=rule, codec=codec) for these in cuts]
        #: The optimizer state of some parameters, averaged by value with them, except for evaluation; None: it stays local.
        self.optimizer_tensors: Callable[[Sequence[Tensor]], list[Tensor]] | None = None
        self._exact: Part | None = None
        self._exact_drift: Drift | None = None
        self._num_evaluations = 0
        self._is_offloaded = False

    def offload(self) -> None:
        """From now on what only the end of a round needs waits in the host's memory. Before training begins."""
        self._is_offloaded = True
        for part in self.parts:
            part.offload()

    # ---- verbs of an algorithm

    def launch(self, part: int = 0, *, with_buffers: bool = False) -> None:
        """Keep x_t of a part and start its average in the background.

        ``with_buffers``: floating buffers travel with the first part, optimizer state that is averaged with its own.
        """
        chosen = self.parts[part]
        chosen.launch(self._extras(chosen.parameters, with_buffers=part == 0) if with_buffers else ())

    def merge(self, part: int = 0) -> None:
        """x <- x + (mean_t - x_t), or what else the rule says, if an average of this part is in flight."""
        self.parts[part].merge()
        self._exact_drift = None

    def adopt(self, part: int = 0) -> None:
        """x <- mean_t, or what else the rule says, if an average of this part is in flight."""
        self.parts[part].adopt()
        self._exact_drift = None

    def begin(self, *, equal: bool) -> None:
        """Training begins; ``equal``: all workers hold the same parameters."""
        for part in self.parts:
            part.begin(equal=equal)

    def settle(self) -> None:
        """Take in whatever is in flight, because the run stops here for a while."""
        for part in self.parts:
            part.settle()

    def poll(self) -> None:
        """Note in passing whether averages in flight have arrived."""
        for part in self.parts:
            part.poll()

    def vote_with(self, ballot: Ballot) -> None:
        """From now on votes travel with the first part."""
        self.parts[0].ballot = ballot

    @property
    def drift(self) -> float:
        """||x_t - mean_t|| / ||mean_t|| at the last merge of each part; 0 before it."""
        return (self._exact_drift or Drift.sum_of([part.drift for part in self.parts])).ratio

    # ---- the exact mean

    def equalise(self) -> None:
        """x <- the mean of all workers' models now, buffers too, blocking. Nothing may be in flight."""
        self.launch_exact()
        self.adopt_exact()

    def launch_exact(self) -> None:
        """The first half of :meth:`equalise`: start the mean, in full."""
        self._exact = Part(self.parameters, self.route, kind=Kind.FINISH)
        if self._is_offloaded:
            self._exact.offload()
        self._exact.launch(self._extras(self.parameters, with_buffers=True))

    def adopt_exact(self) -> None:
        """The second half: wait for it, and take it."""
        exact, self._exact = self._exact, None
        assert exact is not None
        mean = exact.mean_in_flight
        exact.adopt()
        if mean is not None:
            self._exact_drift = exact.drift
            for part in self.parts:
                part.set_common(mean.views)

    # ---- the mean to evaluate with

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Hold the mean of all workers' models, buffers too; afterwards the local state is back bit for bit.

        Piece by piece, so that no more than one piece is needed beside the local state, which lies where rounds keep x_t.
        """
        with torch.no_grad():
            for part in self.parts:
                part.keep_local()
            buffers = self.buffers()
            kept_buffers = [buffer.clone() for buffer in buffers]
        try:
            with torch.no_grad():
                if not self.route.is_alone or self.route.node is not None:
                    self._average_in_pieces()
            yield
        finally:
            with torch.no_grad():
                for part in self.parts:
                    part.restore_local()
                for buffer, value in zip(buffers, kept_buffers, strict=True):
                    buffer.copy_(value)

    def _average_in_pieces(self) -> None:
        self._num_evaluations += 1
        pieces, floating = in_pieces(self.parameters, _PIECE_BYTES), self._floating_buffers()
        for number, piece in enumerate(pieces, start=1):
            self._take_mean(self._launch_mean(piece, floating if number == len(pieces) else ()))

    @torch.no_grad()
    def launch_mean(self) -> MeanInFlight:
        """The first half of :meth:`averaged` in one piece: start the mean of all workers' models now."""
        if self.route.is_alone and self.route.node is None:
            return MeanInFlight()
        self._num_evaluations += 1
        return self._launch_mean(self.parameters, self._floating_buffers())

    def _launch_mean(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> MeanInFlight:
        """It touches nothing that training goes on from, and is not counted: traffic explains training time."""
        node, weights = self.route.node, self.route.weights
        total = FlatCopy(parameters, buffers, header_size=SUM_SIZE)
        if total.header is None:
            return MeanInFlight()
        total.load()
        for payload in total.payloads:
            payload.mul_(weights.factor)
        if node is not None:
            node.average_([segment.flat for segment in total.segments if segment.is_extra])
        header = Header(Kind.EVALUATION, self._num_evaluations, weights.factors, weights.rank)
        header.write(total.header)
        return MeanInFlight(total, self.route.comm.launch(total.buffers), header)

    @contextmanager
    def with_mean(self, flight: MeanInFlight) -> Iterator[None]:
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
        mean, handle, header = flight.total, flight.handle, flight.header
        flight.total = flight.handle = flight.header = None
        if mean is None or handle is None or header is None:
            return
        handle.wait()
        assert mean.header is not None
        header.read(mean.header)
        for payload in mean.payloads:
            mean_(payload, self.route.weights.total)
        mean.store()

    # ---- how long a transfer takes

    def time_transfer(self, codec: str, *, with_buffers: bool = False) -> float:
        """Seconds that zeros of the size of a round's payload take to be summed, from here on."""
        comm = self.route.comm
        if self.route.is_alone or not self.parameters:
            return 0.0
        extras = self._floating_buffers() if with_buffers else []
        if with_buffers and self.optimizer_tensors is not None:
            extras += self.optimizer_tensors(self.parameters)
        flat = FlatCopy(self.parameters, extras)
        payload = [torch.zeros_like(buffer) for buffer in flat.buffers]
        if codec != "fp32":  # a coded exchange sends as much as a ring that sums its bytes
            sizes = [coded_bytes(codec, core.numel(), comm.size, comm.num_shards) for core in flat.cores]
            payload = [c.new_zeros(math.ceil(n / c.element_size())) for c, n in zip(flat.cores, sizes, strict=True)]
            payload += [torch.zeros_like(tail) for tail in flat.tails]
        device = self.parameters[0].device
        wait_for_device(device)
        begin = time.perf_counter()
        comm.launch(payload).wait()
        wait_for_device(device)
        return time.perf_counter() - begin

    def time_coding(self, codec: str) -> float:
        """Seconds that the main thread takes to code a round's payload; sends nothing."""
        if codec == "fp32" or self.route.is_alone or not self.parameters:
            return 0.0
        total = 0.0
        for core in FlatCopy(self.parameters).cores:
            # A generator of its own: a run must not draw other numbers because something was timed.
            core.normal_(generator=torch.Generator(core.device).manual_seed(0))
            total += time_coding(codec, core, self.route.comm)
        return total

    # ---- the state between two steps

    def state(self, *, copies: bool = True) -> dict[str, Any]:
        """Waits for what is in flight; starts no collective. Without ``copies`` it holds only until the next step."""
        parts = [part.state(copies=copies) for part in self.parts]
        return {"parts": parts, "drift": None if self._exact_drift is None else self._exact_drift.state()}

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse what :meth:`load_state` could not load, before anything is changed."""
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.check_state(saved)

    def load_state(self, state: dict[str, Any] | None) -> None:
        """None: the state of a run with other workers."""
        drift = None if state is None else state["drift"]
        self._exact_drift = None if drift is None else Drift.of_state(drift)
        for index, part in enumerate(self.parts):
            part.load(None if state is None else state["parts"][index])

    # ---- details

    def _floating_buffers(self) -> list[Tensor]:
        return [buffer for buffer in self.buffers() if buffer.is_floating_point()]

    def _extras(self, parameters: Sequence[Tensor], *, with_buffers: bool) -> list[Tensor]:
        buffers = self._floating_buffers() if with_buffers else []
        return buffers if self.optimizer_tensors is None else buffers + self._agreed_optimizer_tensors(parameters)

    def _agreed_optimizer_tensors(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Optimizer state, after all workers have found that theirs is alike; else it would be mixed up in silence."""
        assert self.optimizer_tensors is not None
        tensors, everyone = self.optimizer_tensors(parameters), self.route.everyone
        if everyone.size > 1:
            shapes = repr([tuple(tensor.shape) for tensor in tensors]).encode()
            mark = int.from_bytes(hashlib.blake2b(shapes, digest_size=2).digest(), "big") + 1
            sums = torch.tensor([mark, mark * mark], device=self.parameters[0].device)  # some devices have no float64
            self.route.traffic.wait_for([everyone.launch([sums])])
            first, second = sums.tolist()
            if everyone.size * second != first * first:  # equal only if all marks are
                raise RuntimeError(UNLIKE_STATES)
        return tensors
