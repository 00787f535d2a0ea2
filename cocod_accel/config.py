"""The typed configuration tree: strict loading, merging, overrides, validation of the whole.

YAML files are merged in order, then ``key.sub=value`` overrides. Unknown keys, wrong types and impossible combinations
are a :class:`ConfigError` of one line, found before any process waits for another.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from cocod_accel.algorithms import ALGORITHMS, CoCoDSGD
from cocod_accel.comm import Link
from cocod_accel.periods import AUTO
from cocod_accel.rounds import Period
from cocod_accel.sharding import check_speeds, plan_workers
from cocod_accel.strict import ConfigError as ConfigError
from cocod_accel.strict import first_line, merge_strictly, read_yaml, require, require_choice, resolved, save_yaml

logger = logging.getLogger(__name__)

#: What ``cluster.speeds`` says to have them measured.
MEASURE = "measure"


@dataclass
class TaskConfig:
    """What is learned from which data."""

    #: A name from `cocod list`, or `module:callable` that returns (train, test).
    name: str = "fashion_small"
    #: Folder with the data sets that are not embedded.
    data_dir: str = "data"
    #: Let torchvision download what is missing.
    download: bool = False
    #: Random crops and flips for training images; null: the task's own choice.
    augment: bool | None = None
    #: Images of the built-in sets become so many times smaller in both directions, by the mean of their pixels.
    shrink: int = 1
    #: Label-skewed shards: every worker's classes are drawn from a Dirichlet distribution with this alpha. The smaller, the
    #: fewer classes a worker has; 0.1 gives most workers two or three. null: all shards alike.
    label_skew: float | None = None
    #: Use only the first training samples, for smoke tests.
    train_limit: int | None = None
    #: Use only the first test samples.
    test_limit: int | None = None
    #: Keyword arguments of a `module:callable`, or of the synthetic task.
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class ModelConfig:
    """What is trained."""

    #: A name from `cocod list`, or `module:callable` that returns a torch.nn.Module.
    name: str = "small_resnet"
    #: Keyword arguments of a `module:callable`.
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class AlgorithmConfig:
    """How workers keep together."""

    #: ssgd, pipe, local, cocod or asynlocal.
    name: str = "cocod"
    #: Steps a round: an int, (first epoch, period) pairs such as [[0, 1], [10, 5]], or (local, cocod) `auto`: as many as
    #: hide an average, measured before training and after every epoch.
    period: Any = 5
    #: What becomes of momentum and other optimizer state at a merge: keep, reset, or (local, asynlocal) average.
    optimizer_state: str = "keep"
    #: How models travel in rounds (local, cocod, asynlocal): fp32, or bf16 or int8 of the change since the last mean.
    payload: str = "fp32"
    #: Parts that a model is sent in, one after the other in a round of cocod; at most the shortest period.
    fragments: int = 1
    #: For long rounds and workers whose data differ: how far a merge of cocod pulls a worker back towards the mean. 0: not
    #: at all; below 1.
    pull_back: float = 0.0
    #: For the same: the momentum with which the mean moves (local, cocod, asynlocal). 0: none; below 1.
    outer_momentum: float = 0.0


@dataclass
class OptimizerConfig:
    """What a worker steps with."""

    #: sgd, adam or adamw.
    name: str = "sgd"
    #: The rate of one worker with the base batch; scaled up for all workers together as in Remark 4 of the paper.
    learning_rate: float = 0.01
    #: false: every worker steps with learning_rate as it is.
    scale_learning_rate: bool = True
    #: Of sgd.
    momentum: float = 0.9
    #: L2 penalty; adamw decays weights instead.
    weight_decay: float = 1e-4
    #: Nesterov's momentum, of sgd.
    nesterov: bool = False


@dataclass
class ScheduleConfig:
    """How long to train, and with which rates."""

    #: Passes over the training set.
    epochs: int = 8
    #: Epochs over which the rate grows, step by step, from the base to the scaled one.
    warmup_epochs: float = 1.0
    #: The rate is multiplied by decay_factor at the beginning of these epochs, counted from 0.
    decay_epochs: list[int] = field(default_factory=list)
    #: What the rate is multiplied by there.
    decay_factor: float = 0.1


@dataclass
class ClusterConfig:
    """Who trains: how many workers, how fast they are, who gets which batches."""

    #: How many workers are meant. The run refuses to start if another number is there.
    num_workers: int = 2
    #: Relative speeds, one per worker; `measure`: found before training; a speeds.json: those of that run; null: all alike.
    speeds: Any = None
    #: How long `measure` takes at least, after its warm-up.
    measure_seconds: float = 8.0
    #: Workers that share a node, next to each other in rank: they sum their gradients in every step, and the algorithm
    #: runs between nodes. 1: every worker is on its own.
    workers_per_replica: int = 1
    #: Give faster workers larger batches and shards (section 3.2 of the paper).
    proportional: bool = False
    #: Keep this sum of batches; null: the slowest worker takes batch_size.
    global_batch: int | None = None
    #: Samples are reshuffled every epoch `within` every worker's shard, or `across` all of them.
    shuffle: str = "within"
    #: Every so many epochs, move batches to the workers' speeds of the last one; the global batch stays. null: never.
    replan_epochs: int | None = None
    #: cpu, or auto for whatever accelerate finds.
    device: str = "auto"
    #: After a connection broke, how long to wait for word of who died.
    dead_seconds: float = 30.0
    #: How long a worker may be silent before it counts as frozen and ends the run on all others.
    frozen_seconds: float = 120.0


@dataclass
class LinkConfig:
    """A link between neighbours in a ring."""

    #: Goodput in Mbit/s; null: the bandwidth that is there.
    bandwidth_mbit: float | None = None
    #: Of every message of the ring.
    latency_ms: float = 0.0


@dataclass
class EmulateConfig:
    """Machines and networks that are not there. A run that emulates anything is labelled so wherever it appears."""

    #: How many times longer each worker computes, e.g. [1, 1, 2, 2]; an entry may be (first epoch, factor) pairs.
    slowdown: Any = None
    #: Collectives take what a ring all-reduce on this link would, in the background.
    link: LinkConfig = field(default_factory=LinkConfig)
    #: Written by `cocod simulate`: the cluster that this run was simulated on. Such a run was never trained.
    cluster: str | None = None


@dataclass
class EvaluationConfig:
    """When the averaged model is tested, and against which accuracies."""

    #: Evaluate after every so many epochs; the last one always.
    every_epochs: int = 1
    #: Of images that are evaluated, on every worker.
    batch_size: int = 250
    #: Accuracies whose first reaching is reported as time to accuracy.
    targets: list[float] = field(default_factory=lambda: [0.7, 0.75, 0.8, 0.85])
    #: Also take the averaged model's loss on the training data, built-in ones not augmented: ``mean_train_loss`` in rows,
    #: where ``train_loss`` is the mean of what the workers' own models lost while they trained.
    training_loss: bool = False


@dataclass
class CheckpointConfig:
    """When all workers save where they are, besides the beginning; SIGUSR1 and SIGTERM to any of them ask for it too."""

    #: Save every so many steps; null: not by steps.
    every_steps: int | None = None
    #: Save every so many epochs; null: not by epochs.
    every_epochs: int | None = 1
    #: Save every so many minutes; null: not by time.
    every_minutes: float | None = None
    #: How many checkpoints to keep.
    keep: int = 2
    #: auto: go on with an unfinished run of this name and configuration; never; or a checkpoint or run folder to go on from.
    resume: str = "auto"


@dataclass
class LoggingConfig:
    """What is written down, and where to."""

    #: A row of training metrics every so many steps.
    every_steps: int = 20
    #: Any of wandb, tensorboard; or none.
    trackers: list[str] = field(default_factory=lambda: ["wandb"])
    #: online, offline or disabled.
    wandb_mode: str = "offline"
    #: wandb's project.
    project: str = "cocod_accel"
    #: Runs of one comparison share a group.
    group: str | None = None
    #: Keep one row for every computation and communication, for timelines.
    spans: bool = True


@dataclass
class Config:
    """One run."""

    #: Name of the run and of its folder; null: algorithm, task and seed.
    name: str | None = None
    #: Folder in which the run folder is made.
    output: str = "runs"
    #: Of the model, the shuffling and everything else that is drawn.
    seed: int = 0
    #: The batch of one worker (the slowest one, if proportional).
    batch_size: int = 32
    #: no, or bf16 for autocast.
    precision: str = "no"
    #: Processes that load data for each worker; 0 in the training process. Only for data that is not held in memory.
    loader_workers: int = 0
    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    emulate: EmulateConfig = field(default_factory=EmulateConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def run_name(self) -> str:
        sampling = "-ps" if self.cluster.proportional else ""
        return self.name or f"{self.algorithm.name}{sampling}-{self.task.name.replace(':', '.')}-seed{self.seed}"

    @property
    def speeds(self) -> list[float]:
        """Every worker's, all alike as long as they have not been measured."""
        speeds = self.cluster.speeds
        return [1.0] * self.cluster.num_workers if speeds is None or speeds == MEASURE else list(speeds)

    def slowdown(self, rank: int, epoch: int) -> float:
        """How many times longer worker ``rank`` is to compute in an epoch, counted from 0."""
        if self.emulate.slowdown is None:
            return 1.0
        entry = self.emulate.slowdown[rank]
        pairs = entry if isinstance(entry, list) else [[0, entry]]
        return float([factor for first, factor in pairs if first <= epoch][-1])

    @property
    def link(self) -> Link | None:
        """The link to emulate."""
        link = self.emulate.link
        return Link(link.bandwidth_mbit, link.latency_ms) if link.bandwidth_mbit is not None or link.latency_ms else None

    @property
    def emulated(self) -> str | None:
        """What of this run is emulated, in words; None: nothing."""
        slowdown = self.emulate.slowdown
        parts = [] if slowdown is None else [f"slowdown {slowdown}"]
        parts += [] if self.link is None else [f"link {self.link}"]
        parts += [] if self.emulate.cluster is None else [f"cluster {self.emulate.cluster}"]
        return "; ".join(parts) or None

    @property
    def clock(self) -> str:
        """What its seconds are: real, emulated or simulated."""
        if self.emulate.cluster is not None:
            return "simulated"
        return "real" if self.emulated is None else "emulated"

    @property
    def has_auto_period(self) -> bool:
        return bool(self.algorithm.period == AUTO)

    @property
    def period_by_epoch(self) -> list[tuple[int, int]]:
        """(first epoch, period) pairs; of ``auto``, the shortest there may be, as long as none has been decided."""
        if self.has_auto_period:
            return [(0, self.algorithm.fragments)]
        return list(Period.parse(_plain(self.algorithm.period)).schedule)


# ------------------------------------------------------------------------------------------------ loading


def load_config(arguments: list[str]) -> Config:
    """Merge the YAML files and the ``key=value`` overrides among ``arguments``, in that order, and validate."""
    config = merged_config(arguments)
    validate(config)
    return config


def merged_config(arguments: list[str]) -> Config:
    """The same without validating the whole: single keys are known and have their types, and that is all."""
    tree = OmegaConf.structured(Config)
    files = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    for file in files:
        tree = merge_strictly(Config, tree, read_yaml(file), file)
    for override in overrides:
        key, _, _ = override.partition("=")
        try:
            given = OmegaConf.from_dotlist([override])
        except Exception as error:
            raise ConfigError(f"{override}: not a key=value override ({first_line(error)}); write e.g. seed=1") from error
        tree = merge_strictly(Config, tree, given, f"override {key}")
    config = resolved(tree)
    assert isinstance(config, Config)
    config.cluster.speeds = _read_speeds(config.cluster.speeds)
    return config


def load_training_config(arguments: list[str]) -> Config:
    """The same, for a run that is to be trained."""
    config = load_config(arguments)
    cluster = config.emulate.cluster
    require(cluster is None, "emulate.cluster", cluster, "marks a simulated run; give emulate.cluster=null to train it")
    return config


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration; loading it gives an equal one."""
    save_yaml(config, path)


def flattened(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots."""
    rows: dict[str, Any] = {}
    for key, value in tree.items():
        rows.update(flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return rows


def _read_speeds(given: Any) -> Any:
    """The speeds in the speeds.json of an earlier run, if that is what was given."""
    if not isinstance(given, str) or given == MEASURE:
        return given
    try:
        saved = json.loads(Path(given).read_text())
        if saved.get("emulated"):
            logger.warning("cluster.speeds=%s: measured on emulated workers (%s)", given, saved["emulated"])
        return saved["speeds"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"cluster.speeds={given}: must be a list, {MEASURE}, or the speeds.json of a run ({first_line(error)})"
        ) from error


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


# --------------------------------------------------------------------------------------------- validation


def validate(config: Config) -> None:
    """Refuse values and combinations that cannot be trained, with one line."""
    cluster, schedule, task = config.cluster, config.schedule, config.task
    require(config.name is None or "/" not in config.name, "name", config.name, "must not contain a slash")
    for key, value, least in (
        ("seed", config.seed, 0),
        ("batch_size", config.batch_size, 1),
        ("loader_workers", config.loader_workers, 0),
        ("schedule.epochs", schedule.epochs, 1),
        ("cluster.num_workers", cluster.num_workers, 1),
        ("cluster.workers_per_replica", cluster.workers_per_replica, 1),
        ("cluster.replan_epochs", cluster.replan_epochs, 1),
        ("evaluation.every_epochs", config.evaluation.every_epochs, 1),
        ("evaluation.batch_size", config.evaluation.batch_size, 1),
        ("logging.every_steps", config.logging.every_steps, 1),
        ("checkpoint.every_steps", config.checkpoint.every_steps, 1),
        ("checkpoint.every_epochs", config.checkpoint.every_epochs, 1),
        ("checkpoint.keep", config.checkpoint.keep, 1),
        ("task.train_limit", task.train_limit, 1),
        ("task.test_limit", task.test_limit, 1),
        ("task.shrink", task.shrink, 1),
    ):
        require(value is None or value >= least, key, value, f"must be at least {least}")
    rows: list[tuple[str, float, str, Callable[[float], bool]]] = [
        ("optimizer.learning_rate", config.optimizer.learning_rate, "must be positive", lambda v: v > 0),
        ("optimizer.momentum", config.optimizer.momentum, "must be in [0, 1)", lambda v: 0 <= v < 1),
        ("optimizer.weight_decay", config.optimizer.weight_decay, "must not be negative", lambda v: v >= 0),
        ("schedule.warmup_epochs", schedule.warmup_epochs, "must not be negative", lambda v: v >= 0),
        (
            "checkpoint.every_minutes",
            1.0 if config.checkpoint.every_minutes is None else config.checkpoint.every_minutes,
            "must be positive",
            lambda v: v > 0,
        ),
        ("cluster.dead_seconds", cluster.dead_seconds, "must be positive", lambda v: v > 0),
        ("cluster.frozen_seconds", cluster.frozen_seconds, "must be positive", lambda v: v > 0),
        ("cluster.measure_seconds", cluster.measure_seconds, "must not be negative", lambda v: v >= 0),
        ("schedule.decay_factor", schedule.decay_factor, "must be in (0, 1]", lambda v: 0 < v <= 1),
    ]
    rows += [
        (f"algorithm.{name}", value, "must be in [0, 1)", lambda v: 0 <= v < 1)
        for name, value in (
            ("pull_back", config.algorithm.pull_back),
            ("outer_momentum", config.algorithm.outer_momentum),
        )
    ]
    if task.label_skew is not None:
        rows.append(("task.label_skew", task.label_skew, "must be positive; null: shards alike", lambda v: v > 0))
        across = cluster.shuffle == "across"
        require(not across, "task.label_skew", task.label_skew, "needs shards that last; use cluster.shuffle=within")
    for key, number, rule, good in rows:
        require(math.isfinite(number) and good(number), key, number, rule)
    require(
        not config.optimizer.nesterov or config.optimizer.momentum > 0,
        "optimizer.nesterov",
        True,
        "needs optimizer.momentum above 0",
    )
    for key, text, choices in (
        ("algorithm.name", config.algorithm.name, list(ALGORITHMS)),
        ("optimizer.name", config.optimizer.name, ["sgd", "adam", "adamw"]),
        ("precision", config.precision, ["no", "bf16"]),
        ("cluster.device", cluster.device, ["auto", "cpu"]),
        ("cluster.shuffle", cluster.shuffle, ["within", "across"]),
        ("logging.wandb_mode", config.logging.wandb_mode, ["online", "offline", "disabled"]),
        *((f"logging.trackers[{i}]", t, ["wandb", "tensorboard"]) for i, t in enumerate(config.logging.trackers)),
    ):
        require_choice(text, key, choices)
    kind = ALGORITHMS[config.algorithm.name]
    for key, text, allowed in (
        ("algorithm.optimizer_state", config.algorithm.optimizer_state, kind.optimizer_policies),
        ("algorithm.payload", config.algorithm.payload, kind.payloads),
    ):
        require(text in allowed, key, text, f"is not for {config.algorithm.name}; choose from {', '.join(allowed)}")
    _validate_schedule(config)
    _validate_cluster(config)
    _validate_nodes(config)
    _validate_emulation(config)
    for index, target in enumerate(config.evaluation.targets):
        require(0 < target <= 1, f"evaluation.targets[{index}]", target, "must be a share in (0, 1], e.g. 0.85")
    require(
        config.evaluation.every_epochs <= schedule.epochs,
        "evaluation.every_epochs",
        config.evaluation.every_epochs,
        f"is more than schedule.epochs={schedule.epochs}, so nothing would ever be evaluated",
    )


def _validate_schedule(config: Config) -> None:
    epochs = config.schedule.epochs
    previous = 0
    for index, epoch in enumerate(config.schedule.decay_epochs):
        key = f"schedule.decay_epochs[{index}]"
        require(epoch > previous, key, epoch, "must be positive and in increasing order")
        kept = [value for value in config.schedule.decay_epochs if value < epochs]
        fix = f"schedule.decay_epochs={kept}".replace(" ", "")
        require(epoch < epochs, key, epoch, f"is after the last epoch, for schedule.epochs={epochs}; say {fix}")
        previous = epoch
    require(
        config.schedule.warmup_epochs <= epochs,
        "schedule.warmup_epochs",
        config.schedule.warmup_epochs,
        f"is more than schedule.epochs={epochs}",
    )
    name, given = config.algorithm.name, config.algorithm.period
    if config.has_auto_period:
        kind = ALGORITHMS[name]
        is_for = kind.same_period and not kind.reduces_gradients
        require(is_for, "algorithm.period", given, f"is for local and cocod, not {name}; give a number of steps")
    require(
        config.has_auto_period or not isinstance(given, str),
        "algorithm.period",
        given,
        f"must be a number of steps such as 5, pairs such as [[0, 1], [10, 5]], or {AUTO}",
    )
    try:
        pairs = config.period_by_epoch
    except (TypeError, ValueError) as error:
        message = (
            str(error).replace("step 0", "epoch 0").replace("first steps", "first epochs").replace("(200, 5)", "(10, 5)")
        )
        raise ConfigError(f"algorithm.{message}") from error
    _validate_merge(config)
    fragments = config.algorithm.fragments
    if fragments != 1:
        require(config.algorithm.name == "cocod", "algorithm.fragments", fragments, "is only for cocod; use 1")
        try:
            CoCoDSGD(pairs, payload=config.algorithm.payload, fragments=fragments)
        except ValueError as error:
            raise ConfigError(f"algorithm.{error}") from error
    for first, _ in pairs:
        fix = f"algorithm.period={pairs[-1][1]}"
        require(
            first < epochs,
            "algorithm.period",
            pairs,
            f"changes after the last epoch, for schedule.epochs={epochs}; say {fix}",
        )


def _validate_merge(config: Config) -> None:
    options = config.algorithm
    for key, value, of in (
        ("pull_back", options.pull_back, ("cocod",)),
        ("outer_momentum", options.outer_momentum, ("local", "cocod", "asynlocal")),
    ):
        if value:
            require(options.name in of, f"algorithm.{key}", value, f"is not for {options.name}; use 0, or {', '.join(of)}")
            require(options.payload == "fp32", f"algorithm.{key}", value, "goes with algorithm.payload=fp32 only")
            require(options.fragments == 1, f"algorithm.{key}", value, "goes with algorithm.fragments=1 only")


def _validate_cluster(config: Config) -> None:
    cluster = config.cluster
    if cluster.speeds is not None and cluster.speeds != MEASURE:
        _require_list(cluster.speeds, "cluster.speeds", f"must be a list such as [1, 2], or {MEASURE}")
        _require_length(cluster.speeds, "cluster.speeds", cluster.num_workers)
        for index, speed in enumerate(cluster.speeds):
            require(_is_number(speed), f"cluster.speeds[{index}]", speed, "is not a number")
        cluster.speeds = [float(speed) for speed in cluster.speeds]
        try:
            check_speeds(cluster.speeds)
        except ValueError as error:
            raise ConfigError(f"cluster.{error}") from error
    workers, by_steps = cluster.num_workers, config.algorithm.name == "asynlocal"
    if cluster.global_batch is not None:
        try:
            plan_workers(
                config.speeds,
                num_samples=1 << 62,
                base_batch=config.batch_size,
                global_batch=cluster.global_batch,
                period=1 if by_steps else None,
            )
        except ValueError as error:
            raise ConfigError(f"cluster.{error}") from error
    if cluster.proportional:
        require(
            cluster.speeds is not None,
            "cluster.proportional",
            True,
            f"needs cluster.speeds: one relative speed for each of {workers} workers, or {MEASURE}",
        )
        require(
            not by_steps,
            "cluster.proportional",
            True,
            "does not go with asynlocal, which takes equal batches; set cluster.proportional=false",
        )
    require(
        cluster.replan_epochs is None or cluster.proportional,
        "cluster.replan_epochs",
        cluster.replan_epochs,
        "moves batches between workers, which needs cluster.proportional=true",
    )


def _validate_nodes(config: Config) -> None:
    cluster, name = config.cluster, config.algorithm.name
    size = cluster.workers_per_replica
    if size == 1:
        return
    key = "cluster.workers_per_replica"
    require(cluster.num_workers % size == 0, key, size, f"does not divide cluster.num_workers={cluster.num_workers}")
    require(
        not ALGORITHMS[name].reduces_gradients, key, size, f"is not for {name}, which sums gradients over all workers; use 1"
    )
    payload = config.algorithm.payload
    require(payload == "fp32", "algorithm.payload", payload, f"is not sent between nodes ({key}={size}); use fp32")
    if not ALGORITHMS[name].same_period:
        speeds = [] if cluster.speeds == MEASURE else config.speeds
        uneven = cluster.speeds == MEASURE or any(speed != speeds[i - i % size] for i, speed in enumerate(speeds))
        require(not uneven, key, size, f"with {name} needs cluster.speeds that are equal inside every node")


def _validate_emulation(config: Config) -> None:
    link, slowdown = config.emulate.link, config.emulate.slowdown
    if link.bandwidth_mbit is not None:
        good = math.isfinite(link.bandwidth_mbit) and link.bandwidth_mbit > 0
        require(good, "emulate.link.bandwidth_mbit", link.bandwidth_mbit, "must be positive; null: no limit")
    good = math.isfinite(link.latency_ms) and link.latency_ms >= 0
    require(good, "emulate.link.latency_ms", link.latency_ms, "must not be negative")
    if slowdown is None:
        return
    _require_list(slowdown, "emulate.slowdown", "must be a list such as [1, 2], one factor per worker")
    _require_length(slowdown, "emulate.slowdown", config.cluster.num_workers)
    for index, entry in enumerate(slowdown):
        key = f"emulate.slowdown[{index}]"
        pairs = entry if isinstance(entry, list) else [[0, entry]]
        shaped = bool(pairs) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
        require(shaped, key, entry, "must be a factor, or (first epoch, factor) pairs such as [[0, 1], [2, 4]]")
        firsts = [first for first, _ in pairs]
        in_order = all(type(first) is int for first in firsts) and firsts == sorted(set(firsts)) and firsts[0] == 0
        require(in_order, key, entry, "must begin at epoch 0, and its epochs must increase")
        require(
            firsts[-1] < config.schedule.epochs, key, entry, f"changes after epoch {config.schedule.epochs - 1}, the last"
        )
        for _, factor in pairs:
            good = _is_number(factor) and math.isfinite(factor) and factor >= 1
            require(good, key, factor, "must be finite and at least 1; to emulate a faster worker, slow the others down")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_list(value: object, key: str, rule: str) -> None:
    require(isinstance(value, list), key, value, rule)


def _require_length(values: list[Any], key: str, num_workers: int) -> None:
    rule = f"has {len(values)} entries for cluster.num_workers={num_workers}; give one per worker"
    require(len(values) == num_workers, key, values, rule)
