"""The typed configuration tree: strict loading, merging, overrides, validation of the whole.

YAML files are merged in order, then ``key.sub=value`` overrides. Unknown keys, wrong types and impossible combinations
are a :class:`ConfigError` of one line, found before any process waits for another.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cocod_accel.algorithms import ALGORITHMS
from cocod_accel.rounds import Period
from cocod_accel.sharding import check_speeds, proportional_batches


class ConfigError(ValueError):
    """Something is wrong with the configuration; the message is one line with the key, the value and the fix."""


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
    #: Use only the first samples, for smoke tests.
    train_limit: int | None = None
    test_limit: int | None = None
    #: Keyword arguments of a `module:callable`, or of the synthetic task.
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class ModelConfig:
    #: A name from `cocod list`, or `module:callable` that returns a torch.nn.Module.
    name: str = "small_resnet"
    #: Keyword arguments of a `module:callable`.
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class AlgorithmConfig:
    #: ssgd, pipe, local, cocod or asynlocal.
    name: str = "cocod"
    #: Steps a round: an int, or (first epoch, period) pairs such as [[0, 1], [10, 5]].
    period: Any = 5


@dataclass
class OptimizerConfig:
    #: The rate of one worker with the base batch; scaled up for all workers together as in Remark 4 of the paper.
    learning_rate: float = 0.01
    scale_learning_rate: bool = True
    momentum: float = 0.9
    weight_decay: float = 1e-4
    nesterov: bool = False


@dataclass
class ScheduleConfig:
    epochs: int = 8
    #: Epochs over which the rate grows, step by step, from the base to the scaled one.
    warmup_epochs: float = 1.0
    #: The rate is multiplied by decay_factor at the beginning of these epochs, counted from 0.
    decay_epochs: list[int] = field(default_factory=list)
    decay_factor: float = 0.1


@dataclass
class ClusterConfig:
    #: How many workers are meant. The run refuses to start if another number is there.
    num_workers: int = 2
    #: Relative speeds, one per worker; null: all alike.
    speeds: list[float] | None = None
    #: Give faster workers larger batches and shards (section 3.2 of the paper).
    proportional: bool = False
    #: cpu, or auto for whatever accelerate finds.
    device: str = "auto"


@dataclass
class EvaluationConfig:
    every_epochs: int = 1
    batch_size: int = 250
    #: Accuracies whose first reaching is reported as time to accuracy.
    targets: list[float] = field(default_factory=lambda: [0.7, 0.75, 0.8, 0.85])


@dataclass
class LoggingConfig:
    #: A row of training metrics every so many steps.
    every_steps: int = 20
    #: Any of wandb, tensorboard; or none.
    trackers: list[str] = field(default_factory=lambda: ["wandb"])
    #: online, offline or disabled.
    wandb_mode: str = "offline"
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
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def run_name(self) -> str:
        return self.name or f"{self.algorithm.name}-{self.task.name.replace(':', '.')}-seed{self.seed}"

    @property
    def speeds(self) -> list[float]:
        return [1.0] * self.cluster.num_workers if self.cluster.speeds is None else list(self.cluster.speeds)

    @property
    def period_by_epoch(self) -> list[tuple[int, int]]:
        return list(Period.parse(_plain(self.algorithm.period)).schedule)


# ------------------------------------------------------------------------------------------------ loading


def load_config(arguments: list[str]) -> Config:
    """Merge the YAML files and the ``key=value`` overrides among ``arguments``, in that order, and validate."""
    tree = OmegaConf.structured(Config)
    files = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    for file in files:
        tree = _merge(tree, _read(file), file)
    for override in overrides:
        key, _, _ = override.partition("=")
        try:
            given = OmegaConf.from_dotlist([override])
        except Exception as error:
            raise ConfigError(f"{override}: not a key=value override ({_first_line(error)}); write e.g. seed=1") from error
        tree = _merge(tree, given, f"override {key}")
    try:
        OmegaConf.resolve(tree)
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'config'}: {_first_line(error)}") from error
    assert isinstance(config, Config)
    validate(config)
    return config


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration; loading it gives an equal one."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))


def _read(file: str) -> DictConfig:
    path = Path(file)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        hint = f"did you mean {path.parent / near[0]}?" if near else "give a YAML file, or key=value"
        raise ConfigError(f"{file}: no such file; {hint}")
    try:
        tree = OmegaConf.load(path)
    except Exception as error:
        raise ConfigError(f"{file}: not valid YAML: {_first_line(error)}") from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{file}: must hold keys and values, not a list")
    return tree


def _merge(tree: Any, given: DictConfig, source: str) -> Any:
    _check_keys(Config, OmegaConf.to_container(given, resolve=False), "", source)
    try:
        return OmegaConf.merge(tree, given)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{source}: {error.full_key or ''}: {_first_line(error)}") from error


def _check_keys(node: type, given: Any, prefix: str, source: str) -> None:
    if not isinstance(given, dict):
        raise ConfigError(f"{source}: {prefix.rstrip('.')} must hold keys and values, not {given!r}")
    known = {f.name: f for f in fields(node)}
    for key, value in given.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), list(known), n=1) or _elsewhere(str(key))
            hint = f"did you mean {prefix if near[0] in known else ''}{near[0]}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{source}: unknown key {prefix}{key}; {hint}")
        child = known[key].default_factory
        if isinstance(child, type) and is_dataclass(child):
            _check_keys(child, value, f"{prefix}{key}.", source)


def _elsewhere(key: str) -> list[str]:
    """Full names of the keys called ``key`` in any section."""
    found: list[str] = []
    for section in fields(Config):
        if isinstance(section.default_factory, type) and is_dataclass(section.default_factory):
            found += [f"{section.name}.{f.name}" for f in fields(section.default_factory) if f.name == key]
    return found


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


# --------------------------------------------------------------------------------------------- validation


def validate(config: Config) -> None:
    """Refuse values and combinations that cannot be trained, with one line."""
    cluster, schedule, task = config.cluster, config.schedule, config.task
    _require(config.name is None or "/" not in config.name, "name", config.name, "must not contain a slash")
    for key, value, least in (
        ("seed", config.seed, 0),
        ("batch_size", config.batch_size, 1),
        ("loader_workers", config.loader_workers, 0),
        ("schedule.epochs", schedule.epochs, 1),
        ("cluster.num_workers", cluster.num_workers, 1),
        ("evaluation.every_epochs", config.evaluation.every_epochs, 1),
        ("evaluation.batch_size", config.evaluation.batch_size, 1),
        ("logging.every_steps", config.logging.every_steps, 1),
        ("task.train_limit", task.train_limit, 1),
        ("task.test_limit", task.test_limit, 1),
    ):
        _require(value is None or value >= least, key, value, f"must be at least {least}")
    rows: list[tuple[str, float, str, Callable[[float], bool]]] = [
        ("optimizer.learning_rate", config.optimizer.learning_rate, "must be positive", lambda v: v > 0),
        ("optimizer.momentum", config.optimizer.momentum, "must be in [0, 1)", lambda v: 0 <= v < 1),
        ("optimizer.weight_decay", config.optimizer.weight_decay, "must not be negative", lambda v: v >= 0),
        ("schedule.warmup_epochs", schedule.warmup_epochs, "must not be negative", lambda v: v >= 0),
        ("schedule.decay_factor", schedule.decay_factor, "must be in (0, 1]", lambda v: 0 < v <= 1),
    ]
    for key, number, rule, good in rows:
        _require(math.isfinite(number) and good(number), key, number, rule)
    _require(
        not config.optimizer.nesterov or config.optimizer.momentum > 0,
        "optimizer.nesterov",
        True,
        "needs optimizer.momentum above 0",
    )
    for key, text, choices in (
        ("algorithm.name", config.algorithm.name, list(ALGORITHMS)),
        ("precision", config.precision, ["no", "bf16"]),
        ("cluster.device", cluster.device, ["auto", "cpu"]),
        ("logging.wandb_mode", config.logging.wandb_mode, ["online", "offline", "disabled"]),
        *((f"logging.trackers[{i}]", t, ["wandb", "tensorboard"]) for i, t in enumerate(config.logging.trackers)),
    ):
        near = difflib.get_close_matches(text, choices, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(choices)}"
        _require(text in choices, key, text, f"is not known; {hint}")
    _validate_schedule(config)
    _validate_cluster(config)
    for index, target in enumerate(config.evaluation.targets):
        _require(0 < target <= 1, f"evaluation.targets[{index}]", target, "must be a share in (0, 1], e.g. 0.85")
    _require(
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
        _require(epoch > previous, key, epoch, "must be positive and in increasing order")
        _require(epoch < epochs, key, epoch, f"is after the last epoch; schedule.epochs is {epochs}, counted from 0")
        previous = epoch
    _require(
        config.schedule.warmup_epochs <= epochs,
        "schedule.warmup_epochs",
        config.schedule.warmup_epochs,
        f"is more than schedule.epochs={epochs}",
    )
    try:
        pairs = config.period_by_epoch
    except (TypeError, ValueError) as error:
        message = (
            str(error).replace("step 0", "epoch 0").replace("first steps", "first epochs").replace("(200, 5)", "(10, 5)")
        )
        raise ConfigError(f"algorithm.{message}") from error
    for first, _ in pairs:
        _require(first < epochs, "algorithm.period", pairs, f"changes after the last epoch; schedule.epochs is {epochs}")


def _validate_cluster(config: Config) -> None:
    cluster = config.cluster
    if cluster.speeds is not None:
        _require(
            len(cluster.speeds) == cluster.num_workers,
            "cluster.speeds",
            cluster.speeds,
            f"has {len(cluster.speeds)} entries for cluster.num_workers={cluster.num_workers}; give one per worker",
        )
        try:
            check_speeds(cluster.speeds)
            batches = proportional_batches(config.batch_size, cluster.speeds)
        except ValueError as error:
            raise ConfigError(f"cluster.{error}") from error
        _require(min(batches) > 0, "batch_size", config.batch_size, "leaves a worker without samples")
    if cluster.proportional:
        _require(
            cluster.speeds is not None,
            "cluster.proportional",
            True,
            "needs cluster.speeds, one relative speed per worker",
        )
        _require(
            config.algorithm.name != "asynlocal",
            "cluster.proportional",
            True,
            "does not go with asynlocal, which takes equal batches; set cluster.proportional=false",
        )


def _require(good: bool, key: str, value: object, rule: str) -> None:
    if not good:
        raise ConfigError(f"{key}={value}: {rule}")
