"""The contract between an algorithm and whatever drives it (:mod:`cocod_accel.sync.driver`).

A driver calls, for one worker:

    method = algorithm.bind(replica)      # a copy with state of its own; the user's object is never changed
    method.start(equal)                   # equal: all workers begin with the same parameters
    repeat:
        method.reduce(bucket)             # only if ``reduces_gradients``: for each bucket of a backward;
        method.send(buckets)              # once when all of them are there: start what must travel,
        method.complete(buckets)          # and complete it
        method.step_begins()
        (optimizer step)
        where a part's mean is merged before its next launch (``RoundClock.take_merges``, if there is a ``delay``):
            method.merge(part)
        at a round end:
            method.launch()               # take in what was started one round ago, start what must travel now
            method.land()                 # complete what must be complete before the next step
        inside a round, where a part of the model has its turn (``RoundClock.parts_due``, if ``fragments`` > 1):
            method.launch(part)
            method.land(part)
    method.drain()                        # merge or drop what is still in flight

Launch and land are separate calls so that a driver of several workers can launch all before landing any. An algorithm sees
tensors and a :class:`~cocod_accel.averaging.replica.Replica`, never DDP.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from torch import Tensor
from torch.optim import Optimizer

from cocod_accel.algorithms.rounds import Period, PeriodLike, check_fragments
from cocod_accel.averaging.codecs import check_payload
from cocod_accel.averaging.replica import Replica
from cocod_accel.averaging.route import Route
from cocod_accel.averaging.rules import Outer, Rule, check_outer
from cocod_accel.theory.hiding import AUTO


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
    #: True: gradients go to a server, which holds the model and its optimizer (:mod:`cocod_accel.sync.serve`).
    is_served: ClassVar[bool] = False
    #: False: each worker passes a period of its own.
    same_period: ClassVar[bool] = True
    #: True: weights must be equal.
    needs_equal_weights: ClassVar[bool] = False
    #: Why the optimizer may not be stepped by a GradScaler, in words; empty: it may.
    refuses_scaler: str = ""
    #: True: floating buffers, and optimizer state that is averaged, travel with the models of a round.
    sends_buffers: ClassVar[bool] = False
    #: What may become of momentum and other optimizer state when a model is merged.
    optimizer_policies: ClassVar[tuple[str, ...]] = ("keep", "reset")
    #: Options that must be the same on every worker, beside the period; each is an attribute and an argument.
    options: ClassVar[dict[str, Any]] = {
        "delay": None, "payload": "fp32", "fragments": 1, "own_share": 1.0, "outer": Outer(), "optimizer_state": "keep",
    }  # fmt: skip

    replica: Replica
    #: Steps after which a mean is merged; None: at the end of its round.
    delay: int | None = None
    #: The part of its own steps since a launch that a worker keeps when the mean arrives.
    own_share: float = 1.0
    #: In the place of it: the part of its own parameters that a worker keeps, as in streaming DiLoCo.
    mix: float | None = None

    def __init__(
        self,
        period: PeriodLike | Literal["auto"],
        *,
        payload: str = "fp32",
        fragments: int = 1,
        outer: Outer | None = None,
        optimizer_state: str = "keep",
    ) -> None:
        #: Whether the period is chosen from measured times; until then rounds are as short as they can be.
        self.auto_period = isinstance(period, str) and period == AUTO
        if self.auto_period and not self.same_period:
            raise ValueError(f'period="auto" is not for {type(self).__name__}, which takes one per worker; use LocalSGD')
        is_count = isinstance(fragments, int) and not isinstance(fragments, bool)
        least = max(1, fragments) if is_count else 1
        self.period = Period.parse(least if period == "auto" else period)
        self._check_choice("optimizer_state", optimizer_state, self.optimizer_policies)
        self.optimizer_state = optimizer_state
        #: How parameters, or gradients, are written on the wire.
        self.payload = check_payload(payload, gradients=self.reduces_gradients or self.is_served)
        #: Parts that a model is sent in, one after the other in a round.
        self.fragments = check_fragments(fragments, self.period)
        #: What moves the point that all workers share.
        self.outer = check_outer(outer)

    def _check_choice(self, name: str, value: str, choices: tuple[str, ...]) -> None:
        if value not in choices:
            known = ", ".join(choices)
            raise ValueError(f"{name}={value!r} is not supported by {type(self).__name__}; choose from {known}")

    def __repr__(self) -> str:
        stated = "".join(f", {name}={value!r}" for name, value in self.stated_options().items())
        return f"{type(self).__name__}(period={self.stated_period}{stated})"

    @property
    def stated_period(self) -> str:
        """The period in words, as it was asked for."""
        return AUTO if self.auto_period else str(self.period)

    def stated_options(self) -> dict[str, Any]:
        """The options that are not at their defaults."""
        return {name: getattr(self, name) for name, usual in self.options.items() if getattr(self, name) != usual}

    # ---- what a driver calls

    def replica_of(
        self,
        parameters: Sequence[Tensor],
        buffers: Callable[[], list[Tensor]],
        route: Route,
        optimizers: Sequence[Optimizer],
    ) -> Replica:
        """One worker's model, averaged in the way that this algorithm asks for."""
        rule = Rule(self.outer, self.own_share, self.mix)
        codec = "fp32" if self.reduces_gradients else self.payload
        replica = Replica(parameters, buffers, route, rule=rule, codec=codec, num_parts=self.fragments)
        if self.optimizer_state == "average":
            replica.optimizer_tensors = lambda those: state_tensors(optimizers, those)
        return replica

    def bind(self, replica: Replica) -> Self:
        """A copy of this algorithm that works on ``replica``."""
        bound = copy.copy(self)
        bound.replica = replica
        return bound

    def start(self, equal: bool) -> None:
        """Training begins; ``equal`` tells whether all workers hold the same parameters."""
        self.replica.begin(equal=equal)

    def launch(self, part: int = 0) -> None:
        """A round has ended (part 0), or it is the turn of a later part inside a round: start what must travel now.

        What was started of this part one round ago is taken in first. An algorithm without fragments may take no argument.
        """

    def land(self, part: int = 0) -> None:
        """Complete what must be complete before the next step."""

    def merge(self, part: int) -> None:
        """Take in the mean of a part inside its round, if there is a ``delay``."""
        self.replica.merge(part)

    def drain(self) -> None:
        """Merge or drop what is in flight, because the run stops here for a while."""
        self.replica.settle()

    def step_begins(self) -> None:
        """The optimizer is about to step; gradients have been clipped, and will not change any more."""

    def reduce(self, bucket: Bucket) -> None:
        """One more bucket of this backward is ready; its tensors belong to the algorithm until :meth:`complete`."""

    def send(self, buckets: list[Bucket]) -> None:
        """All buckets of this backward are ready: start what has not been started."""

    def complete(self, buckets: list[Bucket]) -> None:
        """All buckets of this backward are ready: on return each holds what the optimizer is to use."""

    def backward_begins(self, accumulating: bool, without_ddp: bool) -> None:
        """``accumulating``: gradients will be added to those of an earlier backward.

        ``without_ddp``: no bucket will carry them.
        """

    def backward_ends(self, without_ddp: bool) -> None:
        """Gradients have been accumulated; a driver without buckets has nothing else to say."""

    def backward_dropped(self) -> None:
        """The last backward was for the sake of another model, and its gradients are gone: as if it had not been."""

    def after_buckets(self) -> None:
        """The gradients of all buckets are in ``.grad``, except where DDP found a parameter unused by every worker."""

    def wait(self) -> None:
        """Training stops for a while that is not counted: wait for what must not go on for free; change nothing."""

    def leave(self) -> None:
        """No step follows, on purpose: nothing has failed."""

    def poll(self) -> None:
        """Note in passing whether what is in flight has arrived."""
        self.replica.poll()

    def own_stats(self) -> dict[str, Any]:
        """More for :meth:`Sync.stats`."""
        return {}

    def state(self) -> Any:
        """What a resumed run needs beside the replica's own state; tensors of it are copied by whoever keeps them."""
        return None

    def load_state(self, state: Any) -> None:
        """Go on from :meth:`state`; None: nothing was in flight."""


def check_seed(seed: object) -> int:
    """Of codecs that round at random."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed={seed!r} is not an int; use e.g. seed=0")
    return seed


def state_tensors(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Optimizer state of these parameters' shapes: momentum, second moments; not step counters."""
    wanted = {id(parameter) for parameter in parameters}
    return [
        value
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in wanted
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if key != "step" and isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape
    ]
