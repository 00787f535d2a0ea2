"""What :func:`~cocod_accel.sync.attach.attach` returns: the one object that a training loop talks to."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from cocod_accel.algorithms import SSGD, Algorithm
from cocod_accel.algorithms.asgd import ASGD
from cocod_accel.averaging.replica import Replica
from cocod_accel.averaging.route import Route
from cocod_accel.averaging.weights import check_weight
from cocod_accel.comm.agreement import exchange_reports
from cocod_accel.comm.groups import Channels, world_group
from cocod_accel.comm.meeting import TransferError
from cocod_accel.comm.shutdown import rest
from cocod_accel.sync import states
from cocod_accel.sync.auto import AutoPlan, Plan, given
from cocod_accel.sync.control import Control
from cocod_accel.sync.ddp import LocalPhase
from cocod_accel.sync.driver import Driver
from cocod_accel.sync.membership import Membership
from cocod_accel.sync.nodes import Nodes
from cocod_accel.sync.peers import PeerWatch
from cocod_accel.sync.places import Places
from cocod_accel.sync.preflight import (
    ATTACHED,
    Report,
    Subject,
    check_weights,
    described,
    raise_problems,
    start_equal,
)
from cocod_accel.sync.reminders import Reminder
from cocod_accel.sync.shards import asking, refreshed
from cocod_accel.sync.step_counter import AttemptCounter, places_in_backward
from cocod_accel.sync.watcher import LoopWatcher
from cocod_accel.sync.zero import EngineCounter, ZeroShards

# How long detach() waits for others to join what they all have in flight.
_LET_GO_SECONDS = 5.0


@dataclass(frozen=True)
class Stats:
    """What synchronising has cost so far. Also a mapping, so that it can be logged as it is."""

    #: Rounds that have ended.
    rounds: int
    #: What this worker has sent, counted as a ring all-reduce: 2 (N - 1) / N of every payload (int8: scales included;
    #: headers of a few bytes are not). Where workers share nodes: what it has sent to other nodes, N being the number of
    #: nodes and the payload this worker's share of the model.
    bytes: int
    #: Seconds that training was blocked by communication: its main thread, or the stream of its device.
    exposed_seconds: float
    #: Seconds communication ran while training computed.
    hidden_seconds: float
    #: ||x_t - mean_t|| / ||mean_t|| at the last merge, and the largest and the mean of all merges.
    drift: float
    largest_drift: float
    mean_drift: float
    #: With a server: updates between the model that a gradient of this worker was of and the one that it was applied to.
    staleness: float = 0.0
    largest_staleness: int = 0
    #: And what had come and gone over the server's link when it last answered.
    server_bytes: int = 0

    def keys(self) -> list[str]:
        return list(asdict(self))

    def __getitem__(self, key: str) -> float:
        return asdict(self)[key]  # type: ignore[no-any-return]


class Sync:
    """Keeps one worker's model in step with the others'. As a context manager it finishes on a clean exit, and detaches."""

    def __init__(
        self,
        subject: Subject,
        algorithm: Algorithm,
        channels: Channels,
        nodes: Nodes,
        reports: Sequence[Report],
        membership: Membership | None = None,
        *,
        equal: bool | None = None,
    ) -> None:
        """``equal``: whether all workers begin with the same parameters; None: as they reported."""
        #: What is trained: model, optimizers, process group.
        self.subject = subject
        self._nodes = nodes
        #: This worker's rank, and the ranks that share a node, node by node.
        self.rank, self.nodes = nodes.rank, [list(members) for members in nodes.members]
        self._weights = [report.weight for report in reports]
        #: What sums the gradients inside this worker's node; None: every worker is a node, or its node's model is sharded.
        self._inside: SSGD | None = None
        self._membership = membership
        route = Route(channels.between, nodes.between(self._weights), channels.everyone, server=channels.server)
        if membership is not None:
            route.comm, route.rounds = membership.session.comm, membership
        if channels.inside is not None:
            route.node = Route(channels.inside, nodes.inside(self._weights), channels.inside)
            if subject.shards is None:
                self._inside = SSGD().bind(Replica(subject.trainable, subject.buffers, route.node))
        self._driver = Driver(
            algorithm, subject.trainable, subject.buffers, subject.optimizers, route, offload=subject.offloads
        )
        #: False after detach().
        self.is_attached = True
        #: What it says when a program is about to lose the mean.
        self.reminder = Reminder(subject.module, self._driver, speaks=nodes.rank == 0 and len(self._weights) > 1)
        self._phase: LocalPhase | None = None
        reducer = self._driver.method if self._inside is None else self._inside
        if subject.router is not None:
            subject.router.take(reducer)
            if subject.ddp is not None and not algorithm.reduces_gradients:
                bypass = subject.model is subject.ddp
                self._phase = LocalPhase(subject.ddp, bypass=bypass, keep_gradients=self._inside is not None)
        self._places = Places(self._driver, channels, nodes.rank)
        self._watcher = LoopWatcher(self._driver, reducer, subject, self._places, len(self._weights))
        # The second stage of an average begins in passing. Twice a step would be too seldom for rounds of one step.
        has_places = _has_stages(algorithm, channels) and subject.engine is None
        places = places_in_backward(subject.trainable) if has_places else []
        self._counter: AttemptCounter | EngineCounter
        if isinstance(subject.shards, ZeroShards):
            self._counter = EngineCounter(subject.engine, subject.shards, self._watcher, self._driver.method.poll)
        else:
            in_node = None if subject.shards is None else asking(route.node, subject.device)
            self._counter = AttemptCounter(
                subject.model, subject.optimizers, self._watcher, self._driver.method.poll, places, in_node
            )
        #: What only a trainer needs.
        self.control = Control(self)
        self._auto: AutoPlan | None = None
        if algorithm.auto_period:
            self._auto = self._watcher.auto = self.control.auto_plan(self._driver.method.period.at(0))
        self._peers: PeerWatch | None = None
        ATTACHED.add(subject.module)
        if self._inside is not None:
            self._inside.start(equal=len({reports[rank].trainable_digest for rank in nodes.node_ranks}) == 1)
        if membership is None:
            self._driver.start(equal=start_equal(reports, nodes) if equal is None else equal)
        else:
            self._meet_members(membership)

    # ---- what a loop calls

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model is the weighted mean of all workers' models, buffers too; then the local state is back.

        Collective. An average in flight is merged when it is due, as without this; nothing that is trained changes.
        """
        self._settle("averaged()", meets=True)
        self._watcher.is_averaged = self._counter.paused = True
        try:
            # Refreshed when the mean is there, and again when the local state is back.
            shards, evaluation = self.subject.shards, self._driver.replica.evaluation
            with refreshed(shards), self.subject.bound_buffers(), ExitStack() as stack:
                with refreshed(shards):
                    stack.enter_context(evaluation.averaged())
                stack.enter_context(self.reminder.quiet())
                yield
        finally:
            self._watcher.is_averaged = self._counter.paused = False

    def finish(self) -> None:
        """Merge what is in flight, then give every worker the exact mean. Collective; training may go on after it."""
        self._settle("finish()", meets=True)
        with refreshed(self.subject.shards):
            self._driver.finish()
        self.reminder.are_level()
        if self.num_workers > 1:
            rest()

    def mean_state_dict(self) -> dict[str, Any]:
        """The mean model's ``state_dict()``, in the host's memory: what to save or to export. Collective, as averaged().

        Of a model that is sharded over a node, the whole one; for a large model see ``export_model``.
        """
        shards = self.subject.shards
        with self.averaged():
            if shards is not None:
                return {name: gather().to("cpu", copy=True) for name, _, _, gather in shards.whole()}
            return {
                name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
                for name, value in self.subject.module.state_dict().items()
            }

    def reweight(self, weight: float) -> None:
        """Finish with the old weights, then start a round with new ones. Collective."""
        self._settle("reweight()", meets=True)  # before anybody waits: others may be in a round's mean already
        problem: Exception | None = None
        value = float("nan")
        try:
            value = check_weight(weight)
        except (TypeError, ValueError) as error:
            problem = error
        report = Report(error=described(problem), weight=value)
        reports = exchange_reports(report, self.subject.group, self.subject.device)
        raise_problems(reports, problem)
        weights = [report.weight for report in reports]
        check_weights(self._driver.method, self._nodes, weights, sharded=self.subject.shards is not None)
        self.finish()
        self._set_weights(weights)
        if self._membership is not None:
            self._membership.session.weight = value

    def watch(self, frozen_seconds: float = 60.0) -> None:
        """From now on, if a worker dies, fails, or is silent for ``frozen_seconds``, all others name it and end.

        Without it they wait for the process group's timeout. It lasts until ``detach()`` or the end of the process.
        """
        self._check_usable("watch()")
        if not (isinstance(frozen_seconds, int | float) and frozen_seconds > 0):
            raise ValueError(f"watch(frozen_seconds={frozen_seconds!r}): must be a number of seconds above 0")
        served = self._driver.method.is_served
        if self._peers is None and (served or self.num_workers > 1):
            if isinstance(self._driver.method, ASGD):
                self._driver.method.watch(frozen_seconds)
            group = world_group() if served else self.subject.group
            where = lambda: f"step {self.attempts + 1}"  # noqa: E731
            self._peers = PeerWatch(self.rank, self.num_workers, group, frozen_seconds, where, has_server=served)

    def stats(self) -> Stats:
        """Counters since attach (or since the run that was resumed began). ``averaged()`` is not counted.

        On a GPU it waits for what the device was told so far: what communication has cost is known only then.
        """
        exposed = self.control.blocked_seconds()
        return Stats(
            rounds=self._driver.clock.rounds,
            bytes=self._driver.replica.route.traffic.num_bytes,
            exposed_seconds=exposed,
            hidden_seconds=sum(traffic.hidden_seconds for traffic in self.control.traffics),
            drift=self._driver.replica.drift,
            largest_drift=self._driver.replica.drifts.largest,
            mean_drift=self._driver.replica.drifts.mean,
            **self._driver.method.own_stats(),
        )

    def plan(self) -> Plan:
        """The period in force, and why: with ``period="auto"``, what was measured. In words: ``print(sync.plan())``."""
        clock = self._driver.clock
        return given(clock.period, clock.start) if self._auto is None else self._auto.plan()

    def state_dict(self) -> dict[str, Any]:
        """What model and optimizer do not hold, on this worker. Waits for what is in flight; starts no collective."""
        return self._state(copies=True)

    def _state(self, *, copies: bool) -> dict[str, Any]:
        self._settle("state_dict()")
        traffic = [traffic.counters() for traffic in self.control.traffics]
        state = {"version": states.VERSION, **self._driver.state(copies=copies), "traffic": traffic, "nodes": self.nodes}
        return state if self._auto is None else {**state, "plan": self._auto.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict()`` was taken; the caller loads this worker's model and optimizer."""
        self._check_usable("load_state_dict()")
        state = states.readable(state)
        if state["algorithm"] == self.algorithm and state["nodes"] != self.nodes:  # a node's workers hold equal parameters
            raise ValueError(
                f"the state was saved with nodes {state['nodes']}, here they are {self.nodes}; use the same inner"
            )
        self._driver.check_state(state)
        self._driver.load_state(state)
        if self._auto is not None:
            self._auto.load_state(state.get("plan"))
        # Saved with other nodes: what was sent inside them is forgotten, or begins at zero.
        for traffic, counters in zip(self.control.traffics, state["traffic"], strict=False):
            traffic.restore(counters)
        self._counter.forget()

    def detach(self) -> None:
        """Remove everything that was added; the model trains as plain DDP again. No collective; may be called again."""
        if self.is_attached:
            self._driver.replica.route.comm.let_go(_LET_GO_SECONDS)
            self.reminder.of_detaching()
            if sys.exc_info()[0] is None:
                with suppress(TransferError):  # what is in flight is given up
                    self._driver.method.leave()
            if self.num_workers > 1 and sys.exc_info()[0] is None:
                rest()
        self._remove(f"detach() at step {self.attempts}")
        if self._peers is not None and sys.exc_info()[0] is None:  # else it must still say who made this worker fail
            self._peers.stop()

    def _remove(self, how: str) -> None:
        if self.is_attached:
            self.is_attached = False
            self.reminder.remove()
            self._places.leave(how)
            self._counter.remove()
            if self._phase is not None:
                self._phase.end()
            if self.subject.router is not None:
                self.subject.router.release()
                if self._phase is not None and self.attempts > 0:
                    self.subject.router.retire_static_graph(self.subject.ddp)
            ATTACHED.discard(self.subject.module)
            if self._membership is not None:
                self._membership.close(wait=sys.exc_info()[0] is None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None and self.is_attached:
                self.finish()
        except BaseException as problem:
            self._abandon(problem)
            raise
        if kind is not None:
            self._abandon(kind() if error is None else error)
        self.detach()

    # ---- what a checkpoint or a trainer must know

    @property
    def num_workers(self) -> int:
        return len(self._weights)

    @property
    def members(self) -> Membership:
        """Of workers that come and go: who is there (``presence()``), and how to leave (``leave()``)."""
        if self._membership is None:
            raise RuntimeError("sync.members: attached without members; pass attach(..., members=Members(...))")
        return self._membership

    @property
    def weight(self) -> float:
        """This worker's M_i."""
        return self._weights[self.rank]

    @property
    def algorithm(self) -> str:
        """Its name."""
        return self._driver.method.name

    @property
    def attempts(self) -> int:
        """Steps attempted since attach, or since the run that was resumed began."""
        return self._driver.clock.attempts

    @property
    def is_averaged(self) -> bool:
        """Whether this is inside ``averaged()``."""
        return self._watcher.is_averaged

    # ---- details

    def _meet_members(self, membership: Membership) -> None:
        try:
            membership.bind(self._driver)
        except BaseException as error:
            self._abandon(error)
            raise

    def _settle(self, call: str, *, meets: bool = False) -> None:
        """Count everything attempted by now; if the call ``meets`` the others, all are to make it at the same step."""
        self._check_usable(call)
        self._counter.settle()
        if meets:
            self._places.meet(call)

    def _set_weights(self, weights: Sequence[float]) -> None:
        self._weights = [float(weight) for weight in weights]
        route = self._driver.replica.route
        route.weights = self._nodes.between(self._weights)
        if route.node is not None:
            route.node.weights = self._nodes.inside(self._weights)

    def _check_usable(self, call: str) -> None:
        if not self.is_attached:
            raise RuntimeError(f"{call} after detach(); attach again first")
        if self.is_averaged and call != "state_dict()":
            raise RuntimeError(f"{call} inside averaged(); leave the with block first")

    def _abandon(self, error: BaseException) -> None:
        # Other workers may be anywhere: nothing may wait for them, and what is in flight stays behind on its group.
        if self.subject.router is not None:
            self.subject.router.channels = self.subject.router.channels_of = None
        line = str(error).split("\n")[0]
        self._remove(f"{type(error).__name__}{': ' if line else ''}{line}")


def _has_stages(algorithm: Algorithm, channels: Channels) -> bool:
    """Whether an average is a sum and then a gathering: coded ones, and those between nodes of several workers."""
    return channels.between.num_shards > 1 or (channels.between.size > 1 and algorithm.payload != "fp32")
