"""Coded means of gradients: the rules of :mod:`cocod_accel.averaging.coder` with c = 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cocod_accel.averaging.coder import Coder, launch_coded
from cocod_accel.averaging.flat import FlatCopy, as_real
from cocod_accel.averaging.header import Arrivals, Header, Kind
from cocod_accel.averaging.route import Route
from cocod_accel.comm.handles import Handle, ring_total


@torch.no_grad()
def fill(flat: FlatCopy, gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Copy gradients by parameter; zeros where there is none. Returns those that ``flat`` has a place for."""
    ours = {p: as_real(g) for p, g in gradients.items() if p in flat.views}
    for parameter in flat.views:
        if parameter not in ours:
            flat.views[parameter].zero_()
    if ours:
        torch._foreach_copy_([flat.views[parameter] for parameter in ours], list(ours.values()))
    return ours


class GradientCoder:
    """One worker's coded mean gradients, of which one may be under way."""

    def __init__(self, payload: str, parameters: Sequence[Tensor], route: Route, seed: int) -> None:
        self._route, self._header, self._number = route, None, 0
        self._arrivals = Arrivals()
        like = FlatCopy(parameters)
        self._coders = [
            Coder(payload, core, route.comm, sizes=sizes, seed=(seed, index))
            for index, (core, sizes) in enumerate(zip(like.cores, like.core_sizes, strict=True))
        ]

    _header: Header | None

    @property
    def num_bytes(self) -> int:
        """What this worker sends for one mean."""
        return ring_total(sum(coder.num_bytes for coder in self._coders), self._route.comm.size)

    def launch(self, flat: FlatCopy) -> Handle:
        """Start the mean of what all workers hold in ``flat``, which is only read."""
        self._number += 1
        weights = self._route.weights
        self._header = Header(Kind.GRADIENT, self._number, weights.factors, weights.rank)
        nothing: list[Tensor | None] = [None] * len(self._coders)
        return launch_coded(self._coders, flat.cores, nothing, self._route.comm, self._header, weights.total)

    @torch.no_grad()
    def decode(self, flat: FlatCopy) -> None:
        """``flat`` <- the mean that has been waited for."""
        assert self._header is not None
        self._arrivals.check(self._header.read_rows, [rows for coder in self._coders for rows in coder.headers])
        for coder, core in zip(self._coders, flat.cores, strict=True):
            coder.decode(None, core)

    def settle(self) -> None:
        """The run stops here for a while: all that has arrived has been checked."""
        self._arrivals.settle()

    def state(self) -> dict[str, Any]:
        self.settle()
        return {
            "number": self._number,
            "residuals": [coder.residual for coder in self._coders],
            "owned_residuals": [coder.owned_residual for coder in self._coders],
        }

    def load(self, state: dict[str, Any] | None) -> None:
        """None: the state of a run with other workers."""
        self._number = 0 if state is None else state["number"]
        for index, coder in enumerate(self._coders):
            coder.clear()
            if state is not None:
                coder.residual.copy_(state["residuals"][index])
                coder.owned_residual.copy_(state["owned_residuals"][index])
