"""What is known about a data set without loading it: enough to plan and to simulate a run."""

from __future__ import annotations

from dataclasses import dataclass

from cocod_accel.config.settings import Config
from cocod_accel.tasks.data import synthetic_options, text


@dataclass(frozen=True)
class TaskFacts:
    num_train: int
    num_test: int
    input_shape: tuple[int, ...]
    num_classes: int


_KNOWN = {
    "fashion_small": TaskFacts(5_000, 2_500, (1, 28, 28), 10),
    "fashion_mnist": TaskFacts(60_000, 10_000, (1, 28, 28), 10),
    "mnist": TaskFacts(60_000, 10_000, (1, 28, 28), 10),
    "cifar10": TaskFacts(50_000, 10_000, (3, 32, 32), 10),
    "cifar100": TaskFacts(50_000, 10_000, (3, 32, 32), 100),
}


def known_facts(config: Config) -> TaskFacts:
    """The facts of a built-in data set, with limits applied."""
    task = config.task
    if task.name == "text":  # which has to be read
        found = text(config)
        return TaskFacts(found.num_train, found.num_test, found.input_shape, found.num_classes)
    if task.name == "synthetic":
        options = synthetic_options(config)
        shape = (options["channels"], options["size"], options["size"])
        facts = TaskFacts(options["num_train"], options["num_test"], shape, options["num_classes"])
    else:
        facts = _KNOWN[task.name]
    sizes = [
        size if limit is None else min(size, limit)
        for size, limit in ((facts.num_train, task.train_limit), (facts.num_test, task.test_limit))
    ]
    shrink = 1 if task.name == "synthetic" else task.shrink
    smaller = (facts.input_shape[0], *(size // shrink for size in facts.input_shape[1:]))
    return TaskFacts(sizes[0], sizes[1], smaller, facts.num_classes)
