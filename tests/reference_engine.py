"""An independent serial reference of everything that composes: parts, codecs, outer rules, shares, nodes, weights.

Written from the definitions in docs/library.md and nothing else; it shares no code with the package. A node is one model
whose gradient is the weighted mean of its workers'. Local updates are added up step by step, as the definitions say, instead
of being read off the parameters; the outer rule is a ``torch.optim.SGD``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.reference import MakeOptimizer, Trace, period_at, shares, values
from tests.reference_payload import coded_chunks, weighted_mean


@dataclass(frozen=True)
class Case:
    """One run."""

    name: str
    periods: tuple[Any, ...]  # of each node; one for all but asynlocal: a number, or (first step, period) pairs
    weights: tuple[float, ...]  # of each worker
    fragments: int = 1
    payload: str = "fp32"
    own_share: float = 1.0
    outer: tuple[float, float, bool] = (1.0, 0.0, False)
    node_size: int = 1
    optimizer: str = "momentum"
    delay: int | None = None
    sharded: bool = False  # the workers of a node share its model out, as FSDP2 does, and each codes its own shard

    def num_steps(self, node: int, num_rounds: int) -> int:
        steps = 0
        for _ in range(num_rounds):
            steps += period_at(self.periods[node % len(self.periods)], steps)
        return steps


class SerialPart:
    """Some parameters on all nodes: the common point, what each node has added since, and what is in flight."""

    def __init__(self, indices: Sequence[int], models: Sequence[nn.Module], case: Case, w: Sequence[float]) -> None:
        self.indices, self.models, self.case, self.w = indices, models, case, w
        self.z = nn.Parameter(self.flat(0))
        rate, momentum, nesterov = case.outer
        self.outer = torch.optim.SGD([self.z], lr=rate, momentum=momentum, nesterov=nesterov)
        zero = torch.zeros_like(self.z.detach())
        self.since_launch = [zero.clone() for _ in models]  # u
        self.since_flight = [zero.clone() for _ in models]  # f
        self.in_flight: Tensor | None = None  # sum_j w_j u_j, until it has moved the common point
        self.waiting: set[int] = set()  # the nodes that have not merged it
        self.due: int | None = None  # the step after which it is merged, if not where it is launched again
        self.e = [zero.clone() for _ in models]
        self.owned = zero.clone()
        #: What each worker of a node codes, and in how many chunks.
        self.num_chunks = len(models) * (1 if case.sharded else case.node_size)
        self.places = [torch.arange(len(zero))]
        if case.sharded:
            begin, numbered = 0, []
            for index in indices:
                shape = list(models[0].parameters())[index].shape
                numbered.append(torch.arange(begin, begin + shape.numel()).view(shape))
                begin += shape.numel()
            self.places = [
                torch.cat(
                    [rows[place].flatten() for rows in (n.chunk(case.node_size) for n in numbered) if place < len(rows)]
                )
                for place in range(case.node_size)
            ]

    def coded(self, values: Tensor) -> Tensor:
        result = torch.zeros_like(values)
        for place in self.places:
            result[place] = coded_chunks(self.case.payload, values[place], self.num_chunks)
        return result

    def flat(self, node: int) -> Tensor:
        parameters = list(self.models[node].parameters())
        return torch.cat([parameters[i].detach().reshape(-1) for i in self.indices])

    def assign(self, node: int, flat: Tensor) -> None:
        parameters, offset = list(self.models[node].parameters()), 0
        with torch.no_grad():
            for i in self.indices:
                size = parameters[i].numel()
                parameters[i].copy_(flat[offset : offset + size].view_as(parameters[i]))
                offset += size

    def stepped(self, node: int, before: Tensor) -> None:
        change = self.flat(node) - before
        self.since_launch[node] = self.since_launch[node] + change
        self.since_flight[node] = self.since_flight[node] + change

    def launch(self) -> None:
        sent = self.since_launch
        if self.case.payload == "fp32":
            self.in_flight = self.mean(sent)
        else:
            wanted = [u + e for u, e in zip(sent, self.e, strict=True)]
            codes = [self.coded(v) for v in wanted]
            self.e = [v - q for v, q in zip(wanted, codes, strict=True)]
            total = weighted_mean(codes, self.w) + self.owned
            self.in_flight = self.coded(total)
            self.owned = total - self.in_flight
        self.waiting = set(range(len(self.models)))
        self.since_launch = [torch.zeros_like(u) for u in sent]
        self.since_flight = [torch.zeros_like(u) for u in sent]

    def mean(self, rows: Sequence[Tensor]) -> Tensor:
        return sum((wi * row for wi, row in zip(self.w, rows, strict=True)), torch.zeros(()))

    def merge(self, node: int, own_share: float) -> None:
        """The first node to come moves the common point."""
        if node not in self.waiting:
            return
        if self.in_flight is not None:
            self.z.grad = -self.in_flight
            self.outer.step()
            self.in_flight = None
        self.waiting.remove(node)
        self.assign(node, self.z.detach() + own_share * self.since_flight[node])


def run(
    case: Case,
    model: nn.Module,
    parts: Sequence[Sequence[int]],
    make_optimizer: MakeOptimizer,
    make_batch: Callable[[int, int], tuple[Tensor, Tensor]],
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor],
    num_rounds: int,
) -> tuple[Trace, list[Tensor]]:
    """Every worker's parameters after every step, and those of all after finish()."""
    nodes = [range(i, i + case.node_size) for i in range(0, len(case.weights), case.node_size)]
    models = [copy.deepcopy(model) for _ in nodes]
    optimizers = [make_optimizer(m) for m in models]
    w = shares([sum(case.weights[i] for i in node) for node in nodes])
    pieces = [SerialPart(indices, models, case, w) for indices in parts]
    trace: Trace = [[] for _ in nodes]
    steps, starts = [0] * len(nodes), [0] * len(nodes)

    def local_step(n: int) -> None:
        before = [piece.flat(n) for piece in pieces]
        optimizers[n].zero_grad()
        for share, i in zip(shares([case.weights[i] for i in nodes[n]]), nodes[n], strict=True):
            (share * loss_of(models[n], *make_batch(i, steps[n]))).backward()
        optimizers[n].step()
        steps[n] += 1
        for piece, old in zip(pieces, before, strict=True):
            piece.stepped(n, old)
        trace[n].append(values(models[n]))

    def next_turn(n: int) -> int:
        """Take steps up to the next one after which a part has its turn."""
        k = period_at(case.periods[n % len(case.periods)], starts[n])
        while True:
            local_step(n)
            for piece in pieces:
                if piece.due == steps[n]:
                    piece.merge(n, case.own_share)
            trace[n][-1] = values(models[n])
            if steps[n] - starts[n] == k:
                starts[n] = steps[n]
                return 0
            for part in range(1, case.fragments):
                if steps[n] - starts[n] == part * k // case.fragments:
                    return part

    ended = 0
    while ended < num_rounds:
        (part,) = {next_turn(n) for n in range(len(nodes))}
        piece = pieces[part]
        if case.name == "cocod":
            for n in range(len(nodes)):
                piece.merge(n, case.own_share)
            piece.launch()
            k = period_at(case.periods[0], starts[0])
            piece.due = steps[0] + min(case.delay, k) if case.delay is not None else None
        else:
            piece.launch()
            for n in range(len(nodes)):
                piece.merge(n, 0.0)
        for n, m in enumerate(models):
            trace[n][-1] = values(m)
        ended += part == 0
    for piece in pieces:
        for n in range(len(nodes)):
            piece.merge(n, 1.0)
            # What a merge inside the round left out has not been sent; no step is lost.
            piece.assign(n, piece.z.detach() + piece.since_launch[n])
    finished = [sum((wi * p.detach() for wi, p in zip(w, row, strict=True)), torch.zeros(()))
                for row in zip(*(m.parameters() for m in models), strict=True)]  # fmt: skip
    return [trace[i // case.node_size] for i in range(len(case.weights))], finished
