"""The contract between an algorithm and whatever drives it (DDP hooks, an engine, a simulator).

A driver calls, for one worker:

    method = algorithm.bind(replica)      # a copy with state of its own; the user's object is never changed
    method.start(equal)                   # equal: all workers begin with the same parameters
    repeat:
        method.reduce(bucket)             # only if ``reduces_gradients``: for each bucket of a backward,
        method.complete(buckets)          # and once when all of them are there
        (optimizer step)
        at a round end:
            method.launch()               # take in what was started one round ago, start what must travel now
            method.land()                 # complete what must be complete before the next step
        inside a round, where a part of the payload has its turn (``RoundClock.parts_due``, if ``fragments`` > 1):
            method.launch_part(part)
    method.drain()                        # merge or drop what is still in flight

Launch and land are separate calls so that a driver of several workers can launch all before landing any. An
algorithm sees tensors and a :class:`~cocod_accel.averaging.replica.Replica`, never DDP.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from cocod_accel.algorithms.rounds import Period, PeriodLike
from cocod_accel.averaging.replica import Replica
from cocod_accel.averaging.rules import check_share


@dataclass(frozen=True)
class Bucket:
    """Some of a backward's gradients: a flat tensor, and the views of it that belong to each parameter."""

    flat: Tensor
    gradients: list[Tensor]
    parameters: list[Tensor]


class Algorithm:
    """Base of all algorithms: plain local training with rounds in which nothing happens."""

    name: ClassVar[str]
    #: False: gradients stay on the worker, and no backward or forward enters a collective.
    reduces_gradients: ClassVar[bool] = False
    #: False: each worker passes a period of its own.
    same_period: ClassVar[bool] = True
    #: True: weights must be equal.
    needs_equal_weights: ClassVar[bool] = False
    #: Why the optimizer may not be stepped by a GradScaler, in words; empty: it may.
    refuses_scaler: ClassVar[str] = ""
    #: True: floating buffers, and optimizer state that is averaged, travel with the models of a round.
    sends_buffers: ClassVar[bool] = False
    #: What may become of momentum and other optimizer state when a model is merged.
    optimizer_policies: ClassVar[tuple[str, ...]] = ("keep", "reset")
    #: How models may travel in rounds.
    payloads: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "int8")

    replica: Replica
    #: Parts that a payload is sent in, one after the other in a round.
    fragments: int = 1
    #: The alpha that pulls a merged model back towards the mean.
    pull_back: float = 0.0

    def __init__(
        self, period: PeriodLike, *, optimizer_state: str = "keep", payload: str = "fp32", outer_momentum: float = 0.0
    ) -> None:
        self.period = Period.parse(period)
        if optimizer_state not in self.optimizer_policies:
            rule = f"is not for {type(self).__name__}; choose from {', '.join(self.optimizer_policies)}"
            raise ValueError(f"optimizer_state={optimizer_state!r} {rule}")
        if payload not in self.payloads:
            rule = f"is not for {type(self).__name__}; choose from {', '.join(self.payloads)}"
            raise ValueError(f"payload={payload!r} {rule}")
        self.optimizer_state = optimizer_state
        self.payload = payload
        #: The beta with which the means are followed, instead of adopted.
        self.outer_momentum = check_share("outer_momentum", outer_momentum)
        self.refuse_with("outer_momentum", self.outer_momentum, payload != "fp32", 'payload="fp32"')

    def __repr__(self) -> str:
        options = {
            "optimizer_state": (self.optimizer_state, "keep"),
            "payload": (self.payload, "fp32"),
            "fragments": (self.fragments, 1),
            "pull_back": (self.pull_back, 0.0),
            "outer_momentum": (self.outer_momentum, 0.0),
        }
        stated = "".join(f", {name}={value!r}" for name, (value, usual) in options.items() if value != usual)
        return f"{type(self).__name__}(period={self.period}{stated})"

    @staticmethod
    def refuse_with(name: str, value: float, clashes: bool, fix: str) -> None:
        """Two options that do not go together."""
        if value and clashes:
            raise ValueError(f"{name}={value:g} goes with {fix} only; change one of them")

    def bind(self, replica: Replica) -> Self:
        """A copy of this algorithm that works on ``replica``."""
        bound = copy.copy(self)
        bound.replica = replica
        return bound

    def start(self, equal: bool) -> None:
        """Training begins; ``equal`` tells whether all workers hold the same parameters."""
        self.replica.begin(equal)

    def launch(self) -> None:
        """A round has ended: take in what was started one round ago, start what must travel now."""

    def launch_part(self, part: int) -> None:
        """It is the turn of a part inside a round: take in what was started of it one round ago, start it anew."""

    def land(self) -> None:
        """Complete what must be complete before the next step."""

    def drain(self) -> None:
        """Merge or drop what is in flight, because the run stops here for a while."""

    def reduce(self, bucket: Bucket) -> None:
        """One more bucket of this backward is ready; its tensors belong to the algorithm until :meth:`complete`."""

    def complete(self, buckets: list[Bucket]) -> None:
        """All buckets of this backward are ready: on return each holds what the optimizer is to use."""

    def backward_begins(self, standing: bool, bare: bool) -> None:
        """``standing``: gradients will be added to those of an earlier backward. ``bare``: no bucket will carry them."""

    def backward_ends(self, bare: bool) -> None:
        """Gradients have been accumulated; a driver without buckets has nothing else to say."""

    def after_buckets(self) -> None:
        """The gradients of all buckets are in ``.grad``, except where DDP found a parameter unused by every worker."""

    def poll(self) -> None:
        """Note in passing whether what is in flight has arrived."""
        self.replica.poll()

    def state(self) -> Any:
        """What is in flight, waited for but not merged; None if nothing is."""
        return self.replica.in_flight_state()

    def load_state(self, state: Any) -> None:
        """Replace what is in flight."""
        self.replica.load_in_flight_state(state)
