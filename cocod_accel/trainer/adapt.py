"""What follows measured times during a run: the period (``algorithm.period: auto``), and batches by speed
(``cluster.replan_epochs``). Every decision is made from gathered figures, so all workers make the same one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from cocod_accel.sharding.plan import balanced_batches, fixed_shares, with_batches
from cocod_accel.sharding.speeds import measure_speeds, relative_speeds
from cocod_accel.trainer.auto_period import AutoPeriod
from cocod_accel.trainer.calibration import TIMED_SECONDS, sample_steps
from cocod_accel.trainer.recorder import Recorder
from cocod_accel.trainer.worker import Worker

#: Batches are moved only if that makes a step at least this much shorter; moving costs a blocking average.
_WORTH_MOVING = 0.05
#: No worker's batch shrinks below this fraction of batch_size, nor to 1, which BatchNorm cannot take.
_SMALLEST_FRACTION = 8


class Adaptation:
    """Adapts one worker, together with all others, between epochs."""

    def __init__(self, worker: Worker, recorder: Recorder) -> None:
        self._worker, self._recorder, self._config = worker, recorder, worker.config
        self._auto: AutoPeriod | None = None
        if self._config.has_auto_period:
            self._auto = AutoPeriod(worker.sync, worker.gather, self._config.period_by_epoch[0][1])

    @property
    def period(self) -> int | None:
        """The period that was chosen; None: the configuration states it."""
        return None if self._auto is None else self._auto.period

    def begin(self) -> None:
        """Before training: choose the first period from steps like those of the run."""
        if self._auto is not None:
            worker = self._worker
            worker.now_at("the measurement of its step")
            seconds = min(TIMED_SECONDS, self._config.cluster.measure_seconds)
            with sample_steps(self._config, worker.task, worker.accelerator, worker.work.batch) as run_step:
                measured = measure_speeds(run_step, min_seconds=seconds)
            self._auto.begin_anew()
            self._choose_period(measured.step_seconds[worker.rank])

    def restore(self, periods: Sequence[Sequence[int]]) -> None:
        """Continue with the periods that were chosen before a checkpoint."""
        if self._auto is not None:
            self._auto.restore(periods)

    def after_epoch(self, epoch: int) -> None:
        """Adapt to the steps of the epoch before ``epoch``, which is counted from 0."""
        worker, every = self._worker, self._config.cluster.replan_epochs
        if self._auto is not None:
            worker.clock.start()
            self._choose_period(statistics.median(worker.pace.seconds) if worker.pace.seconds else math.nan)
            worker.clock.stop()
        if every is not None and epoch % every == 0:
            self._move_batches(epoch)

    def _choose_period(self, compute_seconds: float) -> None:
        assert self._auto is not None
        decision = self._auto.decide(compute_seconds)
        self._worker.at.periods = self._auto.schedule
        if decision is not None:
            self._recorder.period(decision)

    def _move_batches(self, epoch: int) -> None:
        """The global batch stays, and with it the learning rate and the number of steps."""
        worker = self._worker
        batches = worker.work.plan.batches
        seconds = [row[0] for row in worker.gather([worker.pace.median_seconds()])]
        if any(math.isnan(s) for s in seconds):  # a worker has only just resumed, at the end of an epoch
            return
        paces = [[float(m), s] for m, s in zip(batches, seconds, strict=True)]
        before = [(int(m), s) for m, s in worker.at.paces or paces]
        fixed = fixed_shares(batches, seconds, before, worker.at.fixed or [0.0] * len(batches))
        worker.at.paces, worker.at.fixed = paces, fixed
        smallest = min(max(2, self._config.batch_size // _SMALLEST_FRACTION), *batches)
        moved, expected = balanced_batches(batches, seconds, fixed, smallest)
        if expected > (1 - _WORTH_MOVING) * max(seconds):
            return
        plan = with_batches(worker.work.plan, moved)
        worker.clock.start()
        worker.sync.reweight(plan.weights[worker.rank])
        worker.clock.stop()
        worker.work = replace(worker.work, plan=plan)
        worker.at.moved_batches = moved
        self._recorder.plan(epoch, relative_speeds(batches, seconds))
        shown = f"{', '.join(map(str, batches))} -> {', '.join(map(str, moved))}"
        milliseconds = f"{1e3 * max(seconds):.1f} -> {1e3 * expected:.1f} ms expected"
        self._recorder.say(f"epoch {epoch + 1}: batches {shown}; the longest step {milliseconds}")
