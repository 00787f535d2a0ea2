"""A worker's shard of a model as plain tensors, and back. None is ever gathered for a checkpoint."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cocod_accel.averaging.flat import local
from cocod_accel.sync.preflight import Subject


def held(subject: Subject) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The parameters that a worker holds (of a whole model: its state_dict), and all buffers that are not among them.

    Non-persistent buffers are no part of a state_dict, but they are part of where a worker is.
    """
    module, shards = subject.module, subject.shards
    model = dict(module.state_dict()) if shards is None else shards.held()
    return model, {name: buffer for name, buffer in module.named_buffers() if name not in model}


@torch.no_grad()
def load_held(subject: Subject, tree: Any) -> None:
    """Take the ``model`` and ``buffers`` that :func:`held` returned."""
    module, shards = subject.module, subject.shards
    if shards is None:
        module.load_state_dict(tree["model"])
    else:
        for name, target in shards.held().items():
            target.copy_(tree["model"][name])
        shards.refresh()
    for name, value in tree["buffers"].items():
        module.get_buffer(name).copy_(value)


def whole_optimizers(subject: Subject) -> contextlib.AbstractContextManager[None]:
    """Inside, every optimizer has all of its parameters."""
    return contextlib.nullcontext() if subject.shards is None else subject.shards.whole_optimizer()


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Its state, with this worker's shards in the place of ``DTensor``s."""
    state: dict[str, Any] = _plain(optimizer.state_dict())
    return state


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    optimizer.load_state_dict(like_parameters(optimizer, state))


def like_parameters(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """What :func:`optimizer_state` returned, as that optimizer keeps it."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=True))
    entries = {
        number: {key: _like(by_number[number], value) for key, value in own.items()}
        for number, own in state["state"].items()
    }
    return {**state, "state": entries}


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_plain(value) for value in tree)
    return local(tree) if isinstance(tree, Tensor) else tree


def _like(parameter: Any, value: Any) -> Any:
    shard = local(parameter)
    if shard is parameter or not isinstance(value, Tensor) or value.shape != shard.shape:
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value.to(shard.device), parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
