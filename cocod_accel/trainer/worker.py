"""One worker of a run: what its loop, its checkpoints and its records share."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.accelerator import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cocod_accel.comm.agreement import exchange_reports
from cocod_accel.comm.groups import default_group, node_group
from cocod_accel.comm.watchdog import Watch
from cocod_accel.config.settings import ACCURACY, Config
from cocod_accel.config.strict import ConfigError
from cocod_accel.runs.clock import TimeToAccuracy, TrainingClock
from cocod_accel.sharding.sampler import seeded_generator
from cocod_accel.sharding.speeds import measure_speeds
from cocod_accel.sync.attach import attach
from cocod_accel.sync.sync import Sync
from cocod_accel.tasks import Task, build_optimizer
from cocod_accel.tasks.data import Batch
from cocod_accel.tasks.metrics import first_metric, task_loss
from cocod_accel.tasks.structure import pieces
from cocod_accel.trainer.auto_code import choose_code
from cocod_accel.trainer.calibration import TIMED_SECONDS, sample_steps
from cocod_accel.trainer.launch import has_core_each
from cocod_accel.trainer.pace import Pace
from cocod_accel.trainer.sharded import prepared_shards
from cocod_accel.trainer.steps import LossGuard, loss_of
from cocod_accel.trainer.work import Position, Work


class Worker:
    """A model, its optimizer, the algorithm attached to them, and where this worker is in the run."""

    def __init__(
        self, config: Config, task: Task, model: nn.Module, accelerator: Accelerator, watch: Watch | None = None
    ) -> None:
        self.config, self.task, self.accelerator, self._watch = config, task, accelerator, watch
        self.rank, self.is_main = accelerator.process_index, accelerator.is_main_process
        self.guard = LossGuard(self.rank)
        self.work = Work.of(config, task.num_train, self.rank)
        inner = node_group(config.cluster.workers_per_replica)
        if config.cluster.shard is None:
            is_served = self.work.algorithm.is_served
            self.model, self.optimizer = _prepared(accelerator, model, build_optimizer(config, model), inner, is_served)
        else:
            self.model, self.optimizer, inner = prepared_shards(accelerator, config, model, inner)
        self.sync = self._attach(inner)
        if config.has_auto_code:
            self._choose_code()
            self.sync.detach()
            self.work = Work.of(config, task.num_train, self.rank)
            self.sync = self._attach(inner)
        if config.logging.spans:
            self.sync.control.record_spans()
        self.sync.control.guard = lambda: self.guard.check(self.step)
        self.sync.control.listen()
        self.pace = Pace(
            is_on=config.emulate.slowdown is not None or config.cluster.replan_epochs is not None or config.has_auto_period,
            is_busy=accelerator.device.type == "cpu" and has_core_each(),
            device=accelerator.device,
        )
        self.clock = TrainingClock(accelerator.device)
        self.metric, self._loss = first_metric(config), task_loss(config)
        self.times = TimeToAccuracy(list(config.evaluation.targets), self.metric.better)
        self.at = Position(seed=config.seed, first_batches=list(self.work.plan.batches))
        if self.metric.name != ACCURACY:
            self.at.best_accuracy = -sys.float_info.max
        #: The sum of this epoch's losses.
        self.losses = torch.zeros((), device=accelerator.device)
        #: Of the random crops and flips.
        self.generator = torch.Generator()

    def _attach(self, inner: Any) -> Sync:
        try:
            weight = self.work.plan.weights[self.rank]
            cluster = self.config.cluster
            options = {"inner": inner, "ctas": cluster.ctas, "offload": cluster.offload}
            sync = attach(self.model, self.optimizer, self.work.algorithm, weight=weight, **options)
        except (TypeError, ValueError) as error:  # on all workers
            raise ConfigError(f"algorithm.name={self.config.algorithm.name}: {error}") from error
        sync.reminder.remove()  # a run finishes, and saves what is meant; it says itself if it is stopped
        if self.config.link is not None:
            sync.control.emulate_link(self.config.link)
        return sync

    def _choose_code(self) -> None:
        """The payload and the delay, where they are to be chosen."""
        self.now_at("the measurement of its step")
        options, seconds = self.config.algorithm, min(TIMED_SECONDS, self.config.cluster.measure_seconds)
        with sample_steps(self.config, self.task, self.accelerator, self.work.batch) as run_step:
            measured = measure_speeds(run_step, min_seconds=seconds)
        choice, why = choose_code(self.config, self.sync, self.gather, measured.step_seconds[self.rank])
        options.payload, options.delay = choice.payload, choice.delay
        if self.is_main:
            print(why, flush=True)

    @property
    def step(self) -> int:
        """Optimizer steps this worker has taken."""
        return self.at.step

    @property
    def module(self) -> nn.Module:
        """The model without DDP or an engine around it."""
        return self.sync.subject.module

    def now_at(self, where: str) -> None:
        """Tell the watchdog what this worker is doing, in words."""
        if self._watch is not None:
            self._watch.doing = where

    def batches(self, epoch: int) -> Iterator[Batch]:
        """The rest of this worker's batches in an epoch."""
        self.generator = seeded_generator(self.at.seed, "augment", self.rank, epoch)
        if self.at.index and self.config.loader_workers == 0 and self.at.generator is not None:
            self.generator.set_state(self.at.generator)
        return self.work.supply(
            self.config,
            self.task.train,
            epoch,
            self.accelerator.device,
            seed=self.at.seed,
            generator=self.generator,
            skipped=self.at.index,
        )

    def loss(self, batch: Batch) -> Tensor:
        with self.accelerator.autocast():
            return loss_of(self.model, batch, self._loss)

    def backward(self, batch: Any) -> Tensor:
        """Add the gradients of a batch, piece by piece; its mean loss."""
        parts = pieces(batch, self.config.optimizer.accumulate)
        total: Tensor | None = None
        for index, (piece, share) in enumerate(parts):
            is_last = index + 1 == len(parts)
            with contextlib.nullcontext() if is_last else self.accelerator.no_sync(self.model):
                loss = self.loss(piece) if share == 1 else self.loss(piece) * share
                total = loss.detach() if total is None else total + loss.detach()
                if is_last:
                    self.guard.note(total)
                self.accelerator.backward(loss)
        assert total is not None
        return total

    def all_steps(self, epoch: int) -> list[int]:
        """The steps of every worker in an epoch; after the last epoch, those of the last."""
        return list(self.work.all_steps[min(epoch, len(self.work.all_steps) - 1)])

    def shared_step(self) -> int:
        """Steps taken in this epoch by the worker that takes fewest; the same on all workers where they meet."""
        all_steps = self.all_steps(self.at.epoch)
        return int(self.at.index * min(all_steps) // all_steps[self.rank])

    def gather(self, values: list[float]) -> list[list[float]]:
        """The values of every worker, in the order of ranks. Collective."""
        return exchange_reports(values, default_group(), self.accelerator.device)  # some devices have no float64


def _prepared(
    accelerator: Accelerator, model: Any, optimizer: Optimizer, inner: Any, is_served: bool = False
) -> tuple[Any, Any]:
    """Model and optimizer as accelerate prepares them; with DDP inside the node, where workers share one; without it, where
    a server holds the model.
    """
    if is_served:
        model = accelerator.prepare_model(model, evaluation_mode=True)
        return model, accelerator.prepare_optimizer(optimizer)
    if inner is None or accelerator.state.deepspeed_plugin is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model = accelerator.prepare_model(model, evaluation_mode=True)  # on its device and in its precision, not wrapped
        devices = [accelerator.device] if accelerator.device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=devices, process_group=inner)
        optimizer = accelerator.prepare_optimizer(optimizer)
    # Buffers are averaged for evaluation; broadcasting them in every forward would only cost time.
    model.broadcast_buffers = False
    return model, optimizer
