"""Attach an algorithm to a training loop that stays as it is.

:func:`attach` checks everything on every worker, agrees with the others in one gather, and returns a :class:`Sync`:
the one object that owns the communication hook, the round clock and the averages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from torch import Tensor
from torch.autograd import Variable
from torch.optim import Optimizer

from cocod_accel.algorithms import SSGD, Algorithm
from cocod_accel.algorithms.rounds import Period, PeriodLike, RoundClock, check_fragments
from cocod_accel.averaging.codecs import CodedMean
from cocod_accel.averaging.replica import Replica, Wishes
from cocod_accel.averaging.rules import Anchor
from cocod_accel.averaging.weights import check_weight
from cocod_accel.comm.agreement import exchange_reports
from cocod_accel.comm.emulated import EmulatedLink, Link
from cocod_accel.comm.groups import Channels, TwoLevelComm
from cocod_accel.comm.handles import Communicator
from cocod_accel.comm.traffic import Traffic
from cocod_accel.sync.ddp import LocalPhase, under_no_sync
from cocod_accel.sync.deepspeed import EngineRouter
from cocod_accel.sync.nodes import Nodes
from cocod_accel.sync.preflight import (
    ATTACHED,
    Report,
    Subject,
    check_weights,
    described,
    raise_problems,
)
from cocod_accel.sync.step_counter import AttemptCounter, is_stepped_by_scaler

_STATE_VERSION = 3
_STATE_KEYS = (
    "algorithm", "attempts", "rounds", "round_start", "in_flight", "payload", "anchor", "drift", "traffic", "nodes",
)  # fmt: skip


@dataclass(frozen=True)
class Stats:
    """What synchronising has cost so far. Also a mapping, so that it can be logged as it is."""

    #: Rounds that have ended.
    rounds: int
    #: What this worker has sent, counted as a ring all-reduce: 2 (N - 1) / N of every payload (int8: scales included).
    #: Where workers share nodes: what it has sent to other nodes, N being the number of nodes and the payload this
    #: worker's share of the model.
    bytes: int
    #: Seconds the main thread was blocked by communication.
    exposed_seconds: float
    #: Seconds communication ran while the main thread computed.
    hidden_seconds: float
    #: ||x_t - mean_t|| / ||mean_t|| at the last merge.
    drift: float

    def keys(self) -> list[str]:
        return list(asdict(self))

    def __getitem__(self, key: str) -> float:
        return asdict(self)[key]  # type: ignore[no-any-return]


class Sync:
    """What :func:`attach` returns. As a context manager it finishes on a clean exit and detaches on any."""

    def __init__(
        self, subject: Subject, algorithm: Algorithm, channels: Channels, nodes: Nodes, reports: Sequence[Report]
    ) -> None:
        self._subject = subject
        self._nodes = nodes
        self._weights = [report.weight for report in reports]
        #: What sums the gradients inside this worker's node; None: every worker is a node.
        self._mates: SSGD | None = None
        if channels.inside is not None:
            inside = Replica(subject.trainable, subject.buffers, channels.inside, nodes.inside(self._weights))
            self._mates = SSGD().bind(inside)
        self._replica = Replica(
            subject.trainable,
            subject.buffers,
            channels.between,
            nodes.between(self._weights),
            everyone=channels.everyone,
            node=None if self._mates is None else self._mates.replica,
        )
        self._method = bound(algorithm, self._replica, subject.optimizers)
        self._clock = RoundClock(algorithm.period)
        self._is_attached = True
        self._is_averaged = False
        self._phase: LocalPhase | None = None
        if subject.router is not None:
            subject.router.take(self.reducer)
            if subject.ddp is not None and not algorithm.reduces_gradients:
                bypass = subject.model is subject.ddp
                self._phase = LocalPhase(subject.ddp, bypass=bypass, keep_gradients=self._mates is not None)
        self._counter = AttemptCounter(subject.model, subject.optimizers, _Watcher(self), self._method.poll)
        ATTACHED.add(subject.module)
        if self._mates is not None:
            self._mates.start(equal=len({reports[rank].trainable_digest for rank in nodes.mates}) == 1)
        self._method.start(equal=len({report.trainable_digest for report in reports}) == 1)

    @property
    def reducer(self) -> Algorithm:
        """What is done with gradients."""
        return self._method if self._mates is None else self._mates

    # ---- what a loop calls

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model is the weighted mean of all workers' models, buffers too; then the local state is back.

        Collective. An average in flight is left alone.
        """
        self._check_usable("averaged()")
        self._counter.settle()
        self._is_averaged = self._counter.paused = True
        try:
            with self._subject.bound_buffers(), self._replica.averaged():
                yield
        finally:
            self._is_averaged = self._counter.paused = False

    def finish(self) -> None:
        """Merge what is in flight, then give every worker the exact mean. Collective; training may go on after it."""
        self._check_usable("finish()")
        self._counter.settle()
        self._method.drain()
        self._replica.equalise()
        self._reset_optimizers()
        self._clock.restart()

    def reweight(self, weight: float) -> None:
        """Finish with the old weights, then start a round with new ones. Collective."""
        self._check_usable("reweight()")
        self._counter.settle()  # before anybody waits: others may be in a round's mean already
        problem: Exception | None = None
        value = float("nan")
        try:
            value = check_weight(weight)
        except (TypeError, ValueError) as error:
            problem = error
        reports = exchange_reports(Report(error=described(problem), weight=value), self._subject.group)
        raise_problems(reports, problem)
        weights = [report.weight for report in reports]
        check_weights(self._method, self._nodes, weights)
        self.finish()
        self.restore_weights(weights)

    def stats(self) -> Stats:
        """Counters since attach (or since the run that was resumed began). ``averaged()`` is not counted."""
        return Stats(
            rounds=self._clock.rounds,
            bytes=self._replica.traffic.num_bytes,
            exposed_seconds=self.exposed_seconds,
            hidden_seconds=sum(traffic.hidden_seconds for traffic in self._traffics),
            drift=self._replica.drift,
        )

    def state_dict(self) -> dict[str, Any]:
        """What model and optimizer do not hold, on this worker. Waits for what is in flight; starts no collective."""
        self._check_usable("state_dict()")
        self._counter.settle()
        return {
            "version": _STATE_VERSION,
            "algorithm": self._method.name,
            "attempts": self._clock.attempts,
            "rounds": self._clock.rounds,
            "round_start": self._clock.start,
            "in_flight": self._method.state(),
            "payload": self._replica.payload_state(),
            "anchor": self._replica.anchor_state(),
            "drift": self._replica.drift_state(),
            "traffic": [traffic.counters() for traffic in self._traffics],
            "nodes": self.nodes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict()`` was taken; the caller loads this worker's model and optimizer."""
        self._check_usable("load_state_dict()")
        if state.get("version") != _STATE_VERSION:
            raise ValueError(f"state version {state.get('version')!r} is not {_STATE_VERSION}; save it with this release")
        missing = [key for key in _STATE_KEYS if key not in state]
        if missing:
            raise ValueError(f"the state lacks {missing}; pass what state_dict() returned")
        saved, attached = state["algorithm"], self._method.name
        if saved != attached:
            raise ValueError(f"the state was saved with {saved}, attached is {attached}; attach the same algorithm")
        if state["nodes"] != self.nodes:  # workers of a node must hold equal parameters
            raise ValueError(
                f"the state was saved with nodes {state['nodes']}, here they are {self.nodes}; use the same inner"
            )
        self._replica.check_payload_state(state["payload"])
        self._replica.check_anchor_state(state["anchor"])
        self._method.load_state(state["in_flight"])
        self._replica.load_payload_state(state["payload"])
        self._replica.load_anchor_state(state["anchor"])
        self._clock.attempts, self._clock.rounds = state["attempts"], state["rounds"]
        self._clock.start = state["round_start"]
        self._replica.load_drift_state(state["drift"])
        # Saved with other nodes: what was sent inside them is forgotten, or begins at zero.
        for traffic, counters in zip(self._traffics, state["traffic"], strict=False):
            for name, value in counters.items():
                setattr(traffic, name, value)
        self._counter.forget()

    def detach(self) -> None:
        """Remove everything that was added; the model trains as plain DDP again. No collective; may be called again."""
        if self._is_attached:
            self._is_attached = False
            self._counter.remove()
            if self._phase is not None:
                self._phase.end()
            if self._subject.router is not None:
                self._subject.router.release()
                if self._phase is not None and self._clock.attempts > 0:
                    self._subject.router.retire_static_graph(self._subject.ddp)
            ATTACHED.discard(self._subject.module)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None and self._is_attached:
                self.finish()
        except BaseException:
            self._abandon()
            raise
        if kind is not None:
            self._abandon()
        self.detach()

    # ---- what a checkpoint must know

    @property
    def subject(self) -> Subject:
        """What is trained: model, optimizers, process group."""
        return self._subject

    @property
    def rank(self) -> int:
        return self._nodes.rank

    @property
    def num_workers(self) -> int:
        return len(self._weights)

    @property
    def nodes(self) -> list[list[int]]:
        """The ranks that share a node, node by node."""
        return [list(members) for members in self._nodes.members]

    @property
    def weight(self) -> float:
        """This worker's M_i."""
        return self._weights[self.rank]

    @property
    def algorithm(self) -> str:
        """Its name."""
        return self._method.name

    @property
    def attempts(self) -> int:
        """Steps attempted since attach, or since the run that was resumed began."""
        return self._clock.attempts

    @property
    def is_averaged(self) -> bool:
        """Whether this is inside ``averaged()``."""
        return self._is_averaged

    @property
    def is_round_start(self) -> bool:
        """Whether the last step ended a round."""
        return self._clock.start == self._clock.attempts

    # ---- what a trainer sets

    #: Called at a round's end before this worker's model enters an average; may raise to keep it out.
    guard: Callable[[], None] | None = None

    def listen(self) -> None:
        """From now on any worker may ask all of them to stop or to save; every worker calls this at the same point."""
        self._replica.wishes = Wishes()

    def request(self, *, stop: bool = False, save: bool = False) -> None:
        """Ask all workers to stop, or to save. They agree at a round's end: the question travels with the average."""
        wishes = self._replica.wishes
        if wishes is not None:
            wishes.stop, wishes.save = wishes.stop or stop, wishes.save or save

    def agreed(self, ask_now: bool = False) -> Wishes:
        """What all workers are to do, the same on each of them after the same round. A wish to save is taken by asking.

        ``ask_now``: every worker asks at this step. Needed where rounds send no models, and ignored elsewhere.
        """
        replica = self._replica
        if ask_now and (self._method.reduces_gradients or replica.comm.size == 1):
            replica.ask_all()
        agreed, replica.agreed = replica.agreed, Wishes(stop=replica.agreed.stop)
        return agreed

    def restore_weights(self, weights: Sequence[float]) -> None:
        """The weights that were in force when a state was saved; every worker passes the same ones. Nothing is finished."""
        self._weights = [float(weight) for weight in weights]
        self._replica.weights = self._nodes.between(self._weights)
        if self._mates is not None:
            self._mates.replica.weights = self._nodes.inside(self._weights)

    def start_at(self, attempts: int) -> None:
        """Begin a round here, as if this many steps had been attempted."""
        self._clock.attempts = attempts
        self._clock.restart()

    def set_period(self, period: PeriodLike) -> None:
        """Another period or schedule, the same on every worker.

        The pairs of a schedule count from the first step of all: a round under way keeps the period of its own first step.
        """
        parsed = Period.parse(period)
        check_fragments(self._method.fragments, parsed)
        self._clock.period = parsed

    def time_transfer(self) -> float:
        """Seconds that a transfer like a round's takes, from when this worker joins it. Collective; no model is changed.

        What is in flight is waited for first, so that the link is free. It is not counted in :meth:`stats`.
        """
        self._check_usable("time_transfer()")
        self._counter.settle()
        self._method.state()
        return self._replica.time_transfer(with_buffers=self._method.sends_buffers)

    def emulate_link(self, link: Link) -> None:
        """From now on collectives take what they would on ``link``; every worker calls this at the same point."""
        comm = self._replica.comm
        if isinstance(comm, TwoLevelComm):  # a node's own links are as fast as they are
            self._replica.comm = comm.with_outer(_emulated(comm.outer, link))
        else:
            self._replica.comm = _emulated(comm, link)

    @property
    def exposed_seconds(self) -> float:
        """What :meth:`stats` says of it, without looking at the device."""
        return sum(traffic.exposed_seconds for traffic in self._traffics)

    def record_spans(self) -> None:
        """From now on keep when communication happened, for :meth:`take_spans`."""
        for traffic in self._traffics:
            traffic.spans = []

    def take_spans(self) -> list[tuple[str, float, float]]:
        """(name, start, end) in ``time.perf_counter`` seconds since the last call: "communicate" and "wait"."""
        taken: list[tuple[str, float, float]] = []
        for traffic in self._traffics:
            if traffic.spans is not None:
                taken, traffic.spans = taken + traffic.spans, []
        return taken

    @property
    def _traffics(self) -> list[Traffic]:
        """Between nodes, and inside this one."""
        return [replica.traffic for replica in (self._replica, self._replica.node) if replica is not None]

    # ---- details

    def _reset_optimizers(self) -> None:
        """The model has been merged: begin anew, if that is the policy."""
        if self._method.optimizer_state == "reset":
            for optimizer in self._subject.optimizers:
                optimizer.state.clear()

    def _check_usable(self, call: str) -> None:
        if not self._is_attached:
            raise RuntimeError(f"{call} after detach(); attach again first")
        if self._is_averaged and call != "state_dict()":
            raise RuntimeError(f"{call} inside averaged(); leave the with block first")

    def _abandon(self) -> None:
        # Other workers may be anywhere: nothing may wait for them, and what is in flight stays behind on its group.
        if self._subject.router is not None:
            self._subject.router.channels = self._subject.router.channels_of = None
        self.detach()


def bound(algorithm: Algorithm, replica: Replica, optimizers: Sequence[Optimizer]) -> Algorithm:
    """A copy of ``algorithm`` that works on ``replica``, which averages all that it asks for in the way it asks for."""
    if algorithm.optimizer_state == "average":
        replica.optimizer_tensors = lambda: state_tensors(optimizers)
    if algorithm.payload != "fp32":
        replica.coded = CodedMean(algorithm.payload, replica.comm.rank, replica.comm.size)
    if algorithm.outer_momentum:
        replica.anchor = Anchor(algorithm.outer_momentum)
    replica.pull_back = algorithm.pull_back
    return algorithm.bind(replica)


def state_tensors(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Optimizer state of a parameter's shape: momentum, second moments; not step counters."""
    return [
        value
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if key != "step" and isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape
    ]


def _emulated(comm: Communicator, link: Link) -> Communicator:
    return EmulatedLink(comm.inner if isinstance(comm, EmulatedLink) else comm, link)


class _Watcher:
    """What the hooks tell a :class:`Sync`."""

    def __init__(self, sync: Sync) -> None:
        self._sync = sync
        self._method, self._reducer = sync._method, sync.reducer
        self._ddp, self._engine, self._router = sync._subject.ddp, sync._subject.engine, sync._subject.router
        self._refusal = sync._method.refuses_scaler

    def attempted(self) -> None:
        sync = self._sync
        if sync._clock.tick():
            if sync.guard is not None:
                sync.guard()
            self._method.launch()
            self._method.land()
            sync._reset_optimizers()
        elif self._method.fragments > 1:
            for part in sync._clock.parts_due(self._method.fragments):
                if sync.guard is not None:
                    sync.guard()
                self._method.launch_part(part)

    def step_begins(self) -> None:
        if self._sync._is_averaged:
            raise RuntimeError("optimizer.step() inside averaged() would be lost; leave the with block first")
        if self._refusal and is_stepped_by_scaler():
            raise RuntimeError(self._refusal)
        self._refusal = ""  # looked at once: a first step is never skipped, because its delayed gradients are zero
        if isinstance(self._router, EngineRouter):
            self._router.before_step(self._reducer, self._sync._subject.trainable)

    def backward_begins(self, standing: bool) -> None:
        self._method.backward_begins(standing, bare=self._is_bare)

    def backward_ends(self) -> None:
        self._method.backward_ends(bare=self._is_bare)
        if self._ddp is not None and self._ddp.find_unused_parameters and self._method.reduces_gradients:
            # Queued from a callback that runs before DDP's own, so that this one runs after it.
            Variable._execution_engine.queue_callback(self._method.after_buckets)

    def accumulates(self) -> bool:
        if self._engine is not None:
            return not self._engine.is_gradient_accumulation_boundary()
        return self._ddp is not None and under_no_sync(self._ddp)

    @property
    def _is_bare(self) -> bool:
        """Whether nobody else sees to gradients: one process, and no wrapper or an engine, which then reduces nothing."""
        return self._ddp is None and (self._engine is None or self._sync.num_workers == 1)
