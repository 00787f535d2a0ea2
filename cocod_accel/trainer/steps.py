"""What a worker computes in a step and in an evaluation: one definition for the trainer and for the simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cocod_accel.checkpoint.rng import kept_randomness
from cocod_accel.comm.device import Fetch, runs_ahead
from cocod_accel.config.settings import Config
from cocod_accel.tasks import Task
from cocod_accel.tasks.data import batches


class NonFiniteLossError(RuntimeError):
    """A worker's loss is not finite."""


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of a batch, under the autocast of the caller."""
    # An engine's own autocast ends with its forward; the loss is computed in float32 in any case.
    return nn.functional.cross_entropy(model(inputs).float(), labels)


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
    """Correct answers and the sum of losses over one worker's part of the test set; then, if configured, the sum of losses
    over its part of the training set (built-in data: without augmentation). The model is in evaluation mode.

    ``together``: the model is sharded, so every worker takes as many batches as worker 0.
    """

    def sums(data: Any, size: int) -> tuple[float, float]:
        correct, losses = 0.0, 0.0
        indices = torch.arange(rank, size, num_workers)
        for inputs, labels in batches(data, indices, config.evaluation.batch_size, device):
            with torch.autocast(device.type, torch.bfloat16, config.precision == "bf16"):
                outputs = model(inputs)
            correct += (outputs.argmax(1) == labels).sum().item()
            losses += nn.functional.cross_entropy(outputs.float(), labels, reduction="sum").item()
        most, own = (len(range(r, size, num_workers)) for r in (0, rank))
        size_of = config.evaluation.batch_size
        for _ in range(-(-most // size_of) - -(-own // size_of) if together else 0):
            model(next(iter(batches(data, torch.zeros(1, dtype=torch.int64), 1, device)))[0])
        return correct, losses

    with torch.no_grad():
        tested = sums(task.test, task.num_test)
        if not config.evaluation.training_loss:
            return [*tested, 0.0]
        with kept_randomness():  # a loader draws random numbers, and evaluating must not change training
            return [*tested, sums(task.train, task.num_train)[1]]


def evaluation_row(epoch: float, rows: Sequence[Sequence[float]], config: Config, task: Task) -> dict[str, Any]:
    """All workers' evaluation after ``epoch`` epochs; inside one, it has a fraction.

    A row is what :func:`score` returned, the sum of the epoch's training losses over samples, and the number of those.
    """
    correct, test_loss, mean_loss, train_loss, num_samples = (math.fsum(row[i] for row in rows) for i in range(5))
    row = {
        "epoch": epoch,
        "accuracy": correct / task.num_test,
        "test_loss": test_loss / task.num_test,
        "train_loss": train_loss / num_samples,
    }
    if config.evaluation.training_loss:
        row["mean_train_loss"] = mean_loss / task.num_train
    return row
