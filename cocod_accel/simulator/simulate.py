"""One simulated run: the trainer's configuration and plan on a cluster's virtual clock."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from cocod_accel.algorithms import ASGD
from cocod_accel.config.algorithms import algorithm_class
from cocod_accel.config.loading import merged_config
from cocod_accel.config.rules import validate
from cocod_accel.config.settings import Config
from cocod_accel.config.strict import ConfigError
from cocod_accel.simulator.cluster import Cluster
from cocod_accel.simulator.payloads import parcels_of
from cocod_accel.simulator.rules import RULES
from cocod_accel.simulator.served import ServedTimeline, Turn
from cocod_accel.simulator.timeline import (
    Course,
    SpanSample,
    Timeline,
    chosen_ranks,
    mean_seconds,
    middle_window,
    step_times,
)
from cocod_accel.tasks import task_facts
from cocod_accel.theory import StepTimes
from cocod_accel.theory.hiding import choose
from cocod_accel.trainer.work import Work


@dataclass(frozen=True)
class Simulated:
    """A run that has been simulated."""

    config: Config
    cluster: Cluster
    work: Work
    timeline: Timeline

    @property
    def num_samples(self) -> int:
        """Of all workers."""
        return sum(s * m for s, m in zip(self.timeline.steps, self.work.plan.batches, strict=True))

    @property
    def turns(self) -> list[Turn]:
        """In which order gradients arrive, where there is a server."""
        return self.timeline.turns if isinstance(self.timeline, ServedTimeline) else []

    @property
    def samples_per_second(self) -> float:
        return self.num_samples / self.timeline.train_seconds

    @property
    def step_seconds(self) -> float:
        """Of the worker that takes fewest steps; all take equally many unless periods go by speed."""
        return self.timeline.train_seconds / min(self.timeline.steps)

    @property
    def speedup(self) -> float:
        """Samples a second over those of one worker of speed 1 that trains alone."""
        batch = self.config.batch_size
        return self.samples_per_second * self.cluster.seconds_alone(batch) / batch

    def steady_speedup(self) -> float:
        """The same without the first round, in which nothing travels, and without the exact mean at the end."""
        timeline, batch = self.timeline, self.config.batch_size
        first = self.work.algorithm.period.at(0)
        share = 1 - first / timeline.num_steps
        seconds = timeline.train_seconds_after(timeline.num_steps) - timeline.train_seconds_after(first)
        return self.num_samples * share / seconds * self.cluster.seconds_alone(batch) / batch

    @property
    def step_bytes(self) -> float:
        """What a worker sends in a step, in the mean of a round."""
        algorithm = self.work.algorithm
        parcels = parcels_of(self.config, self.cluster, algorithm, task_facts(self.config))
        if parcels.server is not None:
            return parcels.server.gradient.sent_bytes
        return parcels.gradients.sent_bytes + sum(part.sent_bytes for part in parcels.parts) / algorithm.period.at(0)

    @property
    def checkpoint_seconds(self) -> float:
        """From one checkpoint to the next, as the configuration says; the whole run, if it writes none."""
        given, steps = self.config.checkpoint, self.work.steps
        every = float(sum(steps))
        if given.every_epochs is not None:
            every = min(every, given.every_epochs * sum(steps) / len(steps))
        if given.every_steps is not None:
            every = min(every, given.every_steps)
        seconds = every * self.step_seconds
        return seconds if given.every_minutes is None else min(seconds, 60 * given.every_minutes)

    @property
    def exposed_share(self) -> float:
        """Of the training time, spent blocked by communication or by slower workers; of the worker for whom it is most."""
        return float(self.timeline.fleet.exposed_seconds.max()) / self.timeline.train_seconds


def configured(cluster: Cluster, arguments: list[str], algorithm: str | None = None, steps: int | None = None) -> Config:
    """The configuration of a run on ``cluster``, which says how many workers there are and how fast.

    ``steps``: of worker 0; the schedule is made longer, or cut, to hold them.
    """
    own = [f"cluster.num_workers={cluster.num_workers}", "cluster.speeds=null"]
    own += [] if algorithm is None else [f"algorithm.name={algorithm}"]
    config = merged_config([*arguments, *own])
    config.cluster.speeds = cluster.speeds()  # not as text, which would have to be read again
    validate(config)
    _refuse(config)
    config.emulate.cluster = title(cluster)
    if config.has_auto_period or config.has_auto_code:
        _choose(cluster, config)
    if steps is not None:
        if steps < 1:
            raise ConfigError(f"--steps={steps}: must be at least 1")
        _set_length(config, steps)
    return config


def _choose(cluster: Cluster, config: Config) -> None:
    """What is to be chosen, as the trainer would."""
    options, has_period = config.algorithm, not config.has_auto_period

    def times_of(payload: str) -> StepTimes:
        coded = replace(config, algorithm=replace(options, payload=payload, delay=None))
        return expected_times(cluster, coded)

    choice = choose(
        times_of,
        payload=options.payload,
        period=min(k for _, k in config.period_by_epoch) if has_period else None,
        delay=options.delay,
        least=options.fragments,
    )
    options.payload, options.delay = choice.payload, choice.delay
    if not has_period:
        options.period = choice.period
    validate(config)


def expected_times(cluster: Cluster, config: Config) -> StepTimes:
    """What a step of the slowest worker and a round's transfer take on ``cluster``, with the batches of ``config``."""
    facts = task_facts(config)
    work = Work.of(config, facts.num_train, 0)
    parcels = parcels_of(config, cluster, work.algorithm, facts)
    parts = parcels.parts
    slowest = float(mean_seconds(cluster, work.plan.batches).max()) + parcels.inside_seconds
    coding = sum(part.coding_seconds for part in parts)
    return StepTimes(slowest, sum(part.seconds for part in parts), cluster.interference, coding)


def title(cluster: Cluster) -> str:
    """A cluster's name, and a digest of everything that determines its times, whatever its number of workers."""
    tree = asdict(cluster)
    del tree["name"], tree["description"]
    if not tree["coding_ns"]:  # as in files of before there were such costs
        del tree["coding_ns"]
    tree["workers"] = [{key: value for key, value in group.items() if key != "count"} for group in tree["workers"]]
    del tree["network"]["allreduce_workers"]
    return f"{cluster.name} {hashlib.blake2b(json.dumps(tree).encode(), digest_size=3).hexdigest()}"


def _refuse(config: Config) -> None:
    """What a simulation would have to leave out."""
    emulated, cluster = config.emulated, config.cluster
    kind = algorithm_class(config.algorithm.name)
    if kind.name not in RULES and not kind.is_served:
        known = f"choose from {', '.join(RULES)}, or subclass one of them and keep its name"
        raise ConfigError(f"algorithm.name={config.algorithm.name}: {kind.name} has no timing rule to simulate; {known}")
    if emulated is not None:
        raise ConfigError(f"emulate: {emulated} is for real runs; describe workers and network in the cluster file")
    if cluster.replan_epochs is not None:
        raise ConfigError(f"cluster.replan_epochs={cluster.replan_epochs}: is not simulated; use null")


def _set_length(config: Config, steps: int) -> None:
    """As many epochs as hold ``steps`` steps of worker 0, and of the schedule what lies in them."""
    schedule, num_train = config.schedule, task_facts(config).num_train
    if schedule.steps is not None:
        schedule.steps, schedule.warmup_steps = steps, min(schedule.warmup_steps, steps)
        config.algorithm.period = [[first, k] for first, k in config.period_by_epoch if first < steps]
        if config.evaluation.every_steps is not None:
            config.evaluation.every_steps = min(config.evaluation.every_steps, steps)
        validate(config)
        return
    # Periods by speed make epochs of different lengths: none is shorter than the shortest now.
    shortest = min(Work.of(config, num_train, 0).steps)
    schedule.epochs = -(-steps // shortest)
    schedule.decay_epochs = [epoch for epoch in schedule.decay_epochs if epoch < schedule.epochs]
    schedule.warmup_epochs = min(schedule.warmup_epochs, schedule.epochs)
    config.algorithm.period = [[first, k] for first, k in config.period_by_epoch if first < schedule.epochs]
    config.evaluation.every_epochs = min(config.evaluation.every_epochs, schedule.epochs)
    validate(config)


def _meetings(config: Config, work: Work) -> list[int]:
    """After how many steps all workers of a run with a server meet: at the ends of epochs, and to evaluate."""
    every = config.evaluation.every_steps
    ends = list(itertools.accumulate(work.steps))
    return ends if every is None else [*ends, *range(every, ends[-1], every)]


def simulate(
    cluster: Cluster,
    config: Config,
    *,
    steps: int | None = None,
    span_steps: int = 0,
    progress: Callable[[], object] = lambda: None,
) -> Simulated:
    """Go through the run of ``config`` on ``cluster``.

    Args:
        steps: stop after so many of worker 0; None: the whole run.
        span_steps: keep spans of so many steps in the middle.
        progress: called after every step.
    """
    facts = task_facts(config)
    work = Work.of(config, facts.num_train, 0)
    total = sum(work.steps) if steps is None else min(steps, sum(work.steps))
    algorithm = work.algorithm
    by_speed = {config.speeds[0]: algorithm.period}
    for rank, speed in enumerate(config.speeds):
        if speed not in by_speed:
            same = algorithm.same_period
            by_speed[speed] = algorithm.period if same else Work.of(config, facts.num_train, rank).algorithm.period
    course = Course(
        algorithm=algorithm.name,
        periods=[by_speed[speed] for speed in config.speeds],
        parcels=parcels_of(config, cluster, algorithm, facts),
        times=step_times(cluster, work.plan.batches, config.seed),
        fragments=algorithm.fragments,
        delay=algorithm.delay,
        node_size=config.cluster.workers_per_replica,
        interference=cluster.interference,
        gradient_overlap=cluster.gradient_overlap,
    )
    sample = SpanSample(chosen_ranks(cluster), middle_window(total, span_steps)) if span_steps else None
    if isinstance(algorithm, ASGD):
        link = course.parcels.server
        assert link is not None
        meetings = _meetings(config, work)
        served = ServedTimeline(course, total, link, bound=algorithm.bound, meetings=meetings, sample=sample)
        return Simulated(config, cluster, work, served.run(progress))
    return Simulated(config, cluster, work, Timeline(course, total, sample=sample).run(progress))
