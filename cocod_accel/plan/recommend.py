"""What to train with on a cluster: period, payload, batches, learning rate and algorithm, each with its reason.

The period follows from :func:`~cocod_accel.theory.hiding.choose_period`, the algorithm from the simulated time of all five.
Theory warns where a period that hides an average exceeds its bound, and shortens none; it only limits how far a period is
lengthened for steps that transfers slow down.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from cocod_accel.algorithms import ALGORITHMS, Algorithm
from cocod_accel.config.algorithms import algorithm_class
from cocod_accel.config.loading import load_config, merged_config
from cocod_accel.config.settings import AlgorithmConfig, Config
from cocod_accel.config.strict import ConfigError
from cocod_accel.plan.findings import ALIKE
from cocod_accel.simulator.cluster import Cluster
from cocod_accel.simulator.simulate import configured, expected_times, simulate
from cocod_accel.tasks import task_facts
from cocod_accel.theory import PAPER_PERIOD, StepTimes, paper_period_bound
from cocod_accel.theory.hiding import LOSS, MARGIN, choose_period, lost_share
from cocod_accel.trainer.work import Work

#: What others must gain over S-SGD, and over CoCoD-SGD, to be recommended instead.
_WORTH_IT, _AS_GOOD = 0.05, 0.02
#: Steps of a simulation at least, and rounds.
_STEPS, _ROUNDS = 300, 4
#: Settings of an algorithm that a plan decides on; the others are the user's.
_PLANNED = ("name", "period", "payload")
#: In this order a shorter payload is tried.
_PAYLOADS = ("fp32", "bf16", "int8")
#: The longest period of docs/reproduction.md that lost no accuracy on label-skewed shards; the next one, 24, did.
_SKEWED_PERIOD = 8
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
    """Simulated speedups over one worker alone, by algorithm, on some number of workers."""

    num_workers: int
    #: Of the algorithms that have one; None: the configuration cannot be trained on so many workers.
    period: int | None
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
    proportional: bool
    batches: tuple[int, ...]
    learning_rate: float
    times: StepTimes
    #: (what, its value, why) for a reader.
    reasons: list[tuple[str, str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    expected: list[Expected] = field(default_factory=list)
    #: For ``cocod train``, after the user's own arguments.
    overrides: list[str] = field(default_factory=list)


def advise(cluster: Cluster, arguments: Sequence[str], counts: Sequence[int] | None = None) -> Advice:
    """Everything for a run of the configuration of ``arguments`` on ``cluster``.

    ``counts``: the numbers of workers to expect speedups for, the cluster's own among them; None: up to 64 at least.
    """
    planner = _Planner(list(arguments))
    payload, period, notes, warnings = planner.payload(cluster)
    expected = [planner.expected(cluster.resized(n), payload) for n in counts or worker_counts(cluster.num_workers)]
    own = next(row for row in expected if row.num_workers == cluster.num_workers)
    algorithm, why = best_algorithm(own.speedups, cluster.num_workers)
    kind = algorithm_class(algorithm)
    if kind.reduces_gradients:
        payload, notes, warnings = "fp32", [], []
    config = planner.config(cluster, algorithm, period=period, payload=payload)
    work = Work.of(config, task_facts(config).num_train, 0)
    times = expected_times(cluster, planner.config(cluster, "cocod", period=period, payload=payload))
    rate = config.optimizer.learning_rate
    factor = work.plan.learning_rate_factor if config.optimizer.scale_learning_rate else 1.0
    if cluster.num_workers == 1:
        warnings = [*warnings, "one worker uses no network: figures for more workers rely on the network in the file"]
    advice = Advice(
        algorithm=algorithm,
        period=period,
        payload=payload,
        proportional=config.cluster.proportional,
        batches=work.plan.batches,
        learning_rate=rate * factor,
        times=times,
        warnings=warnings,
        expected=expected,
        overrides=planner.overrides(cluster, config),
    )
    advice.reasons.append(("algorithm", algorithm, why))
    if not kind.reduces_gradients:
        advice.reasons.append(("period", str(period), _why_period(times, period, algorithm, planner.fragments)))
        advice.reasons.extend(notes)
    advice.reasons.append(("batches", _runs(work.plan.batches), _why_batches(cluster, config)))
    scaled = f"{rate:g} of one worker times {factor:g} (Remark 4 of the paper), after the warm-up"
    unscaled = "optimizer.scale_learning_rate is off"
    why_rate = scaled if config.optimizer.scale_learning_rate else unscaled
    advice.reasons.append(("learning rate", f"{advice.learning_rate:g}", why_rate))
    return advice


def worker_counts(own: int) -> list[int]:
    """1, 2, 4, ... up to 64 at least, and the cluster's own."""
    counts = {own}
    n = 1
    while n <= max(64, own):
        counts.add(n)
        n *= 2
    return sorted(counts)


def best_algorithm(speedups: dict[str, float | None], num_workers: int) -> tuple[str, str]:
    """The fastest, and why; S-SGD where others hardly gain, because its gradients are exact; then CoCoD-SGD."""
    known = {name: speedup for name, speedup in speedups.items() if speedup is not None}
    if not known:
        raise ConfigError("no algorithm can be simulated with this configuration; run cocod simulate to see why")
    if num_workers == 1:
        return "ssgd", "one worker: there is nobody to communicate with, and all algorithms are plain SGD"
    fastest = max(known, key=lambda name: known[name])
    ssgd = known.get("ssgd", 0.0)
    if ssgd >= (1 - _WORTH_IT) * known[fastest]:
        return "ssgd", (
            f"communication is negligible: S-SGD is as good ({ssgd:.2f}x, {fastest} {known[fastest]:.2f}x; simulated), "
            "and its gradients are exact"
        )
    chosen = "cocod" if known.get("cocod", 0.0) >= (1 - _AS_GOOD) * known[fastest] else fastest
    gain = f", {known[chosen] / ssgd:.2f} times S-SGD" if ssgd else ""
    return chosen, f"fastest of all: {known[chosen]:.2f}x one worker{gain} (simulated)"


class _Planner:
    """Configurations of one user for many clusters and algorithms."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        #: As the user wrote it; it need not fit the cluster, nor any algorithm.
        self._given = merged_config([*arguments, *_REAL_ONLY])
        options = self._given.algorithm
        # With any number of fragments and any period of the user's, and whatever is of another algorithm.
        own = ["algorithm.name=cocod", "algorithm.period=1000000", "cluster.proportional=false"]
        own += ["algorithm.optimizer_state=keep", "algorithm.payload=fp32", f"cluster.num_workers={len(self._speeds) or 2}"]
        load_config([*arguments, *_REAL_ONLY, *own])
        #: A round is at least as many steps as a model is sent in parts.
        self.fragments = options.fragments

    @property
    def _speeds(self) -> list[float]:
        speeds = self._given.cluster.speeds
        return list(speeds) if isinstance(speeds, list) else []

    def config(
        self, cluster: Cluster, algorithm: str, *, period: int = 1, payload: str = "fp32", steps: int | None = None
    ) -> Config:
        kind = algorithm_class(algorithm)
        uneven = is_uneven(cluster) and kind.same_period
        own = [f"cluster.proportional={str(uneven).lower()}"]
        if kind.reduces_gradients:
            own += ["algorithm.period=1", "algorithm.payload=fp32"]
        else:
            own += [f"algorithm.period={period}", f"algorithm.payload={payload}"]
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

    def payload(self, cluster: Cluster) -> tuple[str, int, list[tuple[str, str, str]], list[str]]:
        """The longest payload whose period theory does not mind, that period, and what there is to say."""
        config = self.config(cluster, "cocod", period=self.fragments)
        num_steps, num_workers = _num_steps(config), cluster.num_workers
        bound = paper_period_bound(num_steps, num_workers)
        named = f"theory's {bound:.2g} for {num_steps} steps of {num_workers} workers"
        tried: list[tuple[str, int]] = []
        for name in _PAYLOADS:
            period = self.period(cluster, name)
            if not tried or period < min(k for _, k in tried):
                tried.append((name, period))
            if period <= max(1.0, bound):
                break
        payload, period = tried[-1]
        before = ", ".join(f"{name} would need {k}" for name, k in tried[:-1])
        if not before:
            why = f"its period is within {named}" if period <= bound else "a shorter one makes no shorter period"
        else:
            why = f"{before}, above {named}"
        warnings = []
        if period > bound:
            warnings.append(
                f"period {period} is above {named}, which is its O(T^(1/4) / N^(3/4)) scaled through the paper's "
                f"{PAPER_PERIOD}: accuracy may suffer; compare it with a shorter period"
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
        return payload, period, [("payload", payload, why)], warnings

    def period(self, cluster: Cluster, payload: str) -> int:
        config = self.config(cluster, "cocod", period=self.fragments, payload=payload)
        bound = min(paper_period_bound(_num_steps(config), cluster.num_workers), _SKEWED_PERIOD)
        return choose_period(expected_times(cluster, config), least=self.fragments, bound=bound)

    def expected(self, cluster: Cluster, payload: str) -> Expected:
        speedups: dict[str, float | None] = dict.fromkeys(ALGORITHMS)
        linear = sum(cluster.speeds())
        try:
            period = self.period(cluster, payload)
        except ConfigError:  # too few samples for so many workers
            return Expected(cluster.num_workers, None, speedups, linear)
        for name in ALGORITHMS:
            try:
                config = self.config(cluster, name, period=period, payload=payload, steps=_STEPS)
                own = Work.of(config, task_facts(config).num_train, 0).algorithm.period.at(0)
                steps = own * max(_ROUNDS, math.ceil(_STEPS / own))
                config = self.config(cluster, name, period=period, payload=payload, steps=steps)
            except ConfigError:
                continue
            speedups[name] = simulate(cluster, config, steps=steps).steady_speedup()
        return Expected(cluster.num_workers, period, speedups, linear)

    def overrides(self, cluster: Cluster, planned: Config) -> list[str]:
        """What makes the user's own arguments the configuration that was planned; the command is known to load."""
        options, given = planned.algorithm, self._given
        own = [f"algorithm.name={options.name}"]
        reduces = algorithm_class(options.name).reduces_gradients
        own.append(f"algorithm.period={1 if reduces else planned.period_by_epoch[-1][1]}")
        if not reduces or given.algorithm.payload != options.payload:
            own.append(f"algorithm.payload={options.payload}")
        for key in (option.name for option in fields(options) if option.name not in _PLANNED):
            if getattr(given.algorithm, key) != getattr(options, key):
                own.append(f"algorithm.{key}={_value(getattr(options, key))}")
        own.append(f"cluster.num_workers={cluster.num_workers}")
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


def is_uneven(cluster: Cluster) -> bool:
    """Whether proportional sampling is worth it."""
    speeds = cluster.speeds()
    return max(speeds) > (1 + ALIKE) * min(speeds)


def _num_steps(config: Config) -> int:
    """Of worker 0 in the whole run."""
    return sum(Work.of(config, task_facts(config).num_train, 0).steps)


def _why_period(times: StepTimes, period: int, algorithm: str, least: int) -> str:
    facts = f"a step takes {1e3 * times.compute_seconds:.1f} ms, an average {1e3 * times.comm_seconds:.1f} ms"
    if algorithm != "cocod":  # which waits for it in every round
        waits = times.comm_seconds / (period * times.compute_seconds)
        return f"{facts}: with it CoCoD-SGD would hide it; here steps are {waits:.0%} longer, less with a longer period"
    under = f" while computing goes on at {1 - times.interference:.0%}" if times.interference else ""
    hiding, lost = choose_period(times, least=least), lost_share(times, period)
    is_enough = lost <= LOSS * (1 + 1e-9)
    spare = f"with {MARGIN:.0%} to spare"
    if hiding < period:
        costs = f"{period} makes steps {lost:.0%} longer for it instead of {lost_share(times, hiding):.0%}"
        limit = "" if is_enough else ", and is the longest recommended"
        return f"{facts}{under}: {hiding} hides it, {spare}; {costs}{limit}"
    rest = f"; steps are {lost:.0%} longer for it" if lost >= 0.005 else ""
    return f"{facts}{under}: the smallest that hides it, {spare}{rest}{'' if is_enough else ', less with a longer period'}"


def _why_batches(cluster: Cluster, config: Config) -> str:
    if config.cluster.proportional:
        return f"proportional to speeds, which differ by {max(cluster.speeds()) / min(cluster.speeds()) - 1:.0%}"
    if is_uneven(cluster):
        return f"equal: {config.algorithm.name} gives faster workers more steps instead"
    return f"equal: speeds differ by less than {ALIKE:.0%}"


def _runs(batches: Sequence[int]) -> str:
    """4 x 32, 4 x 48 for what would fill lines."""
    runs: list[list[int]] = []
    for batch in batches:
        if runs and runs[-1][1] == batch:
            runs[-1][0] += 1
        else:
            runs.append([1, batch])
    return ", ".join(f"{count} x {batch}" for count, batch in runs)


def _number(value: float) -> str:
    """As short as it can be, and exactly this number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
