"""The mean of all workers' models to evaluate with. It touches nothing that training goes on from.

It is not counted either: traffic explains training time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from cocod_accel.averaging.flat import FlatCopy, as_real, floating, in_pieces, payload_dtype
from cocod_accel.averaging.header import SUM_SIZE, Header, Kind
from cocod_accel.averaging.part import Part
from cocod_accel.averaging.route import Route
from cocod_accel.averaging.weights import mean_
from cocod_accel.comm.handles import Handle

# What a mean takes beside the model, and what one collective of it sends: a sixteenth of the model, within these bounds.
_LEAST_BYTES, _MOST_BYTES = 4 << 20, 64 << 20
_NUM_PIECES = 16


def _piece_bytes(parameters: Sequence[Tensor]) -> int:
    total = sum(real.numel() * payload_dtype(real.dtype).itemsize for real in map(as_real, parameters))
    return max(_LEAST_BYTES, min(total // _NUM_PIECES, _MOST_BYTES))


@dataclass
class MeanInFlight:
    """A mean on its way; empty where a worker is alone, or once it has been taken."""

    total: FlatCopy | None = None
    handle: Handle | None = None
    header: Header | None = None


class Evaluation:
    """Puts the mean in the place of one worker's model, and the model back. ``parts``: those that are trained."""

    def __init__(
        self, parameters: Sequence[Tensor], buffers: Callable[[], list[Tensor]], parts: Sequence[Part], route: Route
    ) -> None:
        self._parameters, self._buffers, self._parts, self._route = parameters, buffers, parts, route
        self._number = 0

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Hold the mean of all workers' models, buffers too; afterwards the local state is back bit for bit.

        Piece by piece, so that no more than one piece is needed beside the local state, which lies where rounds keep x_t.
        """
        with torch.no_grad():
            for part in self._parts:
                part.keep_local()
            buffers = self._buffers()
            kept_buffers = [buffer.clone() for buffer in buffers]
        try:
            with torch.no_grad():
                if not self._is_alone:
                    self._average_in_pieces()
            yield
        finally:
            with torch.no_grad():
                for part in self._parts:
                    part.restore_local()
                for buffer, value in zip(buffers, kept_buffers, strict=True):
                    buffer.copy_(value)

    @torch.no_grad()
    def launch(self) -> MeanInFlight:
        """The first half of :meth:`averaged`, in one piece: start the mean of all workers' models now."""
        if self._is_alone:
            return MeanInFlight()
        self._number += 1
        return self._launch(self._parameters, floating(self._buffers()))

    @contextmanager
    def with_mean(self, flight: MeanInFlight) -> Iterator[None]:
        """The second half: hold the mean; afterwards the local state is back bit for bit."""
        with torch.no_grad():
            others = [buffer for buffer in self._buffers() if not buffer.is_floating_point()]
            kept_others = [buffer.clone() for buffer in others]
            local = FlatCopy(self._parameters, floating(self._buffers()))
            local.load()
            self._take(flight)
        try:
            yield
        finally:
            with torch.no_grad():
                local.store()
                for buffer, kept in zip(others, kept_others, strict=True):
                    buffer.copy_(kept)

    # ---- details

    @property
    def _is_alone(self) -> bool:
        return self._route.is_alone and self._route.node is None

    def _average_in_pieces(self) -> None:
        self._number += 1
        pieces, buffers = in_pieces(self._parameters, _piece_bytes(self._parameters)), floating(self._buffers())
        for number, piece in enumerate(pieces, start=1):
            self._take(self._launch(piece, buffers if number == len(pieces) else ()))

    def _launch(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> MeanInFlight:
        node, weights = self._route.node, self._route.weights
        total = FlatCopy(parameters, buffers, header_size=SUM_SIZE)
        if total.header is None:
            return MeanInFlight()
        total.load()
        for payload in total.payloads:
            payload.mul_(weights.factor)
        if node is not None:
            node.average_([segment.flat for segment in total.segments if segment.is_extra])
        header = Header(Kind.EVALUATION, self._number, weights.factors, weights.rank)
        header.write(total.header)
        return MeanInFlight(total, self._route.comm.launch(total.buffers), header)

    def _take(self, flight: MeanInFlight) -> None:
        # Nobody refers to it any more afterwards, so that its memory is free again while somebody evaluates.
        mean, handle, header = flight.total, flight.handle, flight.header
        flight.total = flight.handle = flight.header = None
        if mean is None or handle is None or header is None:
            return
        handle.wait()
        assert mean.header is not None
        header.read(mean.header)
        for payload in mean.payloads:
            mean_(payload, self._route.weights.total)
        mean.store()
