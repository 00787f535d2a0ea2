"""Losses and metrics: by name, or as a user's ``module:callable``.

A loss is a function of (outputs, targets) that returns the mean over the batch. A metric is a function of (outputs, targets)
that returns values, of samples or of anything else, whose mean over the test set is reported; a single number is the mean of
its batch. A user's metric is better the higher it is, unless the function has an attribute ``better = "lower"``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cocod_accel.config.settings import ACCURACY, Config
from cocod_accel.config.strict import require
from cocod_accel.tasks.names import entry, imported

Loss = Callable[[Any, Any], Tensor]
HIGHER, LOWER = "higher", "lower"


@dataclass(frozen=True)
class Metric:
    """What is measured in an evaluation."""

    name: str
    better: str
    #: None: the loss of the test set.
    values: Callable[[Any, Any], Any] | None

    def score(self, value: float) -> float:
        """A number that is the higher, the better."""
        return value if self.better == HIGHER else -value

    def summary(self, last: float | None, best: float | None, seconds: Mapping[float, float | None]) -> dict[str, Any]:
        """What ``summary.json`` says of it; accuracy, which every run had at first, is the default of a reader."""
        known = {} if self.name == ACCURACY else {"metric": self.name, "better": self.better}
        reached = {f"{target:g}": when for target, when in seconds.items()}
        name = self.name
        return {f"best_{name}": best, f"final_{name}": last, f"time_to_{name}": reached, **known}


def _rows(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """One row of logits for each target: of a sequence, every position has one."""
    if outputs.dim() > 2 and outputs.shape[:-1] == targets.shape:
        return outputs.flatten(0, -2), targets.flatten()
    return outputs, targets


def cross_entropy(outputs: Any, targets: Any) -> Tensor:
    """Of classes, or of the next byte at every position"""
    return nn.functional.cross_entropy(*_rows(outputs, targets))


def summed(loss: Loss, outputs: Any, targets: Any, samples: int) -> float:
    """The sum of a loss over samples; of classes as it was always rounded, so that old runs resume to the bit."""
    if loss is cross_entropy and outputs.dim() == 2:
        return float(nn.functional.cross_entropy(outputs, targets, reduction="sum").item())
    return float(loss(outputs, targets).item()) * samples


def mse(outputs: Any, targets: Any) -> Tensor:
    """The mean squared error"""
    return nn.functional.mse_loss(outputs, targets)


def model(outputs: Any, targets: Any) -> Tensor:
    """What the model returns as its loss, as Hugging Face models do"""
    loss: Tensor = outputs["loss"] if isinstance(outputs, Mapping) else outputs.loss
    return loss


def accuracy(outputs: Any, targets: Any) -> Tensor:
    logits, labels = _rows(outputs, targets)
    return (logits.argmax(1) == labels).float()


def bits_per_byte(outputs: Any, targets: Any) -> Tensor:
    logits, labels = _rows(outputs, targets)
    return nn.functional.cross_entropy(logits, labels, reduction="none") / math.log(2)


def squared_error(outputs: Any, targets: Any) -> Tensor:
    found: Tensor = (outputs - targets).square()
    return found


LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "mse": mse, "model": model}
METRICS: dict[str, Metric] = {
    ACCURACY: Metric(ACCURACY, HIGHER, accuracy),
    "bits_per_byte": Metric("bits_per_byte", LOWER, bits_per_byte),
    "squared_error": Metric("squared_error", LOWER, squared_error),
    "loss": Metric("test_loss", LOWER, None),
}


def task_loss(config: Config) -> Loss:
    """The loss that ``task.loss`` names."""
    name = config.task.loss
    return _own(name, "task.loss") if ":" in name else entry(LOSSES, name, "task.loss")  # type: ignore[no-any-return]


def task_metrics(config: Config) -> list[Metric]:
    """The metrics that ``task.metrics`` names; targets are of the first."""
    found = []
    for index, name in enumerate(config.metrics):
        key = f"task.metrics[{index}]"
        if ":" not in name:
            found.append(entry(METRICS, name, key))
            continue
        function = _own(name, key)
        better = getattr(function, "better", HIGHER)
        require(better in (HIGHER, LOWER), key, name, f"its attribute better={better!r} must be {HIGHER!r} or {LOWER!r}")
        found.append(Metric(name.partition(":")[2], better, function))
    names = [metric.name for metric in found]
    require(len(set(names)) == len(names), "task.metrics", names, "names a metric twice; give each once")
    return found


def first_metric(config: Config) -> Metric:
    """The one that targets, ``best_`` and ``final_`` are of."""
    return task_metrics(config)[0]


def floated(outputs: Any) -> Any:
    """Outputs in float32: what follows is computed in it, whatever the model's autocast was."""
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.is_floating_point() and outputs.dtype != torch.float64 else outputs
    return outputs


def _own(name: str, key: str) -> Any:
    function = imported(name, key)
    require(callable(function), key, name, "must be a function of (outputs, targets)")
    return function
