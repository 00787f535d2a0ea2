"""N workers in one process, written out step by step: what the checks compare real workers with.

It shares nothing with the algorithms: models are lists of tensors here, and means are formed in the order of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

RATE, MOMENTUM = 0.1, 0.9


@dataclass(frozen=True)
class Run:
    """What is trained: a rule, and what every node does. A node is a worker, or several that add up their gradients."""

    rule: str
    period: int
    #: Of each worker.
    weights: tuple[float, ...]
    delay: int | None = None
    node_size: int = 1


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = (model(batch[:, :-1]) - batch[:, -1:]).square().mean()
    return loss


def trained(run: Run, model: nn.Module, batches: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The parameters of every worker after the last step; ``batches[i][t]`` is what worker i sees at step t."""
    members = [range(first, first + run.node_size) for first in range(0, len(run.weights), run.node_size)]
    total = sum(run.weights)
    shares = [sum(run.weights[worker] for worker in node) / total for node in members]
    models = [copy.deepcopy(model) for _ in members]
    optimizers = [torch.optim.SGD(each.parameters(), lr=RATE, momentum=MOMENTUM) for each in models]

    def gradients(node: int, step: int) -> list[Tensor]:
        inside = sum(run.weights[worker] for worker in members[node])
        models[node].zero_grad()
        for worker in members[node]:
            (run.weights[worker] / inside * loss_of(models[node], batches[worker][step])).backward()
        return [_gradient(parameter).clone() for parameter in models[node].parameters()]

    def take(node: int, used: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(models[node].parameters(), used, strict=True):
            parameter.grad = gradient.clone()
        optimizers[node].step()

    def mean_of(rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        return [torch.stack([w * t for w, t in zip(shares, row, strict=True)]).sum(0) for row in zip(*rows, strict=True)]

    def held() -> list[list[Tensor]]:
        return [[parameter.detach().clone() for parameter in each.parameters()] for each in models]

    def set_to(node: int, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(models[node].parameters(), values, strict=True):
                parameter.copy_(value)

    k = run.period
    delay = k if run.delay is None else run.delay
    before: list[Tensor] | None = None
    snapshots, launched = held(), 0
    for step in range(len(batches[0])):
        everybodys = [gradients(node, step) for node in range(len(models))]
        if run.rule in ("ssgd", "pipe"):
            mean = mean_of(everybodys)
            used = mean if run.rule == "ssgd" else before or [torch.zeros_like(gradient) for gradient in mean]
            before = mean
            everybodys = [used] * len(models)
        for node, used in enumerate(everybodys):
            take(node, used)
        taken = step + 1
        if run.rule == "cocod" and taken == launched + delay:
            z = mean_of(snapshots)
            for node, (values, snapshot) in enumerate(zip(held(), snapshots, strict=True)):
                set_to(node, [x + (hat - kept) for x, hat, kept in zip(values, z, snapshot, strict=True)])
        if taken % k == 0 and run.rule == "cocod":
            snapshots, launched = held(), taken
        elif taken % k == 0 and run.rule in ("local", "asynlocal"):
            common = mean_of(held())
            for node in range(len(models)):
                set_to(node, common)
    last = held()
    return [last[worker // run.node_size] for worker in range(len(run.weights))]


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
