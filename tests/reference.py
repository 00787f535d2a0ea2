"""An independent serial reference: N workers in one process, in float64, written from the paper and nothing else.

It shares no code with the package. Local steps are torch optimizers on one copy of the model per worker; everything
between workers is spelled out on lists of tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Tensor, nn

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Trace = list[list[list[Tensor]]]  # [worker][step][parameter]


def shares(weights: Sequence[float]) -> list[float]:
    exact = [Fraction(weight) for weight in weights]
    return [float(weight / sum(exact)) for weight in exact]


def period_at(period: int | Sequence[tuple[int, int]], step: int) -> int:
    if isinstance(period, int):
        return period
    in_force = [k for first, k in period if first <= step]
    return in_force[-1]


def weighted_mean(models: Sequence[nn.Module], w: Sequence[float]) -> list[Tensor]:
    rows = zip(*(m.parameters() for m in models), strict=True)
    return [sum((wi * p.detach() for wi, p in zip(w, row, strict=True)), torch.zeros(())) for row in rows]


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assign(model: nn.Module, new: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for p, value in zip(model.parameters(), new, strict=True):
            p.copy_(value)


def run(
    name: str,
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    batches: Sequence[Sequence[tuple[Tensor, Tensor]]],
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor],
    weights: Sequence[float],
    periods: Sequence[int | Sequence[tuple[int, int]]],
    skipped: Sequence[set[int]] | None = None,
    policy: str = "keep",
    parts: Sequence[Sequence[int]] | None = None,
    delay: int = 1,
    mix: float = 0.5,
    outer: tuple[float, float] = (0.7, 0.9),
) -> Trace:
    """Every worker's parameters after every step.

    ``policy``: what becomes of optimizer state at a merge. "reset": a new optimizer. "average": a weighted mean.

    ``parts`` (numbers of parameters), ``delay`` and ``mix`` are of streaming DiLoCo, ``outer`` (rate, Nesterov momentum) of
    it and of DiLoCo.

    ``batches[i][t]`` is worker i's batch at its step t; ``periods[i]`` its period; ``skipped[i]`` the steps at
    which it computes gradients and drops them.
    """
    n = len(batches)
    w = shares(weights)
    models = [copy.deepcopy(model) for _ in range(n)]
    optimizers = [make_optimizer(m) for m in models]
    skip = skipped or [set() for _ in range(n)]
    trace: Trace = [[] for _ in range(n)]

    def gradients(i: int, t: int) -> list[Tensor]:
        models[i].zero_grad()
        loss_of(models[i], *batches[i][t]).backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in models[i].parameters()]

    def step_with(i: int, grads: Sequence[Tensor]) -> None:
        for p, g in zip(models[i].parameters(), grads, strict=True):
            p.grad = g.clone()
        optimizers[i].step()

    def local_step(i: int, t: int) -> None:
        grads = gradients(i, t)
        if t not in skip[i]:
            step_with(i, grads)

    def merge_optimizers() -> None:
        if policy == "reset":
            optimizers[:] = [make_optimizer(m) for m in models]
        elif policy == "average":
            for row in zip(*(m.parameters() for m in models), strict=True):
                states = [optimizers[i].state[p] for i, p in enumerate(row)]
                for key in [k for k in states[0] if k != "step"]:
                    mean = sum((wi * state[key] for wi, state in zip(w, states, strict=True)), torch.zeros(()))
                    for state in states:
                        state[key] = mean.clone()

    if name in ("ssgd", "pipe"):
        previous: list[Tensor] | None = None
        for t in range(len(batches[0])):
            per_worker = [gradients(i, t) for i in range(n)]
            mean = [
                sum((wi * g for wi, g in zip(w, row, strict=True)), torch.zeros(())) for row in zip(*per_worker, strict=True)
            ]
            if name == "ssgd":
                used = mean
            else:
                used = previous if previous is not None else [torch.zeros_like(g) for g in mean]
                previous = mean
            for i in range(n):
                step_with(i, used)
                trace[i].append(values(models[i]))
        return trace

    if name == "asynlocal":
        steps = [0] * n
        while all(steps[i] < len(batches[i]) for i in range(n)):
            for i in range(n):
                for _ in range(period_at(periods[i], steps[i])):
                    local_step(i, steps[i])
                    steps[i] += 1
                    trace[i].append(values(models[i]))
            mean = weighted_mean(models, [1 / n] * n)
            merge_optimizers()
            for i in range(n):
                assign(models[i], mean)
                trace[i][-1] = values(models[i])
        return trace

    if name in ("diloco", "streaming_diloco"):
        every = [list(range(len(values(model))))] if parts is None else [list(part) for part in parts]
        z, velocity = values(model), [torch.zeros_like(p) for p in values(model)]
        flying: dict[int, tuple[int, list[Tensor]]] = {}  # by part: the step after which it is merged, the mean

        def outer_step(part: int, mean: list[Tensor]) -> None:
            rate, momentum = outer
            for index in every[part]:
                gradient = z[index] - mean[index]
                velocity[index] = momentum * velocity[index] + gradient
                z[index] = z[index] - rate * (gradient + momentum * velocity[index])

        def arrive(part: int) -> None:
            _, mean = flying.pop(part)
            outer_step(part, mean)
            for m in models:
                now = values(m)
                for index in every[part]:
                    now[index] = mix * now[index] + (1 - mix) * z[index]
                assign(m, now)

        begun, k = 0, period_at(periods[0], 0)
        for t in range(len(batches[0])):
            for i in range(n):
                local_step(i, t)
            done = t + 1
            for part in [part for part, (due, _) in flying.items() if due == done]:
                arrive(part)
                if part == 0:
                    merge_optimizers()
            sent = [part for part in range(1, len(every)) if done - begun == part * k // len(every)]
            sent += [0] if done - begun == k else []
            for part in sent if n > 1 else []:
                mean = weighted_mean(models, w)
                if name == "diloco":
                    outer_step(part, mean)
                    for m in models:
                        now = values(m)
                        for index in every[part]:
                            now[index] = z[index].clone()
                        assign(m, now)
                    continue
                if part in flying:
                    arrive(part)
                flying[part] = (done + min(delay, period_at(periods[0], done if part == 0 else begun)), mean)
            if done - begun == k:
                if name == "diloco":
                    merge_optimizers()
                begun, k = done, period_at(periods[0], done)
            for i in range(n):
                trace[i].append(values(models[i]))
        return trace

    assert name in ("local", "cocod"), f"no rule for {name} here; write it first"
    # All workers at the same step.
    start, end = 0, period_at(periods[0], 0)
    snapshots = [values(m) for m in models]
    mean_t = weighted_mean(models, w)
    for t in range(len(batches[0])):
        for i in range(n):
            local_step(i, t)
        if t + 1 == end:
            if name == "local":
                mean = weighted_mean(models, w)
                for m in models:
                    assign(m, mean)
            else:
                for m, snapshot in zip(models, snapshots, strict=True):
                    assign(m, [x + (hat - x_t) for hat, x, x_t in zip(mean_t, values(m), snapshot, strict=True)])
                snapshots = [values(m) for m in models]
                mean_t = weighted_mean(models, w)
            merge_optimizers()
            start = t + 1
            end = start + period_at(periods[0], start)
        for i in range(n):
            trace[i].append(values(models[i]))
    return trace


def served(
    model: nn.Module,
    script: Sequence[int],
    batches: Sequence[Sequence[tuple[Tensor, Tensor]]],
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor],
    weights: Sequence[float],
    max_staleness: int,
    *,
    rate: Callable[[int], float],
    momentum: float = 0.0,
    decay: float = 0.0,
) -> tuple[list[list[Tensor]], list[int]]:
    """A server that gets gradients from the workers in ``script``, one after the other; its model after each of them, and
    how many updates each gradient was late.

    The k-th gradient of a worker is of the model that answered its gradient k - 1 - s, the start for the first ones. With
    N workers: v <- m v + N w_i g + d x, x <- x - (rate of the k-th step / N) v.
    """
    n, w = len(weights), shares(weights)
    x = values(model)
    v = [torch.zeros_like(p) for p in x]
    answers: list[list[tuple[int, list[Tensor]]]] = [[(0, x)] * (1 + max_staleness) for _ in weights]
    trace: list[list[Tensor]] = []
    late = []
    for version, i in enumerate(script):
        k = len(answers[i]) - 1 - max_staleness
        known, at = answers[i][k]
        probe = copy.deepcopy(model)
        assign(probe, at)
        g = torch.autograd.grad(loss_of(probe, *batches[i][k]), list(probe.parameters()))
        v = [momentum * b + n * w[i] * gi + decay * p for b, gi, p in zip(v, g, x, strict=True)]
        x = [p - rate(k) / n * b for p, b in zip(x, v, strict=True)]
        late.append(version - known)
        answers[i].append((version + 1, x))
        trace.append(x)
    return trace, late
