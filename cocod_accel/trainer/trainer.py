"""The training loop. It knows the contract of an algorithm and never a concrete one.

    resume from a checkpoint, or write the first one      # resume.py; which folder: resume_policy.py

    for epoch in epochs:
        clock starts                                      # only what follows counts as training time
        for batch in this worker's shard, reshuffled:
            set the learning rate                         # warm-up, decay
            forward; backward                             # gradients are reduced here, if the algorithm does that
            optimizer.step()                              # a round may end here: guard, then averages land and launch
            metrics row, every few steps                  # this worker's figures; nothing is gathered
            checkpoint, if one is due                     # by steps; by minutes or a signal, agreed at a round's end
            leave, if all workers have agreed to stop     # a request travels with the averages
        clock stops
        with sync.averaged():                             # every few epochs: evaluate the mean model, sharded and exact
            evaluate                                      # the one gather: accuracy, loss, slowest worker's seconds
        metrics row; trackers; spans
        choose the period of the next epoch               # adapt.py, if asked for: time a transfer, sync.control.set_period
        move batches to the speeds of this epoch          # adapt.py, if asked for: sync.reweight, new shards
        checkpoint, every few epochs
    sync.finish()                                         # every worker holds the same mean model
    summary

What the parts share is in :mod:`~cocod_accel.trainer.worker`; everything written is in :mod:`~cocod_accel.trainer.recorder`.
The guard keeps a model with a non-finite loss out of every average.
"""

from __future__ import annotations

from typing import Any

from accelerate.accelerator import Accelerator
from torch import nn

from cocod_accel.checkpoint.export import export_model
from cocod_accel.comm.agreement import try_together
from cocod_accel.comm.groups import default_group
from cocod_accel.comm.watchdog import Watch
from cocod_accel.config.settings import Config
from cocod_accel.runs.folder import RunFolder
from cocod_accel.tasks import Task
from cocod_accel.tasks.structure import num_samples
from cocod_accel.trainer.adapt import Adaptation
from cocod_accel.trainer.export import OutputError, export_making_room
from cocod_accel.trainer.recorder import Recorder
from cocod_accel.trainer.resume import Resumption
from cocod_accel.trainer.resume_policy import Place
from cocod_accel.trainer.steps import evaluation_row, score
from cocod_accel.trainer.work import Position
from cocod_accel.trainer.worker import Worker


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
        self.config, self.task = config, task
        self.worker = Worker(config, task, model, accelerator, watch)
        self.model, self.sync = self.worker.model, self.worker.sync
        self.recorder = Recorder(self.worker, RunFolder(place.path))
        self.adaptation = Adaptation(self.worker, self.recorder)
        self.checkpoints = Resumption(self.worker, self.recorder, self.adaptation, place)
        self.is_stopped = False

    @property
    def at(self) -> Position:
        """Where this worker is in the run."""
        return self.worker.at

    @property
    def step(self) -> int:
        """Optimizer steps this worker has taken."""
        return self.at.step

    def run(self) -> dict[str, Any] | None:
        """Train, and return the summary; None if the workers have agreed to stop before the end."""
        epochs, save_every = self.worker.work.num_epochs, self.config.checkpoint.every_epochs
        evaluation = self.config.evaluation
        self.checkpoints.begin()
        self.recorder.start_bar()
        while self.at.epoch < epochs:
            epoch = self.at.epoch
            self._train_epoch(epoch)
            if self.is_stopped:
                break
            is_last = epoch + 1 == epochs
            if is_last or (evaluation.every_steps is None and (epoch + 1) % evaluation.every_epochs == 0):
                self._evaluate(epoch)
            self.recorder.write_spans()
            self._begin_epoch(epoch + 1)
            if not is_last:
                self.adaptation.after_epoch(epoch + 1)
                if save_every is not None and (epoch + 1) % save_every == 0:
                    self.checkpoints.save()
        self.recorder.close_bar()
        summary = None if self.is_stopped else self._end()
        self.recorder.finish(summary)
        self.sync.detach()
        return summary

    def _begin_epoch(self, epoch: int) -> None:
        self.at.epoch, self.at.index, self.at.last_shared = epoch, 0, 0
        self.worker.losses.zero_()

    def _train_epoch(self, epoch: int) -> None:
        """The rest of an epoch over this worker's shard."""
        worker, at, pace = self.worker, self.at, self.worker.pace
        self.model.train()
        steps = worker.work.steps[epoch]
        pace.slowdown = self.config.slowdown(worker.rank, epoch)
        if at.index == 0:
            pace.seconds.clear()
        supply = worker.batches(epoch)
        all_per_own = worker.work.all_samples_per_own(epoch)
        worker.clock.start()
        for index in range(at.index, steps):
            begin = self.recorder.now()
            pace.begin(self.sync.control.blocked_seconds)
            worker.now_at(f"step {at.step + 1}")
            batch = next(supply)
            self._set_learning_rate(epoch + index / steps)
            worker.optimizer.zero_grad()
            at.step += 1
            at.index += 1
            at.samples += num_samples(batch)
            at.all_samples += num_samples(batch) * all_per_own
            loss = worker.backward(batch)  # under DeepSpeed the optimizer steps in here
            worker.optimizer.step()
            worker.losses += loss.detach()
            stretched = pace.end(self.sync.control.blocked_seconds)
            if stretched is not None:
                self.recorder.span("stretch", *stretched)
            self.recorder.computed(begin)
            is_logged = at.step % self.config.logging.every_steps == 0
            if is_logged:
                self.recorder.step(epoch, loss, self.adaptation.period)
            if self._is_evaluated_here():
                worker.guard.check(at.step, at_once=True)
                self.sync.control.wait()
                worker.clock.stop()
                self._evaluate(epoch)
                self.model.train()
                worker.clock.start()
            agreed = self.sync.control.agreed(ask_now=is_logged)
            if agreed.stop or agreed.save or self.checkpoints.is_due():
                self.checkpoints.save()
                if agreed.stop:
                    self.is_stopped = True
                    break
        worker.guard.check(at.step, at_once=True)
        self.sync.control.wait()
        worker.clock.stop()

    def _set_learning_rate(self, epoch: float) -> None:
        rate = self.worker.work.learning_rate(self.config, epoch)
        for group in self.worker.optimizer.param_groups:
            group["lr"] = rate

    def _is_evaluated_here(self) -> bool:
        """Whether an evaluation by steps is due; the last one comes with the end of the run."""
        every = self.config.evaluation.every_steps
        return every is not None and self.step % every == 0 and self.step < sum(self.worker.work.steps)

    def _evaluate(self, epoch: int) -> None:
        """Test the mean model; each worker takes its part of the test set. Inside an epoch or at its end."""
        worker, at = self.worker, self.at
        steps = worker.work.steps[epoch]
        done = epoch + 1 if at.index == steps else epoch + at.index / steps
        worker.now_at(f"the evaluation after epoch {done:g}")
        with self.sync.averaged():
            self.model.eval()
            # The module itself: workers may have different numbers of batches, which DDP must not see.
            num_workers, device = self.sync.num_workers, worker.accelerator.device
            together = self.sync.subject.shards is not None
            scored = score(worker.module, self.config, self.task, worker.rank, num_workers, device, together=together)
        samples = at.index * worker.work.batch
        loss = worker.losses.item() / at.index
        rows = worker.gather([*scored, loss * samples, float(samples), worker.clock.seconds])
        seconds = max(row[-1] for row in rows)
        row = {**evaluation_row(done, rows, self.config, self.task), "train_seconds": seconds}
        at.accuracy = row[worker.metric.name]
        at.best_accuracy = max(at.best_accuracy, worker.metric.score(at.accuracy))
        worker.times.note(at.accuracy, seconds)
        self.recorder.evaluation(row)

    def _end(self) -> dict[str, Any]:
        """Leave the mean model on every worker and in a file; the summary of the run."""
        worker = self.worker
        worker.clock.start()
        self.sync.finish()
        worker.clock.stop()
        summary = self.recorder.summary()
        worker.now_at("the end of the run, writing its model")
        self._leave(summary)
        return summary

    def _leave(self, summary: dict[str, Any]) -> None:
        """The model and then the summary in files; with a summary, a run is finished. An error is raised on all workers."""

        path = self.recorder.folder.path / "model.safetensors"
        is_shared = self.sync.subject.shards is not None

        def write() -> None:
            if self.worker.is_main:
                if not is_shared:
                    export_making_room(self.worker.module, path, self.checkpoints.all()[1:])
                self.recorder.folder.summary(summary)

        error = None
        if is_shared:
            try:
                export_model(self.sync, path)
            except OSError as problem:  # on all workers
                error = str(problem)
        if error is None:
            _, error = try_together(write, default_group())
        if error is not None:
            self.recorder.finish(None)
            kept = self.checkpoints.all()
            then = "there is no checkpoint, so run it again"
            if kept:
                then = f"{kept[0]} is kept; make room, and the same command finishes the run from there"
            raise OutputError(f"the trained model could not be written ({error.removeprefix('rank 0: ')}); {then}")
