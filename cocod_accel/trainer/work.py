"""The work of one worker in a run, and its position in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from cocod_accel.algorithms import Algorithm
from cocod_accel.algorithms.rounds import Period
from cocod_accel.checkpoint import schema
from cocod_accel.config.algorithms import algorithm_class, build_algorithm
from cocod_accel.config.settings import Config
from cocod_accel.config.strict import ConfigError
from cocod_accel.sharding.plan import WorkPlan, local_periods, plan_workers, steps_in_shards
from cocod_accel.sharding.sampler import skewed_order
from cocod_accel.tasks.data import Batch, Images, batches
from cocod_accel.tasks.text import Sequences
from cocod_accel.trainer.schedule import learning_rate, period_in_epoch, period_in_steps


@dataclass(frozen=True)
class Work:
    """The work of one worker: its algorithm, its batches, and the steps of every epoch."""

    algorithm: Algorithm
    plan: WorkPlan
    #: Steps of each worker, epoch by epoch.
    all_steps: tuple[tuple[int, ...], ...]
    rank: int

    @classmethod
    def of(cls, config: Config, num_samples: int, rank: int) -> Work:
        """Plan the run for worker ``rank``."""
        by_epoch, num_steps = config.period_by_epoch, config.schedule.steps
        # With steps, the epochs that hold them are counted when their length is known.
        periods = [period_in_epoch(by_epoch, epoch) for epoch in range(config.schedule.epochs or 1)]
        own_period = not algorithm_class(config.algorithm.name).same_period
        try:
            plan = plan_workers(
                config.speeds,
                num_samples,
                base_batch=config.batch_size,
                global_batch=config.cluster.global_batch,
                proportional=config.cluster.proportional,
                period=periods[-1] if own_period else None,
            )
            rounds = {k: local_periods(k, config.speeds) for k in set(periods)}
            steps_of = {k: steps_in_shards(plan, rounds[k]) if own_period else plan.steps for k in set(periods)}
            all_steps = tuple(steps_of[k] for k in periods)
            if num_steps is not None:
                all_steps = _epochs_of(num_steps, tuple(plan.steps))
        except ValueError as error:
            total = config.cluster.global_batch
            key = f"batch_size={config.batch_size}" if total is None else f"cluster.global_batch={total}"
            raise ConfigError(f"{key}: {error}") from error
        if own_period:
            by_epoch = [(first, rounds[k][rank]) for first, k in by_epoch]
        steps = [everybodys[rank] for everybodys in all_steps]
        in_steps = period_in_steps(by_epoch, steps) if num_steps is None else by_epoch
        algorithm = build_algorithm(config.algorithm, in_steps, config.seed)
        return cls(algorithm, plan, all_steps, rank)

    @property
    def steps(self) -> list[int]:
        """This worker's steps, epoch by epoch."""
        return [everybodys[self.rank] for everybodys in self.all_steps]

    @property
    def num_epochs(self) -> int:
        """Passes over the data; with ``schedule.steps`` the last may be a part of one."""
        return len(self.all_steps)

    @property
    def batch(self) -> int:
        return self.plan.batches[self.rank]

    def supply(
        self,
        config: Config,
        data: Images | Sequences | Dataset[Any],
        epoch: int,
        device: torch.device,
        *,
        seed: int | str,
        generator: torch.Generator,
        skipped: int = 0,
    ) -> Iterator[Batch]:
        """This worker's batches in an epoch, without the first ``skipped``; random crops and flips from ``generator``."""
        order = None
        if config.task.label_skew is not None:
            if not isinstance(data, Images | Sequences):
                raise ConfigError(
                    f"task.label_skew={config.task.label_skew:g}: requires labels in memory; return (inputs, labels) tensors"
                )
            order = skewed_order(data.labels, self.plan.shards, config.task.label_skew, seed)
        sampler = self.plan.sampler(self.rank, seed=seed, across=config.cluster.shuffle == "across", order=order)
        indices = sampler.epoch(epoch, self.all_steps[epoch])
        if config.loader_workers == 0:
            indices, skipped = indices[skipped * self.batch :], 0
        found = batches(data, indices, self.batch, device, generator=generator, loader_workers=config.loader_workers)
        for _ in range(skipped):  # random numbers drawn in loader processes can only be drawn again
            next(found)
        return found

    def learning_rate(self, config: Config, epoch: float) -> float:
        """The same for all workers; ``epoch`` counts from 0 and has a fraction."""
        base, schedule = config.optimizer.learning_rate, config.schedule
        factor = self.plan.learning_rate_factor if config.optimizer.scale_learning_rate else 1.0
        at, start, warmup, end = epoch, base, schedule.warmup_epochs, float(self.num_epochs)
        if schedule.steps is not None:  # everything counts steps, and the first of a warm-up is not lost with a rate of 0
            whole = int(epoch)
            at = sum(self.steps[:whole]) + (epoch - whole) * self.steps[min(whole, self.num_epochs - 1)]
            warmup, end = float(schedule.warmup_steps), float(schedule.steps)
            start = base * factor / (warmup + 1)
        return learning_rate(
            at,
            start,
            base * factor,
            warmup,
            schedule.decay_epochs,
            schedule.decay_factor,
            end if schedule.decay == "cosine" else None,
            ((1 - schedule.decay_share) * end, end) if schedule.decay == "wsd" else None,
        )

    def all_samples_per_own(self, epoch: int) -> float:
        """Samples that all workers take in an epoch, per sample of this one."""
        used = [b * s for b, s in zip(self.plan.batches, self.all_steps[epoch], strict=True)]
        return float(sum(used) / used[self.rank])


def _epochs_of(num_steps: int, steps: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Every worker's steps, epoch by epoch: whole epochs, and of the last as much as is left."""
    whole, rest = divmod(num_steps, steps[0])
    return (steps,) * whole + (((rest,) * len(steps),) if rest else ())


def check_position(saved: Any) -> None:
    """Refuse what no run has kept as its position: nothing of a checkpoint is used before all of it was looked at."""
    if not isinstance(saved, dict) or "first_batches" not in saved:
        raise ValueError("was not written by cocod train, so no run can start from it")
    counts = schema.each(schema.count)
    own = schema.record(
        {
            "sizes": _sizes,
            "clock": schema.each(schema.number, 2),
            "times": schema.values(schema.optional(schema.number), schema.number),
            "losses": _scalar,
            "pace": schema.each(schema.anything),
        }
    )
    rules: dict[str, schema.Check] = {
        "seed": schema.either(schema.count, schema.word),
        **dict.fromkeys(("epoch", "index", "step", "samples", "shared_steps", "last_shared"), schema.count),
        **dict.fromkeys(("accuracy", "best_accuracy", "all_samples"), schema.number),
        "moved_batches": schema.optional(counts),
        "paces": schema.optional(schema.each(schema.each(schema.number, 2))),
        "fixed": schema.optional(schema.each(schema.number)),
        "periods": schema.optional(schema.each(schema.each(schema.count, 2))),
        "generator": schema.optional(schema.check_generator),
        "first_batches": counts,
        "all_steps": counts,
        "shuffle": schema.word,
        "own": own,
    }
    known = {entry.name for entry in fields(Position)} - {"epoch", "step", "shuffle", "first_batches", "all_steps"}
    schema.record(rules, optional_keys=list(known))(saved, "position")
    batches, steps, moved = saved["first_batches"], saved["all_steps"], saved.get("moved_batches")
    if min(batches, default=0) < 1 or min(steps, default=0) < 1 or len(batches) != len(steps):
        raise ValueError("position.first_batches and all_steps are not those of its workers")
    if moved is not None and (min(moved, default=0) < 1 or len(moved) != len(batches) or sum(moved) != sum(batches)):
        raise ValueError("position.moved_batches are not its batches, moved")
    for name in ("paces", "fixed"):
        if saved.get(name) is not None and len(saved[name]) != len(batches):
            raise ValueError(f"position.{name} are not those of its workers")
    if saved.get("index", 0) > max(steps):
        raise ValueError(f"position.index={saved['index']} is after the end of its epoch")
    if saved.get("periods") is not None:
        Period.parse(saved["periods"])


def _sizes(value: Any, where: str) -> None:
    schema.record({"metrics": schema.count, "spans": schema.count}, optional_keys=("metrics",))(value, where)


def _scalar(value: Any, where: str) -> None:
    schema.tensor(value, where)
    if value.numel() != 1:
        schema.fail(where, "is not one number")


@dataclass
class Position:
    """Where a worker is in its run; what a checkpoint holds besides model, optimizer and averages."""

    #: Seed of the batches; a new one after resuming with other workers.
    seed: int | str
    epoch: int = 0
    #: Steps taken in this epoch.
    index: int = 0
    step: int = 0
    samples: int = 0
    #: The last value of the first metric, and the best: of a metric that is better the lower it is, times -1.
    accuracy: float = 0.0
    best_accuracy: float = 0.0
    #: Batches that were moved; None: those of the configuration.
    moved_batches: list[int] | None = None
    #: (batch, seconds) of every worker when batches were last adapted, and the share of a step that is fixed.
    paces: list[list[float]] | None = None
    fixed: list[float] | None = None
    #: (first step, period) pairs that ``algorithm.period: auto`` has chosen; None: the configuration states them.
    periods: list[list[int]] | None = None
    #: State of the generator for random crops and flips.
    generator: Tensor | None = None
    #: Samples that all workers have taken.
    all_samples: float = 0.0
    #: The batches of the configuration, and every worker's steps in this epoch: if these differ, so does the plan.
    first_batches: list[int] = field(default_factory=list)
    all_steps: list[int] = field(default_factory=list)
    shuffle: str = ""
    #: Steps since a checkpoint was last due, and where in the epoch that was last checked.
    shared_steps: int = 0
    last_shared: int = 0
