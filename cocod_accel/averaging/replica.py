"""One worker's model: its parts, what travels beside them, and exact means of all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cocod_accel.averaging.drift import Drift, DriftHistory
from cocod_accel.averaging.evaluation import Evaluation
from cocod_accel.averaging.flat import balanced_cuts, floating, whole_size
from cocod_accel.averaging.header import Kind
from cocod_accel.averaging.part import Part
from cocod_accel.averaging.polls import Ballot
from cocod_accel.averaging.route import Route
from cocod_accel.averaging.rules import Rule

#: Error message for optimizer states that cannot be averaged.
UNLIKE_STATES = (
    "workers hold different optimizer states, because some have had no gradient for a parameter yet; "
    'use optimizer_state="keep"'
)


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
        sizes = [whole_size(parameter) for parameter in self.parameters]
        cuts = balanced_cuts(sizes, num_parts) if num_parts > 1 else [slice(None)]
        #: What makes a part.
        self._new_part = Part if route.rounds is None else route.rounds.part
        self.parts = [self._new_part(self.parameters[these], route, rule=rule, codec=codec) for these in cuts]
        #: The optimizer state of some parameters, averaged by value with them, except for evaluation; None: it stays local.
        self.optimizer_tensors: Callable[[Sequence[Tensor]], list[Tensor]] | None = None
        self._exact: Part | None = None
        self._drifts = DriftHistory()
        #: The mean to evaluate with.
        evaluation = Evaluation if route.rounds is None else route.rounds.evaluation
        self.evaluation = evaluation(self.parameters, buffers, self.parts, route)
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
        if self.parts[part].merge():
            self._note_drift(part)

    def adopt(self, part: int = 0) -> None:
        """x <- mean_t, or what else the rule says, if an average of this part is in flight."""
        if self.parts[part].adopt():
            self._note_drift(part)

    def begin(self, *, equal: bool) -> None:
        """Training begins; ``equal``: all workers hold the same parameters."""
        for part in self.parts:
            part.begin(equal=equal)

    def settle(self) -> None:
        """Take in whatever is in flight, because the run stops here for a while."""
        for index, part in enumerate(self.parts):
            if part.settle():
                self._note_drift(index)

    def poll(self) -> None:
        """Note in passing whether averages in flight have arrived."""
        for part in self.parts:
            part.poll()

    def vote_with(self, ballot: Ballot) -> None:
        """From now on votes travel with the first part."""
        self.parts[0].polls.ballot = ballot

    @property
    def drift(self) -> float:
        """||x_t - mean_t|| / ||mean_t|| at the last merge of each part; 0 before it."""
        return self._drift.ratio

    @property
    def drifts(self) -> DriftHistory:
        """Of all merges so far."""
        return self._drifts

    @property
    def _drift(self) -> Drift:
        return Drift.sum_of([part.drift for part in self.parts])

    def _note_drift(self, part: int) -> None:
        """Once a round, when its last part has been merged."""
        if part == len(self.parts) - 1:
            self._drifts.add(self._drift)

    # ---- the exact mean

    def equalise(self) -> None:
        """x <- the mean of all workers' models now, buffers too, blocking. Nothing may be in flight."""
        self.launch_exact()
        self.adopt_exact()

    def launch_exact(self) -> None:
        """The first half of :meth:`equalise`: start the mean, in full."""
        self._exact = self._new_part(self.parameters, self.route, kind=Kind.FINISH)
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
            for part in self.parts:
                part.set_common(mean.views)

    # ---- the state between two steps

    def state(self, *, copies: bool = True) -> dict[str, Any]:
        """Waits for what is in flight; starts no collective. Without ``copies`` it holds only until the next step."""
        parts = [part.state(copies=copies) for part in self.parts]
        return {"parts": parts, "drifts": self._drifts.state()}

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse what :meth:`load_state` could not load, before anything is changed."""
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.check_state(saved)

    def load_state(self, state: dict[str, Any] | None) -> None:
        """None: the state of a run with other workers."""
        self._drifts.load(None if state is None else state.get("drifts"))
        for index, part in enumerate(self.parts):
            part.load(None if state is None else state["parts"][index])

    def extras_unasked(self, *, with_buffers: bool) -> list[Tensor]:
        """What travels with a whole model, whatever other workers hold."""
        if not with_buffers:
            return []
        state = [] if self.optimizer_tensors is None else self.optimizer_tensors(self.parameters)
        return floating(self.buffers()) + state

    # ---- details

    def _extras(self, parameters: Sequence[Tensor], *, with_buffers: bool) -> list[Tensor]:
        buffers = floating(self.buffers()) if with_buffers else []
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
