"""What is trained: data set, model and optimizer, by name or as a user's ``module:callable``."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from cocod_accel.config.settings import Config
from cocod_accel.config.strict import ConfigError, first_line
from cocod_accel.tasks.data import DATASETS, Task, check_files, own_task
from cocod_accel.tasks.facts import TaskFacts, known_facts
from cocod_accel.tasks.metrics import task_loss, task_metrics
from cocod_accel.tasks.models import MODELS, SEQUENCE_MODELS
from cocod_accel.tasks.names import entry, imported
from cocod_accel.tasks.optimizers import build_optimizer

__all__ = [
    "DATASETS", "MODELS", "Task", "TaskFacts", "build_model", "build_optimizer", "build_task", "check_model", "check_task",
    "task_facts",
]  # fmt: skip


def build_task(config: Config) -> Task:
    """The training and test data that ``task`` names."""
    name = config.task.name
    task_loss(config)
    task_metrics(config)
    if ":" in name:
        return own_task(_call(name, config.task.args, "task"), config)
    task: Task = entry(DATASETS, name, "task.name")(config)
    return task


def check_task(config: Config) -> TaskFacts | None:
    """Raise for a task that cannot be built, without reading any data; what is known of it. None: a user's own."""
    if ":" in config.task.name:
        _found(config.task.name, config.task.args, "task")
        return None
    facts = task_facts(config)
    check_files(config)
    return facts


def check_model(config: Config, task: TaskFacts | Task | None) -> None:
    """Raise for a model that cannot be built; a user's own is only looked up."""
    if ":" in config.model.name:
        _found(config.model.name, config.model.args, "model")
    else:
        _known_model(config, task)


def task_facts(config: Config) -> TaskFacts:
    """What is known of ``task`` without loading it; a user's own has to be built."""
    if ":" in config.task.name:
        task = build_task(config)
        return TaskFacts(task.num_train, task.num_test, task.input_shape, task.num_classes)
    entry(DATASETS, config.task.name, "task.name")
    return known_facts(config)


def build_model(config: Config, task: Task | TaskFacts) -> nn.Module:
    """The model that ``model`` names, for the images and classes of ``task``."""
    name = config.model.name
    if ":" in name:
        model = _call(name, config.model.args, "model")
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model.name={name}: returned a {type(model).__name__}, not a torch.nn.Module")
        return model
    kind = _known_model(config, task)
    try:
        built: nn.Module = kind(task.input_shape, task.num_classes, **config.model.args)
    except ValueError as error:
        raise ConfigError(f"model.args.{first_line(error)}") from error
    return built


def _known_model(config: Config, task: TaskFacts | Task | None) -> Any:
    name = config.model.name
    kind = entry(MODELS, name, "model.name")
    known = list(inspect.signature(kind).parameters)[2:]
    if config.model.args and not known:
        raise ConfigError(f"model.args={config.model.args}: requires model.name=module:callable")
    for key, value in config.model.args.items():
        if key not in known:
            raise ConfigError(f"model.args.{key}={value}: is not an option of {name}; it takes {', '.join(known)}")
    wanted = "sequences" if name in SEQUENCE_MODELS else "images"
    if task is not None and len(task.input_shape) != (1 if name in SEQUENCE_MODELS else 3):
        fix = "use model.name=gpt or module:callable" if len(task.input_shape) == 1 else "use module:callable"
        raise ConfigError(
            f"model.name={name}: requires {wanted}, but the task has inputs of shape {task.input_shape}; {fix}"
        )
    return kind


def _call(name: str, arguments: dict[str, Any], section: str) -> Any:
    return _found(name, arguments, section)(**arguments)


def _found(name: str, arguments: dict[str, Any], section: str) -> Any:
    """The user's callable, which takes these arguments."""
    function = imported(name, f"{section}.name")
    try:
        inspect.signature(function).bind(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{section}.args={arguments}: {name} does not accept them: {first_line(error)}") from error
    return function
