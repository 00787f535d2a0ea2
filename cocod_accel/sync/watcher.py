"""What the hooks on a loop's model and optimizers mean for the algorithm that is attached to it."""

from __future__ import annotations

from torch.autograd import Variable

from cocod_accel.algorithms import Algorithm
from cocod_accel.comm.device import is_capturing
from cocod_accel.sync.auto import AutoPlan
from cocod_accel.sync.belongings import Belongings
from cocod_accel.sync.ddp import ignored_names, under_no_sync
from cocod_accel.sync.deepspeed import EngineRouter
from cocod_accel.sync.driver import Driver
from cocod_accel.sync.places import Places
from cocod_accel.sync.preflight import Subject
from cocod_accel.sync.shards import refreshed
from cocod_accel.sync.step_counter import is_stepped_by_scaler


class LoopWatcher:
    """Told by an :class:`~cocod_accel.sync.step_counter.AttemptCounter`; ends rounds, and sees to gradients."""

    def __init__(self, driver: Driver, reducer: Algorithm, subject: Subject, places: Places, num_workers: int) -> None:
        self._driver, self._method, self._reducer = driver, driver.method, reducer
        self._subject, self._places = subject, places
        ignored, is_sharded = ignored_names(subject.ddp), subject.shards is not None
        self._belongings = Belongings(subject.module, subject.optimizers, ignored, by_name=is_sharded)
        self._ddp, self._engine, self._router = subject.ddp, subject.engine, subject.router
        # Nobody else sees to gradients: one process, and no wrapper or an engine, which then reduces nothing.
        self._without_ddp = self._ddp is None and (self._engine is None or num_workers == 1)
        self._refusal = driver.method.refuses_scaler
        #: Whether this is inside ``averaged()``.
        self.is_averaged = False
        #: What chooses the period, if the algorithm leaves it open.
        self.auto: AutoPlan | None = None

    def attempted(self) -> None:
        with refreshed(self._subject.shards):
            part = self._driver.attempt()
            if part is not None:
                self._check_belongings()
                self._driver.launch(part)
                self._driver.land(part)
        if self.auto is not None:
            self.auto.attempted()

    def step_begins(self, has_closure: bool = False) -> None:
        if self.is_averaged:
            raise RuntimeError("optimizer.step() inside averaged() would be lost; leave the with block first")
        if is_capturing(self._subject.device):
            raise RuntimeError(
                "optimizer.step() inside a graph capture: a graph replays without ending rounds, so workers would train "
                "alone; capture forward and backward only"
            )
        if self._refusal and is_stepped_by_scaler():
            raise RuntimeError(self._refusal)
        self._refusal = ""  # looked at once: a first step is never skipped, because its delayed gradients are zero
        if has_closure and self._method.is_served:
            raise RuntimeError(
                "optimizer.step(closure) computes gradients inside the step, which ASGD makes on its server; call "
                "backward() before step()"
            )
        self._method.step_begins()
        if isinstance(self._router, EngineRouter):
            self._router.before_step(self._reducer, self._subject.trainable)

    def backward_begins(self, accumulating: bool) -> None:
        self._method.backward_begins(accumulating, self._without_ddp)

    def backward_ends(self) -> None:
        self._method.backward_ends(self._without_ddp)
        if self._ddp is not None and self._ddp.find_unused_parameters and self._method.reduces_gradients:
            # Queued from a callback that runs before DDP's own, so that this one runs after it.
            Variable._execution_engine.queue_callback(self._method.after_buckets)

    def backward_dropped(self) -> None:
        self._reducer.backward_dropped()

    def accumulates(self) -> bool:
        if self._engine is not None:
            return not self._engine.is_gradient_accumulation_boundary()
        return self._ddp is not None and under_no_sync(self._ddp)

    def _check_belongings(self) -> None:
        """Before a round ends without what was added meanwhile."""
        problem, shards = self._belongings.problem(), self._subject.shards
        if problem is not None and shards is not None:
            shards.refresh()  # gathered parameters may stand in the place of shards
            problem = self._belongings.problem()
        if problem is not None:
            self._places.leave(problem)
            raise RuntimeError(problem)
