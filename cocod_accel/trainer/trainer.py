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
        checkpoint, when one is due                       # at any step; a signal or a minute, agreed at a round's end
        with sync.averaged():                             # every few epochs: evaluate the mean model, sharded and exact
            evaluate                                      # the one gather: accuracy, loss, slowest worker's seconds
        metrics row; trackers; spans
        choose the period of the next epoch               # if asked for: time a transfer, gather, sync.set_period
        move batches to the speeds of this epoch          # if asked for: gather step times, sync.reweight, new shards
    sync.finish()                                         # every worker holds the same mean model
    summary

The guard is what keeps a model with a non-finite loss out of every average.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.accelerator import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from tqdm import tqdm

from cocod_accel.checkpoint.checkpoints import Checkpoints, Resumed
from cocod_accel.checkpoint.files import CheckpointError
from cocod_accel.checkpoint.safetree import flush
from cocod_accel.comm.agreement import bytes_of
from cocod_accel.comm.groups import node_group
from cocod_accel.config.loading import save_config
from cocod_accel.config.settings import Config
from cocod_accel.config.strict import ConfigError
from cocod_accel.runs.clock import TimeToAccuracy, TrainingClock
from cocod_accel.runs.folder import RunFolder
from cocod_accel.sharding.plan import balanced_batches, fixed_shares, with_batches
from cocod_accel.sharding.sampler import seeded_generator
from cocod_accel.sharding.speeds import measure_speeds, relative_speeds
from cocod_accel.sync.attach import attach
from cocod_accel.tasks import Task, build_optimizer
from cocod_accel.trainer.auto_period import AutoPeriod
from cocod_accel.trainer.calibration import sample_steps
from cocod_accel.trainer.launch import has_core_each
from cocod_accel.trainer.pace import Pace
from cocod_accel.trainer.resume_policy import Place
from cocod_accel.trainer.steps import check_finite, evaluation_row, loss_of, score
from cocod_accel.trainer.trackers import Trackers
from cocod_accel.trainer.watchdog import Watch
from cocod_accel.trainer.work import Position, Work

#: Batches are moved only if that makes a step at least this much shorter; moving costs a blocking average.
_WORTH_MOVING = 0.05
#: How long steps are timed at least, before training, for a period that is to be found.
_TIMED_SECONDS = 2.0
#: No worker's batch shrinks to less than this part of batch_size, nor to 1, which BatchNorm cannot take.
_FEWEST = 8


class Trainer:
    """One run on one worker."""

    def __init__(
        self,
        config: Config,
        task: Task,
        model: nn.Module,
        accelerator: Accelerator,
        place: Place,
        watch: Watch | None = None,
    ) -> None:
        self.config, self.task, self.accelerator, self._watch = config, task, accelerator, watch
        self.rank, self.is_main = accelerator.process_index, accelerator.is_main_process
        self.work = Work.of(config, task.num_train, self.rank)
        self.place, self.folder = place, RunFolder(place.path)
        self.trackers = Trackers(accelerator, config, place.path)
        inner = node_group(config.cluster.workers_per_replica)
        self.model, self.optimizer = _wrapped(accelerator, model, build_optimizer(config, model), inner)
        weight = self.work.plan.weights[self.rank]
        try:
            self.sync = attach(self.model, self.optimizer, self.work.algorithm, weight=weight, inner=inner)
        except (TypeError, ValueError) as error:  # on all workers
            raise ConfigError(f"algorithm.name={config.algorithm.name}: {error}") from error
        if config.link is not None:
            self.sync.emulate_link(config.link)
        self.pace = Pace(
            is_on=config.emulate.slowdown is not None or config.cluster.replan_epochs is not None or config.has_auto_period,
            is_busy=accelerator.device.type == "cpu" and has_core_each(),
        )
        self.auto = AutoPeriod(self.sync, self._gather, config.algorithm.fragments) if config.has_auto_period else None
        self.sync.guard = self._check_losses
        self.sync.listen()
        self.checkpoints = Checkpoints(place.path / "checkpoints", self.sync, accelerator, keep=config.checkpoint.keep)
        self.saved_at = time.monotonic()
        #: The last checkpoint; None if it could not be written.
        self.saved: Path | None = None
        if config.logging.spans:
            self.sync.record_spans()
        self.clock = TrainingClock()
        self.times = TimeToAccuracy(list(config.evaluation.targets))
        self.at = Position(seed=config.seed, first_batches=list(self.work.plan.batches))
        self.losses = torch.zeros((), device=accelerator.device)
        self.is_stopped = False
        # What marks rows and lines of an emulated run; here, because a row is made in every step.
        self._label: dict[str, Any] = {} if config.emulated is None else {"emulated": True}
        self._note = " (emulated)" if self._label else ""
        self._generator = torch.Generator()
        self._unchecked: list[Tensor] = []
        self._spans: list[dict[str, Any]] = []

    # ---- the loop

    @property
    def step(self) -> int:
        """Optimizer steps this worker has taken."""
        return self.at.step

    def run(self) -> dict[str, Any] | None:
        """Train, and return the summary; None if the workers have agreed to stop before the end."""
        epochs, every, replan = (
            self.config.schedule.epochs,
            self.config.checkpoint.every_epochs,
            self.config.cluster.replan_epochs,
        )
        self._begin()
        bar = self._progress_bar()
        while self.at.epoch < epochs:
            epoch = self.at.epoch
            self._train_epoch(epoch, bar)
            if self.is_stopped:
                break
            is_last = epoch + 1 == epochs
            if (epoch + 1) % self.config.evaluation.every_epochs == 0 or is_last:
                self._evaluate(epoch, bar)
            self._write_spans()
            self.at.epoch, self.at.index, self.at.last_shared = epoch + 1, 0, 0
            self.losses.zero_()
            if self.auto is not None and not is_last:
                self.clock.start()
                self._decide_period(statistics.median(self.pace.seconds) if self.pace.seconds else math.nan, bar)
                self.clock.stop()
            if replan is not None and (epoch + 1) % replan == 0 and not is_last:
                self._replan(epoch + 1, bar)
            if every is not None and (epoch + 1) % every == 0 and not is_last:
                self.save()
        bar.close()
        if self.is_stopped:
            self.trackers.finish({})
            summary = None
        else:
            summary = self._end()
        self._write_spans()
        self.folder.close()
        self.sync.detach()
        return summary

    def _end(self) -> dict[str, Any]:
        """The mean model, and what is known of the run."""
        self.clock.start()
        self.sync.finish()
        self.clock.stop()
        summary = self._summary()
        if self.is_main:
            export(self.accelerator.unwrap_model(self.model), self.folder.path / "model.safetensors")
            self.folder.summary(summary)
            self.trackers.finish(summary)
        return summary

    def _train_epoch(self, epoch: int, bar: Any) -> None:
        """What is left of an epoch over this worker's shard."""
        self.model.train()
        steps = self.work.steps[epoch]
        self.pace.slowdown = self.config.slowdown(self.rank, epoch)
        if self.at.index == 0:
            self.pace.seconds.clear()
        supply = self._batches(epoch)
        all_per_own = self.work.all_samples_per_own(epoch)
        self.clock.start()
        for index in range(self.at.index, steps):
            begin = time.perf_counter()
            self.pace.begin(self.sync.exposed_seconds)
            self._now_at(f"step {self.at.step + 1}")
            inputs, labels = next(supply)
            self._set_learning_rate(epoch + index / steps)
            self.optimizer.zero_grad()
            loss = self._loss(inputs, labels)
            self._unchecked.append(loss.detach())
            self.at.step += 1
            self.at.index += 1
            self.at.samples += len(labels)
            self.at.all_samples += len(labels) * all_per_own
            self.accelerator.backward(loss)  # under DeepSpeed the optimizer steps in here
            self.optimizer.step()
            self.losses += loss.detach()
            stretched = self.pace.end(self.sync.exposed_seconds)
            if stretched is not None:
                self._span("stretch", *stretched)
            self._span("compute", begin, time.perf_counter())
            bar.update()
            log = self.step % self.config.logging.every_steps == 0
            if log:
                self._log_step(epoch, loss, bar)
            agreed = self.sync.agreed(ask_now=log)
            if agreed.stop or agreed.save or self._is_save_due():
                self.save()
                if agreed.stop:
                    self.is_stopped = True
                    break
        self._check_losses()
        self.clock.stop()

    def _loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        with self.accelerator.autocast():
            return loss_of(self.model, inputs, labels)

    def _batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """What is left of this worker's batches in an epoch."""
        self._generator = seeded_generator(self.at.seed, "augment", self.rank, epoch)
        if self.at.index and self.config.loader_workers == 0 and self.at.generator is not None:
            self._generator.set_state(self.at.generator)
        return self.work.supply(
            self.config,
            self.task.train,
            epoch,
            self.accelerator.device,
            seed=self.at.seed,
            generator=self._generator,
            skipped=self.at.index,
        )

    def _set_learning_rate(self, epoch: float) -> None:
        rate = self.work.learning_rate(self.config, epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _check_losses(self) -> None:
        """Raise if a loss since the last call was not finite."""
        losses, self._unchecked = self._unchecked, []
        check_finite(losses, self.rank, self.step)

    def _now_at(self, where: str) -> None:
        if self._watch is not None:
            self._watch.doing = where

    # ---- checkpoints

    def _begin(self) -> None:
        """Go on where a checkpoint was taken, or write the first one."""
        resumed = None
        if self.place.is_continued or self.place.start is not None:
            resumed = self.checkpoints.resume(self.place.start, is_same=self._is_same_plan)
        if resumed is not None and self._needs_warm_up(resumed):
            self._warm_up()
            resumed = self.checkpoints.resume(resumed.path, is_same=self._is_same_plan)
        if resumed is None:
            self.folder.cut(self.rank, {"metrics": 0, "spans": 0})
            self._find_first_period()
            self.save()
            self._write_plan(0, self.config.speeds)
            return
        saved = dict(resumed.position)
        own = saved.pop("own")
        self.at = Position(**saved)
        if self.place.start is None:
            # Worker 0's position serves all, if they are others than those that saved: its spans are not theirs.
            kept = own["sizes"] if resumed.is_exact else {"metrics": own["sizes"]["metrics"]}
            self.folder.cut(self.rank, kept)
        self.clock.load_state(own["clock"])
        self.times.seconds.update({t: s for t, s in own["times"].items() if t in self.times.seconds})
        self.losses.copy_(own["losses"])
        if resumed.is_exact:
            self.pace.seconds = list(own["pace"])
            if self.at.moved_batches is not None:
                self.work = replace(self.work, plan=with_batches(self.work.plan, self.at.moved_batches))
                self.sync.restore_weights(self.work.plan.weights)
        else:
            self._go_on_otherwise()
        if self.is_main:
            how = "" if resumed.is_exact else f"; from the mean of {resumed.num_workers} workers, with batches planned anew"
            print(f"resumed from {resumed.path} at step {self.step}, epoch {self.at.epoch + 1}{how}", flush=True)
        if self.auto is not None and self.at.periods is not None:
            self.auto.restore(self.at.periods)
        if not resumed.is_exact or self.place.start is not None or self.step == 0:
            self._write_plan(self.at.epoch, self.config.speeds)
        if self.is_main:
            save_config(self.config, self.folder.path / "config.yaml")  # what may change may have changed
        if self.at.periods is None:
            self._find_first_period()
        if self.place.start is not None:
            self.save()  # from now on this run has checkpoints of its own

    def _needs_warm_up(self, resumed: Resumed) -> bool:
        """Whether the next step's gradients would be summed in another order than without the stop.

        DDP lays its buckets out anew after a process's first backward, and with three workers or more the order of a sum
        depends on the layout. Algorithms that send whole models do not care.
        """
        is_later = resumed.is_exact and resumed.position["step"] > 0
        uses_buckets = self.sync.subject.ddp is not None
        together = self.config.cluster.workers_per_replica
        if self.work.algorithm.reduces_gradients:
            together = self.accelerator.num_processes
        return is_later and uses_buckets and together > 2

    def _warm_up(self) -> None:
        """A first backward, for its side effect on DDP; whatever else it changes is loaded once more afterwards."""
        self.model.train()
        self.accelerator.backward(self._loss(*next(self._batches(0))))
        self.optimizer.zero_grad()

    def _go_on_otherwise(self) -> None:
        """Other workers than those that saved: the same share of the epoch is behind all of them."""
        at = self.at
        steps = self.work.steps[at.epoch] if at.epoch < len(self.work.steps) else 0
        at_start = sum(self.work.steps[: at.epoch])
        period = 1 if self.work.algorithm.same_period else self.work.algorithm.period.at(at_start)
        saved_steps = at.all_steps[0]  # worker 0's, as everything here
        rounds = int(at.index / saved_steps * (steps // period))
        # The mean loss of the epoch so far stays what it was.
        self.losses.mul_(rounds * period / max(at.index, 1))
        at.index, at.generator, at.first_batches = rounds * period, None, list(self.work.plan.batches)
        at.moved_batches = at.paces = at.fixed = at.periods = None
        at.last_shared = self._shared_step()
        at.seed = f"{self.config.seed}/resumed at {at.step}"
        at.samples = round(at.all_samples / self.work.all_samples_per_own(min(at.epoch, len(self.work.steps) - 1)))
        self.sync.start_at(at_start + at.index)

    def _is_same_plan(self, position: Any) -> bool:
        """Whether a saved worker had this worker's batches."""
        if not isinstance(position, dict) or "first_batches" not in position:
            raise CheckpointError("the checkpoint was not written by cocod train; it has no place in a run")
        if position["shuffle"] != self.config.cluster.shuffle:
            return False
        steps = self._all_steps(position["epoch"])
        return bool(position["first_batches"] == list(self.work.plan.batches) and position["all_steps"] == steps)

    def _all_steps(self, epoch: int) -> list[int]:
        """Every worker's in an epoch; after the last one, those of the last."""
        return list(self.work.all_steps[min(epoch, len(self.work.all_steps) - 1)])

    def save(self) -> None:
        """All workers write a checkpoint; not training time."""
        self._now_at(f"the checkpoint of step {self.at.step}")
        begin = time.perf_counter()
        self._check_losses()
        running = self.clock.is_running
        self.clock.stop()
        self._write_spans()
        own = {
            "sizes": self.folder.sizes(self.rank),
            "clock": self.clock.state(),
            "times": self.times.seconds,
            "losses": self.losses,
            "pace": self.pace.seconds,
        }
        epoch = min(self.at.epoch, len(self.work.steps) - 1)
        self.at.generator = self._generator.get_state()
        self.at.all_steps = self._all_steps(epoch)
        self.at.shuffle = self.config.cluster.shuffle
        self.saved = self.checkpoints.save({**vars(self.at), "own": own}, name=f"step_{self.at.step:010d}")
        self.saved_at = time.monotonic()
        self._span("checkpoint", begin, time.perf_counter())
        if running:
            self.clock.start()

    def _shared_step(self) -> int:
        """Steps in this epoch of the worker that takes fewest; the same on all of them where they meet."""
        everybodys = self.work.all_steps[min(self.at.epoch, len(self.work.all_steps) - 1)]
        return int(self.at.index * min(everybodys) // everybodys[self.rank])

    def _is_save_due(self) -> bool:
        """Whether a checkpoint is due by the number of steps. Minutes are asked for, because clocks differ."""
        options = self.config.checkpoint
        minutes = (time.monotonic() - self.saved_at) / 60
        if self.is_main and options.every_minutes is not None and minutes >= options.every_minutes:
            self.saved_at = time.monotonic()
            self.sync.request(save=True)
        if options.every_steps is None or not (self.work.algorithm.same_period or self.sync.is_round_start):
            return False
        # Counted on from epoch to epoch, and from one number of workers to another.
        now = self._shared_step()
        self.at.shared_steps += now - self.at.last_shared
        self.at.last_shared = now
        is_due = self.at.shared_steps >= options.every_steps
        self.at.shared_steps %= options.every_steps
        return is_due

    # ---- batches that follow the workers' speeds

    def _replan(self, epoch: int, bar: Any) -> None:
        """Move batches to the speeds of the epoch that has ended. The global batch stays, and with it rate and steps."""
        batches = self.work.plan.batches
        seconds = [row[0] for row in self._gather([self.pace.median_seconds()])]
        if any(math.isnan(s) for s in seconds):  # somebody has only just resumed, at the end of an epoch
            return
        paces = [[float(m), s] for m, s in zip(batches, seconds, strict=True)]
        before = [(int(m), s) for m, s in self.at.paces or paces]
        fixed = fixed_shares(batches, seconds, before, self.at.fixed or [0.0] * len(batches))
        self.at.paces, self.at.fixed = paces, fixed
        smallest = min(max(2, self.config.batch_size // _FEWEST), *batches)
        moved, expected = balanced_batches(batches, seconds, fixed, smallest)
        if expected > (1 - _WORTH_MOVING) * max(seconds):
            return
        plan = with_batches(self.work.plan, moved)
        self.clock.start()
        self.sync.reweight(plan.weights[self.rank])
        self.clock.stop()
        self.work = replace(self.work, plan=plan)
        self.at.moved_batches = moved
        self._write_plan(epoch, relative_speeds(batches, seconds))
        if self.is_main:
            shown = f"{', '.join(map(str, batches))} -> {', '.join(map(str, moved))}"
            bar.clear()
            print(
                f"epoch {epoch + 1}: batches {shown}; the longest step {1e3 * max(seconds):.1f} -> "
                f"{1e3 * expected:.1f} ms expected{self._note}",
                flush=True,
            )

    # ---- a period that follows what averages take

    def _find_first_period(self) -> None:
        """Before training, with steps like those of the run."""
        if self.auto is not None:
            self._now_at("the measurement of its step")
            seconds = min(_TIMED_SECONDS, self.config.cluster.measure_seconds)
            with sample_steps(self.config, self.task, self.accelerator, self.work.batch) as run_step:
                measured = measure_speeds(run_step, min_seconds=seconds)
            self.auto.begin_anew()
            self._decide_period(measured.step_seconds[self.rank], None)

    def _decide_period(self, compute_seconds: float, bar: Any) -> None:
        """The same on all workers; said and kept."""
        assert self.auto is not None
        decision = self.auto.decide(compute_seconds)
        self.at.periods = self.auto.schedule
        if decision is not None and self.is_main:
            self.folder.row({"kind": "period", "step": self.step, "epoch": self.at.epoch, **vars(decision), **self._label})
            if bar is not None:
                bar.clear()
            print(f"epoch {self.at.epoch + 1}: {decision}{self._note}", flush=True)

    # ---- evaluation

    def _evaluate(self, epoch: int, bar: Any) -> None:
        self._now_at(f"the evaluation after epoch {epoch + 1}")
        with self.sync.averaged():
            self.model.eval()
            # The module itself: workers may have different numbers of batches, which DDP need not know.
            module = self.accelerator.unwrap_model(self.model)
            num_workers = self.accelerator.num_processes
            scored = score(module, self.config, self.task, self.rank, num_workers, self.accelerator.device)
        samples = self.at.index * self.work.batch
        loss = self.losses.item() / self.at.index
        rows = self._gather([*scored, loss * samples, float(samples), self.clock.seconds])
        seconds = max(row[-1] for row in rows)
        row = {**evaluation_row(epoch, rows, self.config, self.task), "train_seconds": seconds}
        accuracy = row["accuracy"]
        self.at.accuracy, self.at.best_accuracy = accuracy, max(self.at.best_accuracy, accuracy)
        self.times.note(accuracy, seconds)
        self._write_row("eval", row, bar)
        if self.is_main and bar.disable:
            print(
                f"epoch {epoch + 1:3d}/{self.config.schedule.epochs}  accuracy {accuracy:.4f}  "
                f"train loss {row['train_loss']:.4f}  {seconds:.1f} s training{self._note}",
                flush=True,
            )
        bar.set_postfix(accuracy=f"{accuracy:.4f}", refresh=False)

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
            "samples_per_second": self.at.all_samples / seconds,
            "rounds": stats.rounds,
            "comm_bytes": stats.bytes,
            "comm_exposed_seconds": stats.exposed_seconds,
            "comm_hidden_seconds": stats.hidden_seconds,
            "drift": stats.drift,
            **({} if self.auto is None else {"period": self.auto.period}),
        }
        self._write_row("train", row, bar)

    def _write_plan(self, epoch: int, speeds: Sequence[float]) -> None:
        """Who takes which batch from ``epoch`` on, counted from 0."""
        plan = self.work.plan
        row = {"epoch": epoch, "speeds": list(speeds), "batches": list(plan.batches), "weights": list(plan.weights)}
        if self.is_main:
            self.folder.row({"kind": "plan", "step": self.step, **row, **self._label})

    def _write_row(self, kind: str, row: dict[str, Any], bar: Any) -> None:
        if not self.is_main:
            return
        self.folder.row({"kind": kind, "step": self.step, **row, **self._label})
        values = {f"{'comm/' if k.startswith(('comm_', 'drift', 'rounds')) else kind + '/'}{k}": v for k, v in row.items()}
        self.trackers.log({**values, "train_seconds": row["train_seconds"], **self._label}, step=self.step)
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
        done = sum(self.work.steps[: self.at.epoch]) + self.at.index
        total = sum(self.work.steps)
        return tqdm(total=total, initial=done, disable=hidden, unit="step", leave=False, dynamic_ncols=True)

    def _summary(self) -> dict[str, Any]:
        stats, config = self.sync.stats(), self.config
        digest = model_digest(self.accelerator.unwrap_model(self.model))
        rows = self._gather(
            [self.clock.seconds, stats.bytes, stats.exposed_seconds, stats.hidden_seconds, self.at.samples, float(digest)]
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
            "workers_per_replica": config.cluster.workers_per_replica,
            "proportional": config.cluster.proportional,
            "batches": list(self.work.plan.batches),
            "clock": config.clock,
            "emulated": config.emulated,
            "steps": self.step,
            "epochs": config.schedule.epochs,
            "rounds": stats.rounds,
            "best_accuracy": self.at.best_accuracy,
            "final_accuracy": self.at.accuracy,
            "train_seconds": seconds,
            "time_to_accuracy": {f"{target:g}": reached for target, reached in self.times.seconds.items()},
            "comm_bytes": int(num_bytes),
            "comm_exposed_seconds": exposed,
            "comm_hidden_seconds": hidden,
            "samples_per_second": samples / seconds,
            "model_digest": digest,
        }


def _wrapped(accelerator: Accelerator, model: Any, optimizer: Optimizer, inner: Any) -> tuple[Any, Any]:
    """Model and optimizer as accelerate prepares them; DDP for the workers of a node, where they share one."""
    if inner is None or accelerator.state.deepspeed_plugin is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model = accelerator.prepare_model(model, evaluation_mode=True)  # on its device and in its precision, not wrapped
        devices = [accelerator.device] if accelerator.device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=devices, process_group=inner)
        optimizer = accelerator.prepare_optimizer(optimizer)
    # Buffers are averaged for evaluation; broadcasting them in every forward would only be waiting.
    model.broadcast_buffers = False
    return model, optimizer


def export(model: nn.Module, path: Path) -> None:
    """A model that ``model.load_state_dict(safetensors.torch.load_file(path))`` takes."""
    from safetensors.torch import save_file

    temporary = path.with_name(f".{path.name}.tmp")
    # Copies: safetensors refuses memory that two names share, and a loader wants all of them.
    save_file({name: value.detach().cpu().clone() for name, value in model.state_dict().items()}, temporary)
    flush(temporary)
    temporary.replace(path)


def model_digest(model: nn.Module) -> int:
    """48 bits of a hash over parameters and floating buffers: equal models, equal digests."""
    digest = hashlib.blake2b(digest_size=6)
    for value in model.state_dict().values():
        if value.is_floating_point():
            digest.update(bytes_of(value))
    return int.from_bytes(digest.digest(), "big")
