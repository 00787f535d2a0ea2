"""What a worker computes in a step and in an evaluation: one definition for the trainer and for the simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cocod_accel.checkpoint.rng import kept_randomness
from cocod_accel.comm.device import Fetch, runs_ahead
from cocod_accel.config.settings import ACCURACY, Config
from cocod_accel.tasks import Task
from cocod_accel.tasks.data import Batch, batches
from cocod_accel.tasks.metrics import Loss, cross_entropy, floated, summed, task_loss, task_metrics
from cocod_accel.tasks.structure import num_samples, outputs_and_targets


class NonFiniteLossError(RuntimeError):
    """A worker's loss is not finite."""


def loss_of(model: nn.Module, batch: Batch, loss: Loss = cross_entropy) -> Tensor:
    """The mean loss of a batch, under the autocast of the caller."""
    # An engine's own autocast ends with its forward; the loss is computed in float32 in any case.
    outputs, targets = outputs_and_targets(model, batch)
    return loss(floated(outputs), targets)


def check_finite(losses: Sequence[Tensor], rank: int, step: int) -> None:
    """Raise if one of a worker's last losses, up to ``step``, was not finite; synchronises with the device once."""
    if losses:
        _raise_unless(torch.isfinite(torch.stack(list(losses))).tolist(), rank, step)


def _raise_unless(finite: Sequence[bool], rank: int, step: int) -> None:
    if not all(finite):
        first = step - len(finite) + 1 + finite.index(False)
        raise NonFiniteLossError(f"worker {rank}: the loss is not finite at step {first}; lower the learning rate")


class LossGuard:
    """Raises if a loss is not finite: on a CPU before this worker's model enters an average.

    A device would have to be waited for, so there it is asked at each round's end and answers at the next. A model that
    is not finite is then in one average at most, and in no checkpoint: whoever saves one looks ``at_once``.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._losses: list[Tensor] = []
        self._asked: tuple[Fetch, int] | None = None

    def note(self, loss: Tensor) -> None:
        self._losses.append(loss.detach())

    def check(self, step: int, *, at_once: bool = False) -> None:
        """Look at the losses since the last call, the last of which is that of ``step``."""
        losses, self._losses = self._losses, []
        asked, self._asked = self._asked, None
        if asked is not None:
            _raise_unless(asked[0].value().tolist(), self._rank, asked[1])
        if losses and not at_once and runs_ahead(losses[0].device):
            self._asked = Fetch(torch.isfinite(torch.stack(losses))), step
        else:
            check_finite(losses, self._rank, step)


def score(
    model: nn.Module,
    config: Config,
    task: Task,
    rank: int,
    num_workers: int,
    device: torch.device,
    *,
    together: bool = False,
) -> list[float]:
    """The sum of losses over one worker's part of the test set; if configured, that over its part of the training set
    (built-in data: without augmentation); then of each metric the sum of its values and their number. The model is in
    evaluation mode.

    ``together``: the model is sharded, so every worker takes as many batches as worker 0.
    """

    loss, metrics = task_loss(config), task_metrics(config)

    def sums(data: Any, size: int) -> list[float]:
        losses, found = 0.0, [[0.0, 0.0] for _ in metrics]
        indices = torch.arange(rank, size, num_workers)
        for batch in batches(data, indices, config.evaluation.batch_size, device):
            with torch.autocast(device.type, torch.bfloat16, config.precision == "bf16"):
                outputs, targets = outputs_and_targets(model, batch)
            outputs, samples = floated(outputs), num_samples(batch)
            losses += summed(loss, outputs, targets, samples)
            for metric, sums_of in zip(metrics, found, strict=True):
                if metric.values is not None:
                    values = torch.as_tensor(metric.values(outputs, targets))
                    sums_of[0] += values.double().sum().item() * (1 if values.dim() else samples)
                    sums_of[1] += values.numel() if values.dim() else samples
        most, own = (len(range(r, size, num_workers)) for r in (0, rank))
        size_of = config.evaluation.batch_size
        for _ in range(-(-most // size_of) - -(-own // size_of) if together else 0):
            outputs_and_targets(model, next(iter(batches(data, torch.zeros(1, dtype=torch.int64), 1, device))))
        return [losses, *(value for pair in found for value in pair)]

    with torch.no_grad():
        tested = sums(task.test, task.num_test)
        if not config.evaluation.training_loss:
            return [tested[0], 0.0, *tested[1:]]
        with kept_randomness():  # a loader draws random numbers, and evaluating must not change training
            return [tested[0], sums(task.train, task.num_train)[0], *tested[1:]]


def evaluation_row(epoch: float, rows: Sequence[Sequence[float]], config: Config, task: Task) -> dict[str, Any]:
    """All workers' evaluation after ``epoch`` epochs; inside one, it has a fraction.

    A row is what :func:`score` returned, the sum of the epoch's training losses over samples, and the number of those.
    """
    metrics = task_metrics(config)
    totals = [math.fsum(row[i] for row in rows) for i in range(4 + 2 * len(metrics))]
    test_loss, mean_loss, *found = totals[:-2]
    row: dict[str, Any] = {"epoch": epoch}
    for index, metric in enumerate(metrics):
        if metric.values is not None:
            row[metric.name] = found[2 * index] / found[2 * index + 1]
    row |= {"test_loss": test_loss / task.num_test, "train_loss": totals[-2] / totals[-1]}
    if metrics[0].name != ACCURACY:  # what a reader takes for granted
        row |= {"metric": metrics[0].name, "better": metrics[0].better}
    if config.evaluation.training_loss:
        row["mean_train_loss"] = mean_loss / task.num_train
    return row
