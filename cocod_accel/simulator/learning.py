"""What N workers learn: a run of the trainer with all of its workers in one process, without a clock.

Every worker has its own model, optimizer, batches and random numbers, as the processes of a real run have, and the
trainer's own functions compute with them. With two workers the rows and the final model are those of two processes to the
bit; with more, up to the order in which sums are formed. Memory grows with N times the size of model, optimizer state and
averages in flight: activations are those of one worker at a time, and all share one data set.

When something happens is not told here. A row says after which step, and a timeline knows when that was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cocod_accel.algorithms import ASGD
from cocod_accel.checkpoint.rng import kept_randomness, random_state, set_random_state
from cocod_accel.config.algorithms import algorithm_class, num_processes
from cocod_accel.config.settings import MEASURE, Config
from cocod_accel.config.strict import ConfigError
from cocod_accel.sharding.sampler import seeded_generator
from cocod_accel.simulator.lockstep import Lockstep, NoGradientError
from cocod_accel.simulator.served import Turn
from cocod_accel.simulator.served_lockstep import ServedLockstep
from cocod_accel.tasks import build_model, build_optimizer, build_task
from cocod_accel.tasks.data import Batch
from cocod_accel.tasks.metrics import first_metric, task_loss
from cocod_accel.tasks.structure import num_samples, pieces
from cocod_accel.theory.hiding import AUTO
from cocod_accel.trainer.export import model_digest
from cocod_accel.trainer.launch import threads_of_each
from cocod_accel.trainer.process import seed_everything
from cocod_accel.trainer.steps import check_finite, evaluation_row, loss_of, score
from cocod_accel.trainer.work import Work


@dataclass(frozen=True)
class Learnt:
    """A row of the trainer's ``metrics.jsonl`` without what only a clock can tell: what was learnt after a step."""

    #: train or eval.
    kind: str
    #: Steps that worker 0 has taken.
    step: int
    values: Mapping[str, Any]
    #: Samples that all workers together have taken.
    samples: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What the summary of a run says of learning."""

    steps: int
    rounds: int
    best_accuracy: float
    final_accuracy: float
    #: What the worker that sends most would have sent.
    comm_bytes: int
    samples: float
    model_digest: int


@dataclass
class _Learner:
    """One worker, as a process of its own would hold it."""

    work: Work
    model: nn.Module
    optimizer: Optimizer
    #: The last loss, the sum of this epoch's, and those that have not been looked at.
    loss: Tensor
    losses: Tensor
    unchecked: list[Tensor] = field(default_factory=list)
    supply: Iterator[Batch] = field(default_factory=lambda: iter(()))
    step: int = 0
    #: Steps taken in this epoch.
    index: int = 0
    #: Of all workers, as far as this one knows.
    samples: float = 0.0
    all_samples_per_own: float = 1.0


class Turns:
    """Whose random numbers and threads are in force.

    Each process of a real run draws from its own generators (python's, numpy's, torch's). Here a worker's are put away while
    another one computes, and the caller gets its own back whenever it has the process again.
    """

    def __init__(self, states: Sequence[dict[str, Any]], threads: int) -> None:
        self._states = list(states)
        self._threads = threads
        self._acting: int | None = None

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Inside, workers compute; afterwards random numbers and threads are the caller's again."""
        threads = torch.get_num_threads()
        with kept_randomness():
            torch.set_num_threads(self._threads)
            try:
                yield
            finally:
                self._rest()
                torch.set_num_threads(threads)

    def become(self, rank: int) -> None:
        """From now on random numbers are those of worker ``rank``."""
        if self._acting != rank:
            self._rest()
            set_random_state(self._states[rank])
            self._acting = rank

    def _rest(self) -> None:
        if self._acting is not None:
            self._states[self._acting] = random_state()
            self._acting = None


class Learning:
    """All workers of one run.

    Args:
        config: the run; ``cluster.speeds`` must be known.
        threads: to compute with; None: as many as each process of a real run on this machine has. With another number the
            kernels of torch round differently, and so does everything that follows.
        on_step: called after every step of worker 0, of ``num_steps``; for a progress bar.
        turns: of an algorithm with a server, in which order gradients arrive; a timeline of this run has found them.
    """

    def __init__(
        self,
        config: Config,
        *,
        threads: int | None = None,
        on_step: Callable[[], object] | None = None,
        turns: Sequence[Turn] = (),
    ) -> None:
        _check(config, has_turns=bool(turns))
        self.config = config
        self.num_workers = config.cluster.num_workers
        self._on_step = on_step
        on_cpu = config.cluster.device == "cpu" or not torch.cuda.is_available()
        self._device = torch.device("cpu" if on_cpu else "cuda")
        self._epoch = 0
        self._accuracies: list[float] = []
        self._rows: list[Learnt] = []
        with kept_randomness():
            seed_everything(config.seed)
            self.task = build_task(config)
            self._metric, self._loss = first_metric(config), task_loss(config)
            self._learners, states = self._build()
        self._turns = Turns(states, threads_of_each(num_processes(config)) if threads is None else threads)
        try:
            self._lockstep = self._driven(turns)
        except (TypeError, ValueError) as error:
            raise self._refusal(error) from error

    @property
    def num_steps(self) -> int:
        """Steps that worker 0 takes in all."""
        return sum(self._learners[0].work.steps)

    def rows(self) -> Iterator[Learnt]:
        """Train, once, and tell what is learnt as it is learnt."""
        assert self._learners[0].step == 0, "it has been trained"
        epochs, evaluation = self._learners[0].work.num_epochs, self.config.evaluation
        by_steps = evaluation.every_steps is not None
        for epoch in range(epochs):
            self._begin_epoch(epoch)
            for limits, is_end in self._stretches(epoch):
                while any(learner.step < limit for learner, limit in zip(self._learners, limits, strict=True)):
                    with self._turns.in_charge():
                        self._advance(limits)
                    yield from self._taken_rows()
                is_last = is_end and epoch + 1 == epochs
                at_step = by_steps and self._learners[0].step % (evaluation.every_steps or 1) == 0
                at_epoch = not by_steps and is_end and (epoch + 1) % evaluation.every_epochs == 0
                with self._turns.in_charge():
                    for rank in range(self.num_workers):
                        self.guard(rank)
                    if is_last or at_step or at_epoch:
                        self._evaluate()
                yield from self._taken_rows()
        with self._turns.in_charge():
            self._lockstep.finish()

    def outcome(self) -> Outcome:
        """After all rows: what is known of the run."""
        digests = {model_digest(learner.model.state_dict()) for learner in self._learners}
        if len(digests) != 1:
            raise RuntimeError(
                "the workers' models differ after the last average; please report this with the configuration"
            )
        first = self._learners[0]
        return Outcome(
            steps=first.step,
            rounds=self._lockstep.workers[0].driver.clock.rounds,
            best_accuracy=max(self._accuracies, key=self._metric.score),
            final_accuracy=self._accuracies[-1],
            comm_bytes=max(worker.driver.replica.route.traffic.num_bytes for worker in self._lockstep.workers),
            samples=first.samples,
            model_digest=digests.pop(),
        )

    @property
    def model(self) -> nn.Module:
        """After all rows: the mean model."""
        return self._learners[0].model

    # ---- what a worker does of its own

    def compute(self, rank: int) -> None:
        self._turns.become(rank)
        learner = self._learners[rank]
        steps = learner.work.steps[self._epoch]
        batch = next(learner.supply)
        for group in learner.optimizer.param_groups:
            group["lr"] = learner.work.learning_rate(self.config, self._epoch + learner.index / steps)
        total: Tensor | None = None
        for piece, share in pieces(batch, self.config.optimizer.accumulate):
            with torch.autocast(self._device.type, torch.bfloat16, self.config.precision == "bf16"):
                loss = loss_of(learner.model, piece, self._loss)
            loss = loss if share == 1 else loss * share
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        learner.loss = total
        learner.unchecked.append(learner.loss)
        learner.losses += learner.loss
        learner.step += 1
        learner.index += 1
        learner.samples += num_samples(batch) * learner.all_samples_per_own

    def guard(self, rank: int) -> None:
        learner = self._learners[rank]
        losses, learner.unchecked = learner.unchecked, []
        check_finite(losses, rank, learner.step)

    def stepped(self, rank: int) -> None:
        if rank != 0:
            return
        learner, worker = self._learners[0], self._lockstep.workers[0]
        if learner.step % self.config.logging.every_steps == 0:
            values = {
                "loss": learner.loss.item(),
                "learning_rate": learner.optimizer.param_groups[0]["lr"],
                "rounds": worker.driver.clock.rounds,
                "comm_bytes": worker.driver.replica.route.traffic.num_bytes,
                "drift": worker.driver.replica.drift,
                **worker.driver.method.own_stats(),
            }
            self._tell("train", {"epoch": self._epoch + 1, **values})
        if self._on_step is not None:
            self._on_step()

    # ---- details

    def _driven(self, turns: Sequence[Turn]) -> Lockstep | ServedLockstep:
        models, optimizers, algorithms = zip(
            *((each.model, each.optimizer, each.work.algorithm) for each in self._learners), strict=True
        )
        weights = self._learners[0].work.plan.weights
        if isinstance(algorithms[0], ASGD):
            model = copy.deepcopy(models[0])
            optimizer = build_optimizer(self.config, model)
            return ServedLockstep(models, optimizers, algorithms, weights, model, optimizer, turns)
        return Lockstep(models, optimizers, algorithms, weights, self.config.cluster.workers_per_replica)

    def _build(self) -> tuple[list[_Learner], list[dict[str, Any]]]:
        """Workers with equal models, and their random numbers; processes build a model each, and DDP copies worker 0's."""
        works = [Work.of(self.config, self.task.num_train, rank) for rank in range(self.num_workers)]
        before = random_state()
        learners: list[_Learner] = []
        states = []
        for rank, work in enumerate(works):
            set_random_state(before)
            model = build_model(self.config, self.task).to(self._device)
            if learners:
                _copy(learners[0].model, model)
            seed_everything(self.config.seed + rank)
            states.append(random_state())
            zero = torch.zeros((), device=self._device)
            learners.append(_Learner(work, model, build_optimizer(self.config, model), loss=zero, losses=zero.clone()))
        return learners, states

    def _refusal(self, error: Exception) -> ConfigError:
        return ConfigError(f"algorithm.name={self.config.algorithm.name}: {error}")

    def _advance(self, limits: Sequence[int]) -> None:
        try:
            self._lockstep.advance(self, limits)
        except NoGradientError as error:
            raise self._refusal(error) from error

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        for rank, learner in enumerate(self._learners):
            learner.model.train()
            learner.index = 0
            learner.losses.zero_()
            learner.all_samples_per_own = learner.work.all_samples_per_own(epoch)
            generator = seeded_generator(self.config.seed, "augment", rank, epoch)
            learner.supply = learner.work.supply(
                self.config, self.task.train, epoch, self._device, seed=self.config.seed, generator=generator
            )

    def _stretches(self, epoch: int) -> Iterator[tuple[list[int], bool]]:
        """Up to which steps the workers go before the next evaluation by steps, and whether the epoch ends there."""
        ends = [learner.step + learner.work.steps[epoch] for learner in self._learners]
        every = self.config.evaluation.every_steps
        if every is not None:  # all take the same steps
            first = self._learners[0].step
            for step in range(first - first % every + every, ends[0], every):
                yield [step] * self.num_workers, False
        yield ends, True

    def _evaluate(self) -> None:
        rows: list[list[float]] = []

        def look(rank: int) -> None:
            self._turns.become(rank)
            learner = self._learners[rank]
            learner.model.eval()
            scored = score(learner.model, self.config, self.task, rank, self.num_workers, self._device)
            samples = learner.index * learner.work.batch
            rows.append([*scored, learner.losses.item() / learner.index * samples, float(samples)])

        self._lockstep.averaged(look)
        for learner in self._learners:
            learner.model.train()
        first = self._learners[0]
        steps = first.work.steps[self._epoch]
        done = self._epoch + 1 if first.index == steps else self._epoch + first.index / steps
        values = evaluation_row(done, rows, self.config, self.task)
        self._accuracies.append(values[self._metric.name])
        self._tell("eval", values)

    def _tell(self, kind: str, values: dict[str, Any]) -> None:
        first = self._learners[0]
        self._rows.append(Learnt(kind, first.step, values, first.samples))

    def _taken_rows(self) -> list[Learnt]:
        rows, self._rows = self._rows, []
        return rows


@torch.no_grad()
def _copy(source: nn.Module, target: nn.Module) -> None:
    for module_tensors in (nn.Module.parameters, nn.Module.buffers):
        for theirs, ours in zip(module_tensors(source), module_tensors(target), strict=True):
            ours.copy_(theirs)


def _check(config: Config, *, has_turns: bool) -> None:
    """Refuse what depends on how long things really take, or is not driven here."""
    is_served = algorithm_class(config.algorithm.name).is_served
    if is_served and not has_turns:
        raise ConfigError(
            f"algorithm.name={config.algorithm.name}: what is learnt follows from a timeline; use cocod simulate"
        )
    cluster = config.cluster
    for key, value, refused, fix in (
        ("speeds", cluster.speeds, cluster.speeds == MEASURE, "nothing is measured in a simulation; give a list"),
        (
            "replan_epochs",
            cluster.replan_epochs,
            cluster.replan_epochs is not None,
            "follows measured times; set it to null",
        ),
    ):
        if refused:
            raise ConfigError(f"cluster.{key}={value}: {fix}")
    options = config.algorithm
    for key, value, fix in (
        ("period", options.period, "give a number of steps"),
        ("payload", options.payload, "name a payload"),
        ("delay", options.delay, "give a number of steps, or null"),
    ):
        if value == AUTO:
            raise ConfigError(f"algorithm.{key}={value}: follows measured times; {fix}")
