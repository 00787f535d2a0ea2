"""What to train with on a cluster: period, delay, payload, batches, learning rate and algorithm, each with its reason.

How a model travels follows from :func:`~cocod_accel.theory.hiding.choose`. The algorithm follows from the expected time to
the accuracy that S-SGD would reach: simulated seconds a step, times the steps needed (:mod:`cocod_accel.plan.learned`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from cocod_accel.algorithms import PAPERS, Algorithm
from cocod_accel.config.algorithms import algorithm_class
from cocod_accel.config.loading import load_config, merged_config
from cocod_accel.config.settings import AlgorithmConfig, Config
from cocod_accel.config.strict import ConfigError
from cocod_accel.plan.candidates import Candidate, best_algorithm, soonest
from cocod_accel.plan.learned import learned, span_of
from cocod_accel.plan.reasons import is_uneven, runs, why_batches, why_period
from cocod_accel.simulator.cluster import Cluster
from cocod_accel.simulator.simulate import Simulated, configured, expected_times, simulate
from cocod_accel.tasks import task_facts
from cocod_accel.theory import PAPER_PERIOD, StepTimes, paper_period_bound
from cocod_accel.theory.hiding import AUTO, CODES, Choice, choose, hiding_delay, lost_share
from cocod_accel.trainer.work import Work

#: Steps of a simulation at least, and rounds.
_STEPS, _ROUNDS = 300, 4
#: Periods tried where only longer ones hide an average.
_SHORTER = (2, 3, 4, 6, 10)
#: Settings of an algorithm that a plan decides on; the others are the user's.
_PLANNED = ("name", "period", "payload", "delay")
#: The longest period of docs/reproduction.md that lost no accuracy on label-skewed shards; the next one, 24, did.
_SKEWED_PERIOD = 8
#: How gradients travel.
_GRADIENTS = Choice("fp32", 1, None)
#: What a simulation cannot or must not have of a real run.
_REAL_ONLY = (
    "emulate.slowdown=null",
    "emulate.link.bandwidth_mbit=null",
    "emulate.link.latency_ms=0",
    "emulate.cluster=null",
    "cluster.replan_epochs=null",
)


@dataclass(frozen=True)
class Expected:
    """Speedups in time to accuracy over one worker alone, by algorithm, on some number of workers."""

    num_workers: int
    #: Of CoCoD-SGD, in words; None: the configuration cannot be trained on so many workers.
    choice: str | None
    #: None: the configuration cannot be trained so.
    speedups: dict[str, float | None]
    #: What no communication and no waiting would give.
    linear: float


@dataclass(frozen=True)
class Advice:
    """What to take."""

    algorithm: str
    period: int
    payload: str
    #: None: as long as the period.
    delay: int | None
    proportional: bool
    batches: tuple[int, ...]
    learning_rate: float
    #: Of CoCoD-SGD, with the payload above.
    times: StepTimes
    #: The recommended one among them.
    candidates: list[Candidate]
    #: (what, its value, why) for a reader.
    reasons: list[tuple[str, str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    expected: list[Expected] = field(default_factory=list)
    #: A way that is listed, and not recommended: nobody has measured how many steps it needs.
    asynchronous: Candidate | None = None
    #: For ``cocod train``, after the user's own arguments.
    overrides: list[str] = field(default_factory=list)

    def is_taken(self, candidate: Candidate) -> bool:
        same = (candidate.period, candidate.payload, candidate.delay) == (self.period, self.payload, self.delay)
        return candidate.algorithm == self.algorithm and (same or algorithm_class(self.algorithm).reduces_gradients)


def advise(cluster: Cluster, arguments: Sequence[str], counts: Sequence[int] | None = None) -> Advice:
    """Everything for a run of the configuration of ``arguments`` on ``cluster``.

    ``counts``: the numbers of workers to expect speedups for, the cluster's own among them; None: up to 64 at least.
    """
    planner = _Planner(list(arguments))
    num_workers, num_nodes = cluster.num_workers, planner.num_nodes(cluster)
    choice = planner.choice(cluster)
    candidates = planner.candidates(cluster, choice)
    counts = counts or [n * planner.node_size for n in worker_counts(num_nodes, 64 // planner.node_size)]
    expected = [planner.expected(cluster.resized(n)) for n in counts]
    offered = {c.algorithm: c for c in candidates if c.algorithm != "cocod"}
    ours = soonest([c for c in candidates if c.algorithm == "cocod"], choice, planner.fragments)
    offered |= {} if ours is None else {"cocod": ours}
    algorithm, why = best_algorithm({name: candidate.speedup for name, candidate in offered.items()}, num_nodes)
    kind, taken = algorithm_class(algorithm), offered[algorithm]
    config = planner.config(cluster, algorithm, Choice(taken.payload, taken.period, taken.delay))
    work = Work.of(config, task_facts(config).num_train, 0)
    rate = config.optimizer.learning_rate
    factor = work.plan.learning_rate_factor if config.optimizer.scale_learning_rate else 1.0
    warnings = [] if kind.reduces_gradients else planner.warnings(cluster, taken.period)
    if num_workers == 1:
        warnings = [*warnings, "one worker uses no network: figures for more workers rely on the network in the file"]
    advice = Advice(
        algorithm=algorithm,
        period=taken.period,
        payload=taken.payload,
        delay=taken.delay,
        proportional=config.cluster.proportional,
        batches=work.plan.batches,
        learning_rate=rate * factor,
        times=planner.times(cluster, taken.payload if not kind.reduces_gradients else choice.payload),
        candidates=candidates,
        warnings=warnings,
        expected=expected,
        asynchronous=planner.asynchronous(cluster),
        overrides=planner.overrides(cluster, config),
    )
    advice.reasons.append(("algorithm", algorithm, why))
    if algorithm == "cocod":
        why_code = planner.why_payload(cluster, choice) if taken.payload == choice.payload else "the soonest of those below"
        ssgd = next((c for c in candidates if c.algorithm == "ssgd"), None)
        if ssgd is not None:
            why_code += f"; {taken.step_bytes / 1e6:.3f} MB a step, where S-SGD sends {ssgd.step_bytes / 1e6:.3f}"
        advice.reasons.append(("payload", taken.payload, why_code))
    if not kind.reduces_gradients:
        advice.reasons.append(("period", str(taken.period), why_period(advice.times, taken, planner.fragments)))
    if taken.delay is not None:
        advice.reasons.append(("delay", str(taken.delay), "a mean is merged as soon as it can have arrived"))
    advice.reasons.append(("batches", runs(work.plan.batches), why_batches(cluster, config)))
    scaled = f"{rate:g} of one worker times {factor:g} (Remark 4 of the paper), after the warm-up"
    unscaled = "optimizer.scale_learning_rate is off"
    why_rate = scaled if config.optimizer.scale_learning_rate else unscaled
    advice.reasons.append(("learning rate", f"{advice.learning_rate:g}", why_rate))
    return advice


def planned_run(cluster: Cluster, arguments: Sequence[str], advice: Advice) -> Simulated:
    """The first steps of what was recommended."""
    config = configured(cluster, [*arguments, *advice.overrides, *_REAL_ONLY])
    return simulate(cluster, config, steps=max(_STEPS, 2 * advice.period))


def worker_counts(own: int, most: int = 64) -> list[int]:
    """1, 2, 4, ... up to ``most`` at least, and the cluster's own."""
    counts = {own}
    n = 1
    while n <= max(most, own):
        counts.add(n)
        n *= 2
    return sorted(counts)


class _Planner:
    """Configurations of one user for many clusters and algorithms."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        #: As the user wrote it; it need not fit the cluster, nor any algorithm.
        self._given = merged_config([*arguments, *_REAL_ONLY])
        options = self._given.algorithm
        #: Workers that hold one model together; every algorithm but S-SGD and Pipe-SGD averages between nodes.
        self.node_size = self._given.cluster.workers_per_replica
        # With any number of fragments and any period of the user's, and whatever is of another algorithm.
        own = ["algorithm.name=cocod", "algorithm.period=1000000", "cluster.proportional=false"]
        own += [
            "algorithm.optimizer_state=keep",
            "algorithm.payload=fp32",
            f"cluster.num_workers={len(self._speeds) or 2 * self.node_size}",
        ]
        load_config([*arguments, *_REAL_ONLY, *own])
        #: A round is at least as many steps as a model is sent in parts.
        self.fragments = options.fragments
        #: Of the cluster with so many workers, with a payload; and S-SGD's steps.
        self._times: dict[tuple[int, str], StepTimes] = {}
        self._num_steps: dict[int, int] = {}

    @property
    def _speeds(self) -> list[float]:
        speeds = self._given.cluster.speeds
        return list(speeds) if isinstance(speeds, list) else []

    def num_nodes(self, cluster: Cluster) -> int:
        """How many models are averaged."""
        size, num_workers = self.node_size, cluster.num_workers
        if num_workers % size or num_workers == size > 1:
            fix = "give --workers=" + str(size * max(2, num_workers // size))
            raise ConfigError(f"cluster.workers_per_replica={size}: does not make nodes of {num_workers} workers; {fix}")
        return num_workers // size

    def config(self, cluster: Cluster, algorithm: str, choice: Choice, *, steps: int | None = None) -> Config:
        kind = algorithm_class(algorithm)
        uneven = is_uneven(cluster) and kind.same_period
        if self._given.cluster.shard is not None:  # the workers of a node have equal batches
            speeds = cluster.speeds()
            uneven = uneven and all(speed == speeds[i - i % self.node_size] for i, speed in enumerate(speeds))
        own = [f"cluster.proportional={str(uneven).lower()}"]
        if kind.reduces_gradients:
            choice = _GRADIENTS
            own += ["cluster.workers_per_replica=1"] if self.node_size > 1 else []
        delay = choice.delay if "delay" in inspect.signature(kind).parameters else None
        own += [
            f"algorithm.period={choice.period}",
            f"algorithm.payload={choice.payload}",
            f"algorithm.delay={_value(delay)}",
        ]
        if self._given.algorithm.optimizer_state not in kind.optimizer_policies:
            own.append("algorithm.optimizer_state=keep")
        own += self._defaults_of_others(kind)
        return configured(cluster, [*self._arguments, *_REAL_ONLY, *own], algorithm, steps)

    def _defaults_of_others(self, kind: type[Algorithm]) -> list[str]:
        """What the user has set of options that an algorithm does not take, back to the defaults."""
        taken, default = inspect.signature(kind).parameters, AlgorithmConfig()
        names = [option.name for option in fields(AlgorithmConfig) if option.name not in (*_PLANNED, *taken)]
        return [
            f"algorithm.{name}={_value(getattr(default, name))}"
            for name in names
            if getattr(self._given.algorithm, name) != getattr(default, name)
        ]

    def times(self, cluster: Cluster, payload: str) -> StepTimes:
        """Of CoCoD-SGD with this payload."""
        key = cluster.num_workers, payload
        if key not in self._times:
            config = self.config(cluster, "cocod", Choice(payload, self.fragments, None))
            self._times[key] = expected_times(cluster, config)
        return self._times[key]

    def choice(self, cluster: Cluster, payload: str = AUTO) -> Choice:
        """How CoCoD-SGD's models are to travel."""
        return choose(lambda code: self.times(cluster, code), payload=payload, least=self.fragments)

    def why_payload(self, cluster: Cluster, choice: Choice) -> str:
        """Of what was chosen among all codes."""
        shortest = self.fragments
        rounds = "one step" if shortest == 1 else f"{shortest} steps"
        before = CODES[: CODES.index(choice.payload)]
        needed = ", ".join(f"{code} {self._why_not(self.times(cluster, code), shortest)}" for code in before)
        if choice.period > shortest:
            what = "the shortest code" if choice.payload == CODES[-1] else "of all codes the shortest rounds"
            return f"{what}: none hides in {rounds}" + (f"; {needed}" if needed else "")
        return f"the longest code that hides in {rounds}" + (f"; {needed}" if needed else "")

    def _why_not(self, times: StepTimes, shortest: int) -> str:
        if hiding_delay(times) > shortest:
            return f"needs {hiding_delay(times)}"
        return f"makes steps {lost_share(times, shortest):.0%} longer"

    def warnings(self, cluster: Cluster, period: int) -> list[str]:
        """About rounds that are longer than tested, or than the bound allows."""
        config = self.config(cluster, "cocod", Choice("fp32", self.fragments, None))
        num_steps, num_models = _num_steps(config), cluster.num_workers // self.node_size
        bound = paper_period_bound(num_steps, num_models)
        warnings = []
        if period > max(1.0, bound):
            warnings.append(
                f"period {period} is above theory's {bound:.2g} for {num_steps} steps of {num_models} workers "
                f"(the O(T^(1/4) / N^(3/4)) bound, scaled to the paper's {PAPER_PERIOD}); accuracy may suffer; compare it "
                "with a shorter period"
            )
        if period > _SKEWED_PERIOD:
            skew = config.task.label_skew
            where = "if the workers' data differ" if skew is None else f"with task.label_skew={skew:g}"
            warnings.append(
                f"period {period} is above {_SKEWED_PERIOD}: {where}, accuracy may suffer (docs/reproduction.md); compare "
                "it with algorithm.name=local"
            )
        if period > num_steps:
            warnings.append(f"a round of {period} steps is longer than the whole run of {num_steps}")
        return warnings

    def candidates(self, cluster: Cluster, choice: Choice) -> list[Candidate]:
        """S-SGD, then every other way there is; those that cannot be trained so are left out."""
        paper = max(PAPER_PERIOD, self.fragments)
        ways = [(name, _GRADIENTS) for name in ("ssgd", "pipe")]
        ways += [(name, Choice(choice.payload, paper, None)) for name in ("local", "asynlocal")]
        ways += [("cocod", Choice("fp32", paper, None)), *(("cocod", self.choice(cluster, code)) for code in CODES)]
        ways.append(("cocod", choice))
        found = [self.candidate(cluster, *way) for way in dict.fromkeys(ways)]
        shorter = self._soonest_shorter(cluster, choice)
        return [c for c in dict.fromkeys([*found, shorter]) if c is not None]

    def _soonest_shorter(self, cluster: Cluster, choice: Choice) -> Candidate | None:
        """Where only long rounds hide an average: the best of shorter ones, which wait for a part of it."""
        periods = [k for k in _SHORTER if self.fragments <= k < choice.period]
        ways = [Choice(choice.payload, k, delay) for k in periods for delay in (None, 1)]
        found = [self.candidate(cluster, "cocod", way) for way in ways]
        return max((c for c in found if c is not None), key=lambda candidate: candidate.speedup, default=None)

    def asynchronous(self, cluster: Cluster) -> Candidate | None:
        """A-SGD, as fast as it is; how many steps it needs is not known."""
        if cluster.num_workers == 1:
            return None
        try:
            config = self.config(cluster, "asgd", _GRADIENTS, steps=_STEPS)
        except ConfigError:
            return None
        done = simulate(cluster, config, steps=_STEPS)
        throughput = done.steady_speedup()
        seconds = done.num_samples / min(done.timeline.steps) / config.batch_size
        return Candidate(
            algorithm="asgd",
            period=1,
            delay=None,
            payload="fp32",
            step_seconds=seconds * cluster.seconds_alone(config.batch_size) / throughput,
            step_bytes=done.step_bytes,
            throughput=throughput,
            steps_needed=math.nan,
        )

    def candidate(self, cluster: Cluster, algorithm: str, choice: Choice) -> Candidate | None:
        if algorithm_class(algorithm).reduces_gradients:
            choice = _GRADIENTS
        try:
            own = choice.period
            if not algorithm_class(algorithm).same_period:
                config = self.config(cluster, algorithm, choice, steps=_STEPS)
                own = Work.of(config, task_facts(config).num_train, 0).algorithm.period.at(0)
            rounds = _ROUNDS if own < _STEPS else 2
            steps = own * max(rounds, math.ceil(_STEPS / own))
            config = self.config(cluster, algorithm, choice, steps=steps)
            if cluster.num_workers not in self._num_steps:
                plain = self.config(cluster, "cocod", Choice("fp32", self.fragments, None))
                self._num_steps[cluster.num_workers] = _num_steps(plain)
        except ConfigError:
            return None
        num_steps = self._num_steps[cluster.num_workers]
        done = simulate(cluster, config, steps=steps)
        samples = done.num_samples / min(done.timeline.steps)
        throughput = done.steady_speedup()
        needed = learned().steps_needed(
            algorithm,
            span_of(algorithm, choice.period, choice.delay),
            choice.payload,
            cluster.num_workers // self.node_size,
            num_steps,
        )
        return Candidate(
            algorithm=algorithm,
            period=choice.period,
            delay=choice.delay,
            payload=choice.payload,
            step_seconds=samples / config.batch_size * cluster.seconds_alone(config.batch_size) / throughput,
            step_bytes=done.step_bytes,
            throughput=throughput,
            steps_needed=needed,
        )

    def expected(self, cluster: Cluster) -> Expected:
        linear = sum(cluster.speeds())
        speedups: dict[str, float | None] = dict.fromkeys(PAPERS)
        try:
            choice = self.choice(cluster)
        except ConfigError:  # too few samples for so many workers
            return Expected(cluster.num_workers, None, speedups, linear)
        paper = Choice(choice.payload, max(PAPER_PERIOD, self.fragments), None)
        for name in PAPERS:
            found = self.candidate(cluster, name, choice if name == "cocod" else paper)
            if name == "cocod":
                ours = [c for c in (found, self._soonest_shorter(cluster, choice)) if c is not None]
                found = soonest(ours, choice, self.fragments)
                if found is not None:
                    choice = Choice(found.payload, found.period, found.delay)
            speedups[name] = None if found is None else found.speedup
        merged = "" if choice.delay is None else f" d={choice.delay}"
        return Expected(cluster.num_workers, f"k={choice.period}{merged} {choice.payload}", speedups, linear)

    def overrides(self, cluster: Cluster, planned: Config) -> list[str]:
        """What makes the user's own arguments the configuration that was planned; the command is known to load."""
        options, given = planned.algorithm, self._given
        own = [f"algorithm.name={options.name}"]
        reduces = algorithm_class(options.name).reduces_gradients
        own.append(f"algorithm.period={1 if reduces else planned.period_by_epoch[-1][1]}")
        if not reduces or given.algorithm.payload != options.payload:
            own.append(f"algorithm.payload={options.payload}")
        if given.algorithm.delay != options.delay:
            own.append(f"algorithm.delay={_value(options.delay)}")
        for key in (option.name for option in fields(options) if option.name not in _PLANNED):
            if getattr(given.algorithm, key) != getattr(options, key):
                own.append(f"algorithm.{key}={_value(getattr(options, key))}")
        own.append(f"cluster.num_workers={cluster.num_workers}")
        if planned.cluster.workers_per_replica != given.cluster.workers_per_replica:
            own.append(f"cluster.workers_per_replica={planned.cluster.workers_per_replica}")
        by_speed = planned.cluster.proportional or not algorithm_class(options.name).same_period
        if by_speed:
            own.append(f"cluster.speeds=[{','.join(_number(speed) for speed in cluster.speeds())}]")
        elif given.cluster.speeds is not None:
            own.append("cluster.speeds=null")
        own.append(f"cluster.proportional={str(planned.cluster.proportional).lower()}")
        real = merged_config(self._arguments)
        if real.cluster.replan_epochs is not None and not planned.cluster.proportional:
            own.append("cluster.replan_epochs=null")
        if real.emulate.slowdown is not None and len(real.emulate.slowdown) != cluster.num_workers:
            own.append("emulate.slowdown=null")
        load_config([*self._arguments, *own])
        return own


def _value(value: object) -> str:
    """As an override spells it."""
    return "null" if value is None else str(value)


def _num_steps(config: Config) -> int:
    """Of worker 0 in the whole run."""
    return sum(Work.of(config, task_facts(config).num_train, 0).steps)


def _number(value: float) -> str:
    """As short as it can be, and exactly this number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
