"""The training loop, which knows the contract of an algorithm and never a concrete one.

    attach(model, optimizer, algorithm, weight)           # sync; weight: this worker's batch size
    for epoch in epochs:
        clock starts                                      # only what follows counts as training time
        for batch in this worker's shard, reshuffled:
            set the learning rate                         # warm-up, decay
            forward; backward                             # gradients are reduced here, if the algorithm does that
            optimizer.step()                              # a round may end here: guard, then averages land and launch
            leave, if all workers have agreed to stop     # a request travels with the averages
            metrics row, every so many steps              # this worker's figures; nothing is gathered
        clock stops
        with sync.averaged():                             # every few epochs: evaluate the mean model, sharded and exact
            evaluate                                      # the one gather: accuracy, loss, slowest worker's seconds
        metrics row; trackers; spans
        move batches to the speeds of this epoch          # if asked for: gather step times, sync.reweight, new shards
    sync.finish()                                         # every worker holds the same mean model
    summary

The guard is what keeps a model with a non-finite loss out of every average.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.accelerator import Accelerator
from torch import Tensor, nn
from tqdm import tqdm

from cocod_accel.algorithms import ALGORITHMS, Algorithm
from cocod_accel.attach import attach
from cocod_accel.comm import bytes_of
from cocod_accel.config import Config, ConfigError
from cocod_accel.metrics import RunFolder, TimeToAccuracy, TrainingClock
from cocod_accel.pace import Pace, relative_speeds
from cocod_accel.runtime import has_core_each
from cocod_accel.schedule import learning_rate, period_in_epoch, period_in_steps
from cocod_accel.sharding import ShardSampler, WorkPlan, local_periods, plan_workers, seeded_generator, steps_in_shards
from cocod_accel.tasks import Task
from cocod_accel.tasks.data import batches
from cocod_accel.trackers import Trackers

#: Batches are moved only if that makes a step at least this much shorter; moving costs a blocking average.
_WORTH_MOVING = 0.05


class NonFiniteLossError(RuntimeError):
    """A worker's loss is no longer a number."""


@dataclass(frozen=True)
class Work:
    """What one worker does: its algorithm, its batches, and the steps of every epoch."""

    algorithm: Algorithm
    plan: WorkPlan
    #: Of every epoch, each worker's.
    all_steps: tuple[tuple[int, ...], ...]
    rank: int

    @classmethod
    def of(cls, config: Config, num_samples: int, rank: int) -> Work:
        """Plan the run for worker ``rank``."""
        kind: Any = ALGORITHMS[config.algorithm.name]
        by_epoch = config.period_by_epoch
        periods = [period_in_epoch(by_epoch, epoch) for epoch in range(config.schedule.epochs)]
        own_period = not kind.same_period
        try:
            plan = plan_workers(
                config.speeds,
                num_samples,
                base_batch=config.batch_size,
                global_batch=config.cluster.global_batch,
                proportional=config.cluster.proportional,
                period=periods[-1] if own_period else None,
            )
        except ValueError as error:
            raise ConfigError(f"batch_size={config.batch_size}: {error}") from error
        if own_period:
            rounds = {k: local_periods(k, config.speeds) for k in set(periods)}
            all_steps = tuple(steps_in_shards(plan, rounds[k]) for k in periods)
            by_epoch = [(first, rounds[k][rank]) for first, k in by_epoch]
        else:
            all_steps = (plan.steps,) * len(periods)
        takes_period = kind.__init__ is Algorithm.__init__
        steps = [everybodys[rank] for everybodys in all_steps]
        algorithm = kind(period=period_in_steps(by_epoch, steps)) if takes_period else kind()
        return cls(algorithm, plan, all_steps, rank)

    @property
    def steps(self) -> list[int]:
        """This worker's, of every epoch."""
        return [everybodys[self.rank] for everybodys in self.all_steps]

    @property
    def batch(self) -> int:
        return self.plan.batches[self.rank]


class Trainer:
    """One run on one worker."""

    def __init__(self, config: Config, task: Task, model: nn.Module, accelerator: Accelerator, folder: Path) -> None:
        self.config, self.task, self.accelerator = config, task, accelerator
        self.rank, self.is_main = accelerator.process_index, accelerator.is_main_process
        self.work = Work.of(config, task.num_train, self.rank)
        if (
            config.cluster.replan_epochs is not None
            and self.work.algorithm.reduces_gradients
            and accelerator.device.type != "cpu"
        ):
            raise ConfigError(
                f"cluster.replan_epochs={config.cluster.replan_epochs}: with {config.algorithm.name} on "
                f"{accelerator.device.type} the waiting for other workers cannot be told from computing; use cocod or local"
            )
        self.folder = RunFolder(folder)
        self.trackers = Trackers(accelerator, config, folder)
        options = config.optimizer
        optimizer = torch.optim.SGD(
            model.parameters(),
            lr=options.learning_rate,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            nesterov=options.nesterov,
        )
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        # Buffers are averaged for evaluation; broadcasting them in every forward would only be waiting.
        self.model.broadcast_buffers = False
        self.sampler = self._sampler()
        self.sync = attach(self.model, self.optimizer, self.work.algorithm, weight=self.work.plan.weights[self.rank])
        if config.link is not None:
            self.sync.emulate_link(config.link)
        self.pace = Pace(
            is_on=config.emulate.slowdown is not None or config.cluster.replan_epochs is not None,
            is_busy=accelerator.device.type == "cpu" and has_core_each(),
        )
        self.sync.guard = self._check_losses
        self.sync.listen_for_stop()
        if config.logging.spans:
            self.sync.record_spans()
        self.clock = TrainingClock()
        self.times = TimeToAccuracy(list(config.evaluation.targets))
        self.step = 0
        self.samples = 0
        self.epoch_steps = 0
        self.is_stopped = False
        self.best_accuracy = 0.0
        self._unchecked: list[Tensor] = []
        self._spans: list[dict[str, Any]] = []

    # ---- the loop

    def run(self) -> dict[str, Any]:
        """Train, and return the summary."""
        bar = self._progress_bar()
        accuracy = 0.0
        self._write_plan(0, self.config.speeds)
        for epoch in range(self.config.schedule.epochs):
            loss = self._train_epoch(epoch, bar)
            last = epoch + 1 == self.config.schedule.epochs or self.is_stopped
            if (epoch + 1) % self.config.evaluation.every_epochs == 0 or last:
                accuracy = self._evaluate(epoch, loss, bar)
            self._write_spans()
            if self.is_stopped:
                break
            every = self.config.cluster.replan_epochs
            if every is not None and (epoch + 1) % every == 0 and not last:
                self._replan(epoch + 1, bar)
        self.clock.start()
        self.sync.finish()
        self.clock.stop()
        bar.close()
        summary = self._summary(accuracy)
        if self.is_main:
            self.folder.summary(summary)
            self.trackers.finish(summary)
        self._write_spans()
        self.folder.close()
        self.sync.detach()
        return summary

    def _train_epoch(self, epoch: int, bar: Any) -> float:
        """One epoch over this worker's shard; its mean loss."""
        self.model.train()
        steps = self.work.steps[epoch]
        losses = torch.zeros((), device=self.accelerator.device)
        self.pace.slowdown = self.config.slowdown(self.rank, epoch)
        self.pace.seconds.clear()
        supply = self._batches(epoch)
        self.clock.start()
        for index in range(steps):
            begin = time.perf_counter()
            self.pace.begin(self.sync.exposed_seconds)
            inputs, labels = next(supply)
            self._set_learning_rate(epoch + index / steps)
            self.optimizer.zero_grad()
            with self.accelerator.autocast():
                loss = nn.functional.cross_entropy(self.model(inputs), labels)
            self.accelerator.backward(loss)
            self._unchecked.append(loss.detach())
            self.step += 1
            self.samples += len(labels)
            stretched = self.pace.end(self.sync.exposed_seconds)
            if stretched is not None:
                self._span("stretch", *stretched)
            self.optimizer.step()
            losses += loss.detach()
            self._span("compute", begin, time.perf_counter())
            bar.update()
            log = self.step % self.config.logging.every_steps == 0
            if log:
                self._log_step(epoch, loss, bar)
            if self.sync.stop_agreed(ask_now=log):
                self.is_stopped = True
                break
        self._check_losses()
        self.clock.stop()
        self.epoch_steps = index + 1
        return losses.item() / self.epoch_steps

    def _sampler(self) -> ShardSampler:
        across = self.config.cluster.shuffle == "across"
        return self.work.plan.sampler(self.rank, seed=self.config.seed, across=across)

    def _batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        indices = self.sampler.epoch(epoch, self.work.all_steps[epoch])
        generator = seeded_generator(self.config.seed, "augment", self.rank, epoch)
        return batches(
            self.task.train,
            indices,
            self.work.batch,
            self.accelerator.device,
            generator=generator,
            loader_workers=self.config.loader_workers,
        )

    def _set_learning_rate(self, epoch: float) -> None:
        base, schedule = self.config.optimizer.learning_rate, self.config.schedule
        factor = self.work.plan.learning_rate_factor if self.config.optimizer.scale_learning_rate else 1.0
        rate = learning_rate(
            epoch, base, base * factor, schedule.warmup_epochs, schedule.decay_epochs, schedule.decay_factor
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _check_losses(self) -> None:
        """Raise if a loss since the last call was not finite; one look at the device for all of them."""
        losses, self._unchecked = self._unchecked, []
        if losses:
            finite = torch.isfinite(torch.stack(losses))
            if not bool(finite.all()):
                step = self.step - len(losses) + 1 + int((~finite).nonzero()[0, 0])
                raise NonFiniteLossError(
                    f"worker {self.rank}: the loss is not finite at step {step}; lower the learning rate"
                )

    # ---- batches that follow the workers' speeds

    def _replan(self, epoch: int, bar: Any) -> None:
        """Move batches to the speeds of the epoch that has ended. The global batch stays, and with it rate and steps."""
        batches = self.work.plan.batches
        seconds = [row[0] for row in self._gather([self.pace.median_seconds()])]
        speeds = relative_speeds(batches, seconds)
        plan = plan_workers(
            speeds, self.task.num_train, base_batch=self.config.batch_size, global_batch=sum(batches), proportional=True
        )
        assert plan.steps == self.work.plan.steps, "the same sum of batches has the same steps"
        expected = [s * new / old for s, new, old in zip(seconds, plan.batches, batches, strict=True)]
        if max(expected) > (1 - _WORTH_MOVING) * max(seconds):
            return
        self.clock.start()
        self.sync.reweight(plan.weights[self.rank])
        self.clock.stop()
        self.work = replace(self.work, plan=plan)
        self.sampler = self._sampler()
        self._write_plan(epoch, speeds)
        if self.is_main:
            moved = f"{', '.join(map(str, batches))} -> {', '.join(map(str, plan.batches))}"
            bar.clear()
            print(
                f"epoch {epoch + 1}: batches {moved}; a step's computation {1e3 * max(seconds):.1f} -> "
                f"{1e3 * max(expected):.1f} ms expected",
                flush=True,
            )

    # ---- evaluation

    def _evaluate(self, epoch: int, loss: float, bar: Any) -> float:
        with self.sync.averaged():
            self.model.eval()
            sums = torch.zeros(2, dtype=torch.float64)
            indices = torch.arange(self.rank, self.task.num_test, self.accelerator.num_processes)
            with torch.no_grad():
                for inputs, labels in batches(
                    self.task.test, indices, self.config.evaluation.batch_size, self.accelerator.device
                ):
                    # The module itself: workers may have different numbers of batches, which DDP need not know.
                    with self.accelerator.autocast():
                        outputs = self.accelerator.unwrap_model(self.model)(inputs)
                    sums[0] += (outputs.argmax(1) == labels).sum().item()
                    sums[1] += nn.functional.cross_entropy(outputs.float(), labels, reduction="sum").item()
        samples = self.epoch_steps * self.work.batch
        mine = [*sums.tolist(), loss * samples, float(samples), self.clock.seconds]
        rows = self._gather(mine)
        correct, test_loss, train_loss, num_samples = (math.fsum(row[i] for row in rows) for i in range(4))
        seconds = max(row[4] for row in rows)
        accuracy = correct / self.task.num_test
        self.best_accuracy = max(self.best_accuracy, accuracy)
        self.times.note(accuracy, seconds)
        row = {
            "epoch": epoch + 1,
            "accuracy": accuracy,
            "test_loss": test_loss / self.task.num_test,
            "train_loss": train_loss / num_samples,
            "train_seconds": seconds,
        }
        self._write_row("eval", row, bar)
        if self.is_main and bar.disable:
            print(
                f"epoch {epoch + 1:3d}/{self.config.schedule.epochs}  accuracy {accuracy:.4f}  "
                f"train loss {row['train_loss']:.4f}  {seconds:.1f} s training",
                flush=True,
            )
        bar.set_postfix(accuracy=f"{accuracy:.4f}", refresh=False)
        return accuracy

    def _gather(self, values: list[float]) -> list[list[float]]:
        tensor = torch.tensor([values], dtype=torch.float64, device=self.accelerator.device)
        gathered: Tensor = self.accelerator.gather(tensor)
        return gathered.tolist()

    # ---- what is written

    def _log_step(self, epoch: int, loss: Tensor, bar: Any) -> None:
        if not self.is_main:
            return
        stats, seconds = self.sync.stats(), self.clock.seconds
        row = {
            "epoch": epoch + 1,
            "loss": loss.item(),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "train_seconds": seconds,
            "samples_per_second": self.samples * self._all_samples_per_own(epoch) / seconds,
            "rounds": stats.rounds,
            "comm_bytes": stats.bytes,
            "comm_exposed_seconds": stats.exposed_seconds,
            "comm_hidden_seconds": stats.hidden_seconds,
            "drift": stats.drift,
        }
        self._write_row("train", row, bar)

    def _all_samples_per_own(self, epoch: int) -> float:
        """Samples of all workers for each of this one's, in an epoch."""
        used = [b * s for b, s in zip(self.work.plan.batches, self.work.all_steps[epoch], strict=True)]
        return float(sum(used) / used[self.rank])

    def _write_plan(self, epoch: int, speeds: Sequence[float]) -> None:
        """Who takes which batch from ``epoch`` on, counted from 0."""
        plan = self.work.plan
        row = {"epoch": epoch, "speeds": list(speeds), "batches": list(plan.batches), "weights": list(plan.weights)}
        if self.is_main:
            self.folder.row({"kind": "plan", "step": self.step, **row, **self._label})

    @property
    def _label(self) -> dict[str, Any]:
        return {} if self.config.emulated is None else {"emulated": True}

    def _write_row(self, kind: str, row: dict[str, Any], bar: Any) -> None:
        if not self.is_main:
            return
        self.folder.row({"kind": kind, "step": self.step, **row, **self._label})
        values = {f"{'comm/' if k.startswith(('comm_', 'drift', 'rounds')) else kind + '/'}{k}": v for k, v in row.items()}
        self.trackers.log({**values, "train_seconds": row["train_seconds"]}, step=self.step)
        if kind == "train":
            share = row["comm_exposed_seconds"] / row["train_seconds"]
            bar.set_description(
                f"epoch {row['epoch']} loss {row['loss']:.3f} {row['samples_per_second']:.0f} samples/s {share:.0%} waiting",
                False,
            )

    def _span(self, name: str, start: float, end: float) -> None:
        if self.config.logging.spans:
            origin = self.clock.origin
            row = {"rank": self.rank, "step": self.step, "name": name, "start": start - origin, "end": end - origin}
            self._spans.append({**row, **self._label})

    def _write_spans(self) -> None:
        for name, start, end in self.sync.take_spans():
            self._span(name, start, end)
        rows, self._spans = self._spans, []
        self.folder.spans(self.rank, rows)

    def _progress_bar(self) -> Any:
        hidden = not (self.is_main and sys.stderr.isatty())
        return tqdm(total=sum(self.work.steps), disable=hidden, unit="step", leave=False, dynamic_ncols=True)

    def _summary(self, accuracy: float) -> dict[str, Any]:
        stats, config = self.sync.stats(), self.config
        digest = model_digest(self.accelerator.unwrap_model(self.model))
        rows = self._gather(
            [self.clock.seconds, stats.bytes, stats.exposed_seconds, stats.hidden_seconds, self.samples, float(digest)]
        )
        if len({row[5] for row in rows}) != 1:
            raise RuntimeError("the workers' models differ after the last average; please report this with the run folder")
        seconds, num_bytes, exposed, hidden = (max(row[i] for row in rows) for i in range(4))
        samples = math.fsum(row[4] for row in rows)
        return {
            "name": self.folder.path.name,
            "algorithm": config.algorithm.name,
            "task": config.task.name,
            "model": config.model.name,
            "seed": config.seed,
            "num_workers": len(rows),
            "proportional": config.cluster.proportional,
            "batches": list(self.work.plan.batches),
            "clock": "real" if config.emulated is None else "emulated",
            "emulated": config.emulated,
            "steps": self.step,
            "epochs": config.schedule.epochs,
            "stopped_early": self.is_stopped,
            "rounds": stats.rounds,
            "best_accuracy": self.best_accuracy,
            "final_accuracy": accuracy,
            "train_seconds": seconds,
            "time_to_accuracy": {f"{target:g}": reached for target, reached in self.times.seconds.items()},
            "comm_bytes": int(num_bytes),
            "comm_exposed_seconds": exposed,
            "comm_hidden_seconds": hidden,
            "samples_per_second": samples / seconds,
            "model_digest": digest,
        }


def model_digest(model: nn.Module) -> int:
    """48 bits of a hash over parameters and floating buffers: equal models, equal digests."""
    digest = hashlib.blake2b(digest_size=6)
    for value in model.state_dict().values():
        if value.is_floating_point():
            digest.update(bytes_of(value))
    return int.from_bytes(digest.digest(), "big")
