"""Every setting of a run: its default, its meaning, the values it takes, and what a change of it affects.

To add a setting, add its field here and use it: loading, checking, saving, resuming and comparing runs all read this tree.
An option of an algorithm reaches the constructors that have a parameter of the same name:
:mod:`cocod_accel.config.algorithms`. Rules between several settings are in :mod:`cocod_accel.config.rules`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

from cocod_accel.algorithms.rounds import Period
from cocod_accel.comm.emulated import Link
from cocod_accel.config.fields import (
    Affects,
    affected_by,
    affects,
    at_least,
    must,
    not_negative,
    one_of,
    positive,
    within,
)
from cocod_accel.theory.hiding import AUTO

#: The value of ``cluster.speeds`` that has them measured.
MEASURE = "measure"
#: The metric of classification.
ACCURACY = "accuracy"
#: Of accuracy, where none are stated.
DEFAULT_TARGETS = (0.7, 0.75, 0.8, 0.85)
#: Epochs, where neither they nor steps are stated.
DEFAULT_EPOCHS = 8


def may_differ(key: str, affected: Affects) -> bool:
    """Whether two runs may differ in a key, such as ``cluster.num_workers``, without a difference in ``affected``."""
    return not affected_by(key, Config) & affected


def _is_name(name: str) -> bool:
    return "/" not in name and "\0" not in name and name not in (".", "..")


def _is_seed(seed: int) -> bool:
    """Whether torch takes it, with a worker's rank added."""
    return 0 <= seed < 2**63


@dataclass
class TaskConfig:
    """What is learned from which data."""

    #: A name from `cocod list`, or `module:callable` that returns (train, test).
    name: str = "fashion_small"
    #: Folder with the data sets that are not embedded.
    data_dir: str = field(default="data", metadata=affects(Affects.NOTHING))
    #: Let torchvision download what is missing.
    download: bool = field(default=False, metadata=affects(Affects.NOTHING))
    #: Random crops and flips for training images; null: the task's own choice.
    augment: bool | None = None
    #: Downscale the images of the built-in sets by this factor per side, averaging pixels.
    shrink: int = field(default=1, metadata=at_least(1))
    #: Label-skewed shards: each worker's classes are drawn from a Dirichlet distribution with this alpha. The smaller it is,
    #: the fewer classes a worker has; 0.1 gives most workers two or three. 0: samples are sorted by class (text: by folder)
    #: and cut into shards. null: all shards have the same distribution.
    label_skew: float | None = field(default=None, metadata=not_negative(null="all shards have the same distribution"))
    #: `cross_entropy`, `mse`, `model` (the model returns its loss), or `module:callable` of (outputs, targets).
    loss: str = "cross_entropy"
    #: Any of `accuracy`, `bits_per_byte`, `squared_error`, `loss`, or `module:callable`; targets are of the first.
    #: []: accuracy, and bits_per_byte of text.
    metrics: list[str] = field(default_factory=list)
    #: Use only the first training samples, for smoke tests; of text, sequences spread evenly over it.
    train_limit: int | None = field(default=None, metadata=at_least(1))
    #: Use only the first test samples; of text, sequences spread evenly over it.
    test_limit: int | None = field(default=None, metadata=at_least(1))
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
class OuterConfig:
    """An outer optimizer: SGD on the mean of the workers' updates, as in DiLoCo. The defaults adopt the mean as it is."""

    #: Learning rate of the outer step; 1 goes all the way to the mean.
    rate: float = field(default=1.0, metadata=positive())
    #: Momentum of the outer step.
    momentum: float = field(default=0.0, metadata=within("[0, 1)"))
    #: Nesterov momentum; requires momentum above 0.
    nesterov: bool = False

    def build(self) -> Any:
        """What the algorithms take."""
        from cocod_accel.averaging.rules import Outer

        return Outer(rate=self.rate, momentum=self.momentum, nesterov=self.nesterov)


@dataclass
class AlgorithmConfig:
    """How workers keep their models together."""

    #: ssgd, pipe, local, cocod, asynlocal, diloco or streaming_diloco; or `module:Class`, your own subclass of
    #: `cocod_accel.Algorithm`.
    name: str = "cocod"
    #: Steps per round: an int, (first epoch, period) pairs such as [[0, 1], [10, 5]] (with schedule.steps: first steps), or
    #: (local, cocod) `auto`: as many as hide an average, measured before training and after every epoch.
    period: Any = 5
    #: What happens to momentum and other optimizer state at a merge: keep, reset, or (local, asynlocal) average.
    optimizer_state: str = "keep"
    #: Steps after which a mean is merged (cocod), at most the longest period; `auto`: as few as hide it, measured before
    #: training. null: at its round's end, as in the paper (streaming_diloco: after 1 step).
    delay: Any = None
    #: How models are sent: fp32, or bf16, int8, int4, ternary or topk:SHARE of the change since the last mean. For gradients
    #: (ssgd, pipe) the same, and qsgd:BITS or terngrad. `auto` (local, cocod): the longest of fp32, bf16, int8, int4 and
    #: ternary that the shortest rounds hide, measured before training.
    payload: str = "fp32"
    #: Send the model in this many parts, one after the other within a round; at most the shortest period.
    fragments: int = field(default=1, metadata=at_least(1))
    #: Share of its own progress since the launch that a worker keeps at a merge (cocod). 1: all of it, as in the paper; 0:
    #: workers restart from the common point. For long rounds and workers whose data differ.
    own_share: float = field(default=1.0, metadata=within("[0, 1]"))
    #: The part of its own parameters that a worker keeps at a merge (streaming_diloco). null: 0.5.
    mix: float | None = field(default=None, metadata=within("[0, 1]"))
    #: Outer optimizer for the mean update (all that average models). null: adopt the mean, as in the paper (diloco and
    #: streaming_diloco: Nesterov with rate 0.7 and momentum 0.9).
    outer: OuterConfig | None = None
    #: Keyword arguments of a `module:Class`, besides the options above that its constructor takes.
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class OptimizerConfig:
    """The optimizer of each worker."""

    #: sgd, adam, adamw, or muon: torch's Muon (from torch 2.9) for matrices of hidden layers and AdamW for all else.
    name: str = field(default="sgd", metadata=one_of("sgd", "adam", "adamw", "muon"))
    #: The rate of one worker with the base batch; scaled up for all workers together as in Remark 4 of the paper.
    learning_rate: float = field(default=0.01, metadata=positive())
    #: false: every worker uses learning_rate as it is.
    scale_learning_rate: bool = True
    #: Momentum of sgd.
    momentum: float = field(default=0.9, metadata=within("[0, 1)"))
    #: L2 penalty; adamw and muon decay weights instead.
    weight_decay: float = field(default=1e-4, metadata=not_negative())
    #: Nesterov momentum for sgd.
    nesterov: bool = False
    #: Scale a worker's gradients down to at most this norm before every step; null: as they are.
    clip_norm: float | None = field(default=None, metadata=positive(null="as they are"))
    #: Compute each batch in this many pieces and add up their gradients: the same step in less memory.
    accumulate: int = field(default=1, metadata=at_least(1))


@dataclass
class ScheduleConfig:
    """How long to train, and with which learning rates."""

    #: Passes over the training set; null with steps (and 8 if neither is stated).
    epochs: int | None = field(default=None, metadata=at_least(1, most=1_000_000) | affects(Affects.FIGURES | Affects.CELL))
    #: Steps of every worker, in the place of epochs: data are passed over as often as that takes.
    steps: int | None = field(default=None, metadata=at_least(1) | affects(Affects.FIGURES | Affects.CELL))
    #: Epochs over which the learning rate grows, step by step, from the base rate to the scaled one. With steps, see
    #: warmup_steps.
    warmup_epochs: float = field(default=1.0, metadata=not_negative())
    #: With steps: the steps over which the learning rate grows, linearly from almost 0 to the scaled rate.
    warmup_steps: int = field(default=0, metadata=at_least(0))
    #: How the learning rate falls after the warm-up: `epochs`: at decay_epochs; `cosine`: half a cosine, to 0 at the end;
    #: `wsd`: not at all (stable) until the last decay_share of the run, then linearly to 0.
    decay: str = field(default="epochs", metadata=one_of("epochs", "cosine", "wsd"))
    #: The last part of the run over which `wsd` lowers the learning rate.
    decay_share: float = field(default=0.2, metadata=within("(0, 1]"))
    #: The learning rate is multiplied by decay_factor at the beginning of these epochs, counted from 0.
    decay_epochs: list[int] = field(default_factory=list)
    #: Factor applied at each of decay_epochs.
    decay_factor: float = field(default=0.1, metadata=within("(0, 1]"))


@dataclass
class ClusterConfig:
    """Who trains: how many workers, how fast they are, who gets which batches."""

    #: Number of workers. The run refuses to start with any other number of processes.
    num_workers: int = field(default=2, metadata=at_least(1))
    #: Relative speeds, one per worker; `measure`: measured before training; a speeds.json: those of that run; null: equal.
    speeds: Any = None
    #: Minimum duration of `measure`, after its warm-up.
    measure_seconds: float = field(default=8.0, metadata=not_negative() | affects(Affects.CELL))
    #: Workers per node, with consecutive ranks: they sum their gradients in every step, and the algorithm runs between
    #: nodes. 1: each worker is a node.
    workers_per_replica: int = field(default=1, metadata=at_least(1))
    #: How the workers of a node share its model, its gradients and optimizer state: fsdp (FSDP2), or DeepSpeed's zero1,
    #: zero2, zero3; null: each holds all of it.
    shard: str | None = field(default=None, metadata=one_of("fsdp", "zero1", "zero2", "zero3"))
    #: Give faster workers larger batches and shards (section 3.2 of the paper).
    proportional: bool = False
    #: Keep the sum of all batches at this number; null: the slowest worker takes batch_size.
    global_batch: int | None = field(default=None, metadata=must("must be at most 1,000,000,000", lambda v: v <= 10**9))
    #: Reshuffle samples every epoch `within` each worker's shard, or `across` all of them.
    shuffle: str = field(default="within", metadata=one_of("within", "across"))
    #: Every this many epochs, adapt batches to the workers' speeds in the last epoch; the global batch stays. null: never.
    replan_epochs: int | None = field(default=None, metadata=at_least(1))
    #: cpu, or auto for whatever accelerate finds.
    device: str = field(default="auto", metadata=one_of("auto", "cpu"))
    #: After a connection broke, how long to wait for the name of the worker that died.
    dead_seconds: float = field(default=30.0, metadata=positive() | affects(Affects.CELL))
    #: How long a worker may be silent before it counts as frozen and ends the run on all others.
    frozen_seconds: float = field(default=120.0, metadata=positive() | affects(Affects.CELL))
    #: Blocks of threads (CTAs) that an average may occupy on a GPU, beside computing; null: NCCL's own choice.
    ctas: int | None = field(default=4, metadata=at_least(1) | affects(Affects.FIGURES))
    #: cpu: what only the end of a round needs waits in the host's memory (local, asynlocal, cocod); null: on the device.
    offload: str | None = field(default=None, metadata=one_of("cpu") | affects(Affects.FIGURES))


@dataclass
class LinkConfig:
    """A link between neighbours in a ring."""

    #: Goodput in Mbit/s; null: no limit.
    bandwidth_mbit: float | None = field(default=None, metadata=positive(null="no limit"))
    #: Latency of each message in the ring.
    latency_ms: float = field(default=0.0, metadata=not_negative())


@dataclass
class EmulateConfig:
    """Machines and networks that are not there. A run that emulates anything is labelled so wherever it appears."""

    #: How many times longer each worker computes, e.g. [1, 1, 2, 2]; an entry may be (first epoch, factor) pairs.
    slowdown: Any = None
    #: Collectives take as long as a ring all-reduce on this link would, in the background.
    link: LinkConfig = field(default_factory=LinkConfig)
    #: Written by `cocod simulate`: the cluster that this run was simulated on. Such a run was never trained.
    cluster: str | None = None


@dataclass
class EvaluationConfig:
    """When the averaged model is tested, and against which accuracies."""

    #: Evaluate every this many epochs, and always at the end.
    every_epochs: int = field(default=1, metadata=at_least(1))
    #: Evaluate every this many steps instead, and always at the end.
    every_steps: int | None = field(default=None, metadata=at_least(1))
    #: Batch size for evaluation, on every worker.
    batch_size: int = field(default=250, metadata=at_least(1) | affects(Affects.CELL))
    #: Report the training time at which each of these accuracies, or values of the first of task.metrics, was first reached.
    #: Where that is not accuracy, there are none unless they are stated.
    targets: list[float] = field(default_factory=lambda: list(DEFAULT_TARGETS), metadata=affects(Affects.NOTHING))
    #: Also compute the averaged model's loss on the training data (built-in data: without augmentation): `mean_train_loss`
    #: in rows. `train_loss` is the mean of the losses that the workers' own models had while training.
    training_loss: bool = field(default=False, metadata=affects(Affects.CELL))


@dataclass
class CheckpointConfig:
    """When all workers save, besides the start; SIGUSR1 or SIGTERM to any of them also saves."""

    #: Save every this many steps; null: not by steps.
    every_steps: int | None = field(default=None, metadata=at_least(1))
    #: Save every this many epochs; null: not by epochs.
    every_epochs: int | None = field(default=1, metadata=at_least(1))
    #: Save every this many minutes; null: not by time.
    every_minutes: float | None = field(default=None, metadata=positive())
    #: Number of checkpoints to keep.
    keep: int = field(default=2, metadata=at_least(1))
    #: auto: resume an unfinished run of this name and configuration; never; or a checkpoint or run folder to start from.
    resume: str = field(default="auto", metadata=affects(Affects.FIGURES))


@dataclass
class LoggingConfig:
    """What is logged, and where."""

    #: A row of training metrics every this many steps.
    every_steps: int = field(default=20, metadata=at_least(1))
    #: Any of wandb, tensorboard; or none.
    trackers: list[str] = field(default_factory=lambda: ["wandb"], metadata=one_of("wandb", "tensorboard"))
    #: online, offline or disabled.
    wandb_mode: str = field(default="offline", metadata=one_of("online", "offline", "disabled"))
    #: wandb's project.
    project: str = "cocod_accel"
    #: Runs of one comparison share a group.
    group: str | None = None
    #: Write a row for every computation and communication, for timelines.
    spans: bool = True


@dataclass
class Config:
    """One run."""

    #: Name of the run and of its folder; null: algorithm, task and seed.
    name: str | None = field(
        default=None,
        metadata=must("must not contain a slash, and be the name of a folder", _is_name) | affects(Affects.NOTHING),
    )
    #: Folder in which the run folder is made.
    output: str = field(default="runs", metadata=affects(Affects.NOTHING))
    #: Seed of the model, the shuffling and everything else that is random.
    seed: int = field(
        default=0, metadata=must("must be at least 0, and below 2^63", _is_seed) | affects(Affects.RUN | Affects.CELL)
    )
    #: Batch size of one worker (of the slowest one, if proportional).
    batch_size: int = field(default=32, metadata=at_least(1))
    #: no, or bf16 for autocast.
    precision: str = field(default="no", metadata=one_of("no", "bf16"))
    #: Data loading processes per worker; 0: load in the training process. Only for data that is not held in memory.
    loader_workers: int = field(default=0, metadata=at_least(0) | affects(Affects.FIGURES | Affects.CELL))
    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig, metadata=affects(Affects.FIGURES | Affects.CELL))
    emulate: EmulateConfig = field(default_factory=EmulateConfig, metadata=affects(Affects.RUN | Affects.FIGURES))
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig, metadata=affects(Affects.FIGURES | Affects.CELL))
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig, metadata=affects(Affects.NOTHING))
    logging: LoggingConfig = field(default_factory=LoggingConfig, metadata=affects(Affects.NOTHING))

    @property
    def run_name(self) -> str:
        sampling = "-ps" if self.cluster.proportional else ""
        return self.name or f"{self.algorithm.name}{sampling}-{self.task.name}-seed{self.seed}".replace(":", ".")

    @property
    def metrics(self) -> list[str]:
        """What evaluations measure; the first is what targets are of."""
        return list(self.task.metrics) or ["bits_per_byte" if self.task.name == "text" else ACCURACY]

    @property
    def speeds(self) -> list[float]:
        """Each worker's speed; all equal until they have been measured."""
        speeds = self.cluster.speeds
        return [1.0] * self.cluster.num_workers if speeds is None or speeds == MEASURE else list(speeds)

    def slowdown(self, rank: int, epoch: int) -> float:
        """How many times longer worker ``rank`` computes in an epoch, counted from 0."""
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
        """The kind of its seconds: real, emulated or simulated."""
        if self.emulate.cluster is not None:
            return "simulated"
        return "real" if self.emulated is None else "emulated"

    @property
    def has_auto_period(self) -> bool:
        return bool(self.algorithm.period == AUTO)

    @property
    def has_auto_code(self) -> bool:
        """Whether the payload or the delay is to be chosen before training."""
        return AUTO in (self.algorithm.payload, self.algorithm.delay)

    @property
    def period_by_epoch(self) -> list[tuple[int, int]]:
        """(first epoch, period) pairs; for ``auto``, the shortest possible period until one has been chosen."""
        if self.has_auto_period:
            delay = self.algorithm.delay
            return [(0, max(self.algorithm.fragments, delay if isinstance(delay, int) else 1))]
        return list(Period.parse(_plain(self.algorithm.period)).schedule)


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
