"""Every setting of a run: its default, and what it means.

The trees of :mod:`cocod_accel.config.loading`; what may not go together is refused in :mod:`cocod_accel.config.rules`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

from cocod_accel.algorithms.rounds import Period
from cocod_accel.comm.emulated import Link
from cocod_accel.theory.hiding import AUTO

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


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
