"""Checkpoints of a run: starting from one, and saving one when it is due.

A run that is stopped and resumed with the same workers computes the same bits as one that was not stopped. With other
workers it continues from the mean model, at the same share of the epoch.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from cocod_accel.checkpoint.checkpoints import Checkpoints, Resumed
from cocod_accel.config.loading import save_config
from cocod_accel.config.strict import printable
from cocod_accel.sharding.plan import with_batches
from cocod_accel.trainer.adapt import Adaptation
from cocod_accel.trainer.recorder import Recorder
from cocod_accel.trainer.resume_policy import Place
from cocod_accel.trainer.work import Position, check_position
from cocod_accel.trainer.worker import Worker


class Resumption:
    """Begins a run where its place says, and saves it from then on."""

    def __init__(self, worker: Worker, recorder: Recorder, adaptation: Adaptation, place: Place) -> None:
        self.worker, self._recorder, self._adaptation, self._place = worker, recorder, adaptation, place
        self._config = worker.config
        self._checkpoints = Checkpoints(
            place.path / "checkpoints", worker.sync, worker.accelerator, keep=self._config.checkpoint.keep
        )
        self._saved_at = time.monotonic()
        #: The last checkpoint; None if it could not be written.
        self.saved: Path | None = None

    # ---- before the first step

    def begin(self) -> None:
        """Resume from a checkpoint, or write the first one."""
        resumed = self._load()
        if resumed is None:
            self._recorder.folder.cut(self.worker.rank, {"metrics": 0, "spans": 0})
            self._adaptation.begin()
            self.save()
            self._recorder.plan(0, self._config.speeds)
            return
        self._restore(resumed)
        worker, at = self.worker, self.worker.at
        if worker.is_main:
            how = "" if resumed.is_exact else f"; from the mean of {resumed.num_workers} workers, with a new plan of batches"
            print(printable(f"resumed from {resumed.path} at step {at.step}, epoch {at.epoch + 1}{how}"), flush=True)
        if at.periods is not None:
            self._adaptation.restore(at.periods)
        if not resumed.is_exact or self._place.start is not None or at.step == 0:
            self._recorder.plan(at.epoch, self._config.speeds)
        if worker.is_main:
            save_config(self._config, self._place.path / "config.yaml")  # settings that may change may have changed
        if at.periods is None:
            self._adaptation.begin()
        if self._place.start is not None:
            self.save()  # from now on this run has checkpoints of its own

    def _load(self) -> Resumed | None:
        """Model, optimizer and averages of a checkpoint; None if there is none to start from."""
        if not self._place.is_continued and self._place.start is None:
            return None
        resumed = self._checkpoints.resume(
            self._place.start, is_same=self._is_same_plan, check=check_position, agree=self._check_agreement
        )
        if resumed is not None and self._needs_warm_up(resumed):
            self._warm_up()
            resumed = self._checkpoints.resume(
                resumed.path, is_same=self._is_same_plan, check=check_position, agree=self._check_agreement
            )
        return resumed

    def _check_agreement(self, positions: list[Any]) -> None:
        """Refuse positions with which workers would not meet again."""
        keys = ["epoch", "seed", "shuffle", "first_batches", "all_steps", "moved_batches", "periods"]
        if self.worker.work.algorithm.same_period:
            keys += ["index", "step", "shared_steps", "last_shared"]
        for key in keys:
            if any(position.get(key) != positions[0].get(key) for position in positions):
                raise ValueError(f"its workers differ in position.{key}")

    def _restore(self, resumed: Resumed) -> None:
        """The rest of a checkpoint: where in the run it was taken, and with which plan."""
        worker = self.worker
        saved = dict(resumed.position)
        own = saved.pop("own")
        worker.at = Position(**saved)
        if self._place.start is None:
            # Other workers all get worker 0's position: its spans are not theirs.
            kept = own["sizes"] if resumed.is_exact else {"metrics": own["sizes"].get("metrics", 0)}
            self._recorder.folder.cut(worker.rank, kept)
        worker.clock.load_state(own["clock"])
        worker.times.seconds.update({t: s for t, s in own["times"].items() if t in worker.times.seconds})
        worker.losses.copy_(own["losses"])
        if not resumed.is_exact:
            self._continue_with_other_workers()
            return
        worker.pace.seconds = list(own["pace"])
        if worker.at.moved_batches is not None:
            worker.work = replace(worker.work, plan=with_batches(worker.work.plan, worker.at.moved_batches))
            worker.sync.control.restore_weights(worker.work.plan.weights)

    def _continue_with_other_workers(self) -> None:
        """Not the workers that saved: the same share of the epoch is done for all of them."""
        worker, at, work = self.worker, self.worker.at, self.worker.work
        steps = work.steps[at.epoch] if at.epoch < len(work.steps) else 0
        steps_before = sum(work.steps[: at.epoch])
        period = 1 if work.algorithm.same_period else work.algorithm.period.at(steps_before)
        saved_steps = at.all_steps[0]  # worker 0's, as everything here
        rounds = int(at.index / saved_steps * (steps // period))
        # The mean loss of the epoch so far stays what it was.
        worker.losses.mul_(rounds * period / max(at.index, 1))
        at.index, at.generator, at.first_batches = rounds * period, None, list(work.plan.batches)
        at.moved_batches = at.paces = at.fixed = at.periods = None
        at.last_shared = worker.shared_step()
        at.seed = f"{self._config.seed}/resumed at {at.step}"
        at.samples = round(at.all_samples / work.all_samples_per_own(min(at.epoch, len(work.steps) - 1)))
        worker.sync.control.start_at(steps_before + at.index)

    def _is_same_plan(self, position: Any) -> bool:
        """Whether a saved worker had this worker's batches."""
        if position["shuffle"] != self._config.cluster.shuffle:
            return False
        steps = self.worker.all_steps(position["epoch"])
        return bool(position["first_batches"] == list(self.worker.work.plan.batches) and position["all_steps"] == steps)

    def _needs_warm_up(self, resumed: Resumed) -> bool:
        """Whether the next step's gradients would be summed in another order than without the stop.

        DDP lays out its buckets again after a process's first backward, and with three workers or more the order of a sum
        depends on the layout. Algorithms that send whole models do not depend on it.
        """
        is_later = resumed.is_exact and resumed.position["step"] > 0
        uses_buckets = self.worker.sync.subject.ddp is not None
        together = self._config.cluster.workers_per_replica
        if self.worker.work.algorithm.reduces_gradients:
            together = self.worker.accelerator.num_processes
        return is_later and uses_buckets and together > 2

    def _warm_up(self) -> None:
        """A first backward, for its side effect on DDP; whatever else it changes is loaded again afterwards."""
        worker = self.worker
        worker.model.train()
        worker.accelerator.backward(worker.loss(next(worker.batches(0))))
        worker.optimizer.zero_grad()

    def all(self) -> list[Path]:
        """The checkpoints that are there, the newest first."""
        return self._checkpoints.all()

    # ---- during the run

    def save(self) -> None:
        """All workers write a checkpoint; not training time."""
        worker, at = self.worker, self.worker.at
        worker.now_at(f"the checkpoint of step {at.step}")
        begin = time.perf_counter()
        worker.guard.check(at.step, at_once=True)
        was_running = worker.clock.is_running
        worker.clock.stop()
        self._recorder.write_spans()
        own = {
            "sizes": self._recorder.folder.sizes(worker.rank),
            "clock": worker.clock.state(),
            "times": worker.times.seconds,
            "losses": worker.losses,
            "pace": worker.pace.seconds,
        }
        at.generator = worker.generator.get_state()
        at.all_steps = worker.all_steps(at.epoch)
        at.shuffle = self._config.cluster.shuffle
        self.saved = self._checkpoints.save({**vars(at), "own": own}, name=f"step_{at.step:010d}")
        self._saved_at = time.monotonic()
        self._recorder.span("checkpoint", begin, time.perf_counter())
        if was_running:
            worker.clock.start()

    def is_due(self) -> bool:
        """Whether a checkpoint is due by the number of steps. By minutes it is requested, because clocks differ."""
        worker, at, options = self.worker, self.worker.at, self._config.checkpoint
        minutes = (time.monotonic() - self._saved_at) / 60
        if worker.is_main and options.every_minutes is not None and minutes >= options.every_minutes:
            self._saved_at = time.monotonic()
            worker.sync.control.request(save=True)
        if options.every_steps is None or not (worker.work.algorithm.same_period or worker.sync.control.is_round_start):
            return False
        # The count continues from epoch to epoch, and from one number of workers to another.
        now = worker.shared_step()
        at.shared_steps += now - at.last_shared
        at.last_shared = now
        is_due = at.shared_steps >= options.every_steps
        at.shared_steps %= options.every_steps
        return is_due
